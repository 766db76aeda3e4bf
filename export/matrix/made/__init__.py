"""What the rows of the matrix are made of: networks, checkpoints, ONNX files and pictures, written into a folder.

The only room of the matrix that imports torch and onnx. Knows how each is written, and nothing of what becomes of it.
"""
