"""`convoy batch`: label millions of images, without a server.

    inputs    what INPUT names, cut into parts, and their images    job       the options of a run, and the bundle
    records   what processes send each other                        labeller  decode, compute, score: full batches
    results   the folder of results: its run, its parts             worker    one process that labels
    workers   several of them, here or on a Ray cluster             command   from the options to the last part

A part is the unit of retry after a failure; its file records which images it has.
"""
