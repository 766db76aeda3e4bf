"""Printed characters drawn from free fonts: 62 classes, tested on faces that nothing was learned from.

Knows fonts, how a character is drawn and where drawn images are kept. Knows nothing of samples, parts' use or training.
`python -m convoy.models.glyphs FOLDER` draws a set as a folder of PNG files.
"""
