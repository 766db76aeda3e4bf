"""What a training is made of, piece by piece; `convoy.models.train` is the order of the work.

schedule    the learning rate over the run           feed        images in batches: from memory, or decoded by workers
held_out    the images that choose the best epoch    networks    what learns: the zoo's or torchvision's, weights, head
epochs      what is known of an epoch                unfinished  a run on disk, from which the same command goes on
meters      seconds, memory and energy               log, page   what a person or a program reads afterwards
"""
