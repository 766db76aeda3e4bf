"""A module in memory as a file for the child. Runs in the process that has the module."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from convoy.export.sources.torch_job import one_line
from convoy.models.errors import JobError, UsageError

_MAX_BATCH = 4096


def save_module(module: Any, shapes: Sequence[tuple[int, ...]], file: Path) -> None:
    """Save the module as a torch.export program with a dynamic batch, for inputs of these `shapes` without the batch.

    Raises UsageError if it is not a module, and JobError if it cannot be traced.
    """
    if not isinstance(module, torch.nn.Module):
        raise UsageError(f"model is a {type(module).__name__}; pass a torch.nn.Module or the path of an ONNX file")
    example = tuple(torch.zeros(2, *shape) for shape in shapes)
    batch = torch.export.Dim("batch", min=1, max=_MAX_BATCH)
    try:
        # The user's module stays on its device and in its mode.
        own = copy.deepcopy(module).cpu().eval()
        program = torch.export.export(own, example, dynamic_shapes=tuple({0: batch} for _ in example))
        torch.export.save(program, file)
    except Exception as error:  # torch.export's errors share no base class
        raise JobError(
            f"torch.export cannot trace {type(module).__name__} for inputs {list(shapes)} ({one_line(str(error))}); "
            "pass 'file.py:factory' as the model"
        ) from error
