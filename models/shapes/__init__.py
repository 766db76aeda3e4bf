"""Pictures of circles, squares, triangles and stars, drawn from a seed, with the box and the pixels of each shape.

`python -m convoy.models.shapes FOLDER` draws a set as a COCO folder with masks.
"""
