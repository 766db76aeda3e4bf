"""Weights from a file of whoever trained them, for a network that is there.

reading   a file -> tensors under the network's own names, or why not, and what was done for that
foreign   a file that has objects of other classes beside its tensors, none of which are made
names     other people's names for the network's tensors
versions  the versions of the network's parts, which a file of torch's keeps beside its tensors
key       what `--weights-key` may be said of
misfit    why weights do not fit, in one line
"""
