"""Ultralytics' networks in the form in which its exporter writes them, and the facts that it puts beside them.

Nothing of Ultralytics is imported: the user's code does that, and the classes are known by their names. Source:
Ultralytics' exporter and heads (8.4).
"""

from __future__ import annotations

from typing import Any

import torch

# Tasks by the class of the head; newer heads derive from these.
_TASKS = {"OBB": "obb", "Pose": "pose", "Segment": "segment", "Classify": "classify"}
_OURS = ("Detect", "RTDETRDecoder", *_TASKS)


def unwrapped(network: Any) -> Any:
    """The network inside a `YOLO` object, whose call is `predict()`; everything else as it is."""
    return network.model if _is_of(network, "ultralytics.engine.model") else network


def set_export_form(network: torch.nn.Module) -> None:
    """Let its heads return what they predict and nothing for training, in place. Other networks are left alone."""
    part: Any
    for part in network.modules():
        if isinstance(getattr(part, "export", None), bool) and _is_of(part, "ultralytics.nn"):
            part.export = True


def metadata(network: Any) -> dict[str, str]:
    """What Ultralytics' exporter would write into an ONNX file; empty for other networks, or an unknown head."""
    if not _is_of(network, "ultralytics.nn.tasks"):
        return {}
    head: Any = list(network.model)[-1]
    kinds = [kind.__name__ for kind in type(head).__mro__]
    if not set(kinds) & set(_OURS):
        return {}
    sides = getattr(network, "args", None) or {}
    side = sides.get("imgsz", 640) if isinstance(sides, dict) else 640
    said = {
        "names": repr(getattr(network, "names", {})),
        "stride": str(int(max(network.stride))) if hasattr(network, "stride") else "",
        "task": next((_TASKS[kind] for kind in kinds if kind in _TASKS), "detect"),
        "head": type(head).__name__,
        "end2end": str(bool(getattr(head, "end2end", False))),
        "imgsz": repr([side, side] if isinstance(side, int) else list(side)),
    }
    return said | ({"kpt_shape": repr(list(head.kpt_shape))} if hasattr(head, "kpt_shape") else {})


def _is_of(one: Any, package: str) -> bool:
    return any(f"{kind.__module__}.".startswith(f"{package}.") for kind in type(one).__mro__)
