"""Weights from a file of any origin, for an existing network.

reading   a file -> tensors under the network's names, or why not, and what was done for that; objects of other
          classes beside the tensors are never created
names     other names for the network's tensors
versions  the versions of the network's parts, which torch's files keep beside the tensors
key       where `--weights-key` is allowed
"""
