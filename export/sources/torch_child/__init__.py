"""The torch side of export: runs alone in a child interpreter and turns a network into ONNX.

    __main__    input and output
    child       one job, and how every failure becomes one line
    networks    SOURCE -> torch.nn.Module
    registries  the metadata of torchvision's and timm's models
    untrained   which weights a factory drew at random instead of loading them
    graph       module -> ONNX file, and the module's own answers

Weights from a file are read as by `convoy train` (`convoy.models.weights`). Only this package of export imports torch.
A user's file changes the import path (`convoy.export.sources.user_code`), so everything of ours is imported before
that.
"""
