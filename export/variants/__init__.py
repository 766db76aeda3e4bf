"""The precisions of a network: one row and one file each, from one pass over the calibration images."""
