"""A module in memory as a file for the child. Runs in the process that has the module."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from convoy.export.sources.torch_child import ultralytics_form
from convoy.export.sources.torch_job import DESCRIPTION, Description, one_line
from convoy.models.errors import JobError, UsageError
from convoy.models.records import to_jsonable

_MAX_BATCH = 4096


def own_copy(model: Any) -> torch.nn.Module:
    """A copy of the user's module on the CPU in evaluation mode. Raises UsageError if it is not a module."""
    module = ultralytics_form.unwrapped(model)
    if not isinstance(module, torch.nn.Module):
        raise UsageError(f"model is a {type(model).__name__}; pass a torch.nn.Module or the path of an ONNX file")
    # The user's stays on its device and in its mode.
    own = copy.deepcopy(module).cpu().eval()
    ultralytics_form.set_export_form(own)
    return own


def save_module(module: torch.nn.Module, shapes: Sequence[tuple[int, ...]], said: Description, file: Path) -> None:
    """Save the module as a torch.export program with a dynamic batch, for inputs of these `shapes` without the batch.

    The file also holds what the network says of itself. Raises JobError if it cannot be traced.
    """
    example = tuple(torch.zeros(2, *shape) for shape in shapes)
    batch = torch.export.Dim("batch", min=1, max=_MAX_BATCH)
    try:
        program = torch.export.export(module, example, dynamic_shapes=tuple({0: batch} for _ in example))
        extra = {DESCRIPTION: json.dumps(to_jsonable(said))} if said.metadata else None
        torch.export.save(program, file, extra_files=extra)
    except Exception as error:  # torch.export's errors share no base class
        raise JobError(
            f"torch.export cannot trace {type(module).__name__} for inputs {list(shapes)} ({one_line(str(error))}); "
            "pass 'file.py:factory' as the model"
        ) from error
