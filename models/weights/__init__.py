"""Weights from a file of whoever trained them, for a network that is there.

reading   a file -> tensors under the network's own names, or why not, and what was done for that; objects of other
          classes beside the tensors are never made
names     other people's names for the network's tensors
versions  the versions of the network's parts, which a file of torch's keeps beside its tensors
key       what `--weights-key` may be said of
"""
