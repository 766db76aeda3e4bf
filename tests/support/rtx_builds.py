"""One build as plain as can be, with the installed TensorRT for RTX or the fake one, and what it logs."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def collecting(trt: Any) -> Any:
    class Logger(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.errors: list[str] = []

        def log(self, severity: Any, msg: str) -> None:
            if severity.name == "ERROR":
                self.errors.append(msg)

    logger = Logger()
    _kept.append(logger)
    return logger


# For good: the real library goes on telling the first one that it was given, and does not keep it alive.
_kept: list[Any] = []


def build(trt: Any, onnx: Path) -> Any:
    """The plan of one graph."""
    logger = collecting(trt)
    builder = trt.Builder(logger)
    network = builder.create_network(0)
    assert trt.OnnxParser(network, logger).parse_from_file(str(onnx))
    config, profile = builder.create_builder_config(), builder.create_optimization_profile()
    for index in range(network.num_inputs):
        tensor = network.get_input(index)
        rest = tuple(tensor.shape)[1:]
        profile.set_shape(tensor.name, (1, *rest), (8, *rest), (8, *rest))
    config.add_optimization_profile(profile)
    return builder.build_serialized_network(network, config)
