"""Printed characters drawn from free fonts: 62 classes, tested on fonts that were not in the training set.

`python -m convoy.models.glyphs FOLDER` draws a set as a folder of PNG files.
"""
