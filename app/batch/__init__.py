"""`convoy batch`: labels for millions of images, without a queue and without a wire.

    inputs    what INPUT names, counted and cut into parts          reading   a part's images, one by one
    job       what is asked, and the bundle that answers            labeller  decode, compute, score: full batches
    part_file a part on disk, whole or not at all                   run_file  which run a folder belongs to
    worker    one process that labels        local  several of them here        on_ray  the same on a cluster
    command   from the options to the last part                     progress  what is told meanwhile

A part is what is done again after a failure; its file says itself which images are in it.
"""
