"""The parts of a training; `convoy.models.train` has the order of the work.

schedule    the learning rate over the run           feed        images in batches: from memory, or decoded by workers
held_out    the images that choose the best epoch    networks    the network: the zoo's or torchvision's, weights, head
epochs      the record of an epoch                   unfinished  a run on disk, from which the same command continues
objectives  what is learned: classes, boxes (detecting), masks (segmenting); drawn_data has the shapes
meters      seconds, memory and energy               log, page   the output for people and programs
"""
