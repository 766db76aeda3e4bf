"""The torch side of export: runs alone in a child interpreter and turns a network into ONNX.

    __main__    what comes in and what goes out
    child       one job, and how everything that fails becomes one line
    networks    SOURCE -> torch.nn.Module
    registries  what torchvision and timm say of their own models
    untrained   which weights a factory drew at random instead of loading them
    graph       module -> ONNX file, and the module's own answers

Weights from a file are read as `convoy train` reads them (`convoy.models.weights`).

The only room of export that imports torch. Knows nothing of bundles, engines or accuracy. A user's file takes
the interpreter over (`convoy.export.sources.user_code`), so everything of ours is imported before that.
"""
