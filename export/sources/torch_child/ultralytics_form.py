"""Ultralytics' networks in the form in which its exporter writes them, and the metadata that it adds.

Nothing of Ultralytics is imported: the user's code does that, and the classes are known by their names. Source:
Ultralytics' exporter and heads (8.4).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from convoy.export.sources.torch_child import outputs
from convoy.export.sources.torch_job import Description

# Tasks by the class of the head; newer heads derive from these.
_TASKS = {"OBB": "obb", "Pose": "pose", "Segment": "segment", "Classify": "classify"}
_USUAL_PX = 640
_HEADS = ("Detect", "RTDETRDecoder", *_TASKS)


def unwrapped(network: Any) -> Any:
    """The network inside a `YOLO` object, whose call is `predict()`; everything else as it is."""
    return network.model if _is_of(network, "ultralytics.engine.model") else network


def set_export_form(network: torch.nn.Module) -> None:
    """Let its heads return what they predict and nothing for training, in place. Other networks are left alone."""
    part: Any
    for part in network.modules():
        if isinstance(getattr(part, "export", None), bool) and _is_of(part, "ultralytics.nn"):
            part.export = True


def describe(network: torch.nn.Module, size: Sequence[int] = ()) -> Description:
    """Its metadata, and the shapes of its outputs for an image of this size (height, width), by default its own.

    Empty for other networks. `network` is in evaluation mode and in its export form.
    """
    said = _metadata(network)
    if not said:
        return Description()
    size = tuple(size or _own_size(network))
    like = next(network.parameters())
    try:
        with torch.no_grad():
            answer = network(torch.zeros(1, 3, *size, dtype=like.dtype, device=like.device))
    except Exception:  # the error is reported when it must run
        return Description()
    shapes = {name: tuple(one.shape) for name, one in outputs.named(answer, ()).items()}
    return Description(metadata=said, outputs=shapes, size=size)


def _own_size(network: Any) -> Sequence[int]:
    """The height and width for which it was trained."""
    options = getattr(network, "args", None)
    side = options.get("imgsz", _USUAL_PX) if isinstance(options, dict) else _USUAL_PX
    return (side, side) if isinstance(side, int) else side


def _metadata(network: Any) -> dict[str, str]:
    """What Ultralytics' exporter would write into an ONNX file; empty for other networks, or an unknown head."""
    if not _is_of(network, "ultralytics.nn.tasks"):
        return {}
    head: Any = list(network.model)[-1]
    kinds = [kind.__name__ for kind in type(head).__mro__]
    if not set(kinds) & set(_HEADS):
        return {}
    said = {
        "names": repr(getattr(network, "names", {})),
        "stride": str(int(max(network.stride))) if hasattr(network, "stride") else "",
        "task": next((_TASKS[kind] for kind in kinds if kind in _TASKS), "detect"),
        "head": type(head).__name__,
        "end2end": str(bool(getattr(head, "end2end", False))),
    }
    return said | ({"kpt_shape": repr(list(head.kpt_shape))} if hasattr(head, "kpt_shape") else {})


def _is_of(one: Any, package: str) -> bool:
    return any(f"{kind.__module__}.".startswith(f"{package}.") for kind in type(one).__mro__)
