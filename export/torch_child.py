"""The torch side of export: runs alone in a child interpreter and turns a network into ONNX.

Knows torch, and is the only file of export that imports it. Knows nothing of bundles, engines or accuracy.
Whatever goes wrong is one line in the outcome; what torch prints goes where the parent sent it. A user's file
takes the interpreter over (`export.user_code`), so everything of ours is imported before that.
"""

from __future__ import annotations

import errno
import importlib
import json
import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from export import torch_job as files
from export.misfit import misfit
from export.torch_job import TENSOR, Job, Outcome, one_line
from export.user_code import call_factory
from models.errors import ConvoyError, JobError
from models.records import from_jsonable, to_jsonable

if TYPE_CHECKING:
    import torch

# What torch writes without converting; QDQ of every kind can be expressed in it.
_OPSET = 20
_REFERENCE_BATCH = 8


def main(folder: Path) -> None:
    """Do the job that lies in `folder`. Every ending but sudden death writes an outcome."""
    threading.Thread(target=_die_with_parent, daemon=True).start()
    job = from_jsonable(Job, json.loads((folder / files.JOB).read_text()), files.JOB)
    try:
        outcome = _export(job, folder)
    except ConvoyError as error:
        outcome = Outcome(one_line(str(error), 1000), 0, "")
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        outcome = Outcome(f"the disk of {folder.parent} is full; free some space and run the command again", 0, "")
    except MemoryError:
        outcome = Outcome("the network does not fit into memory; close other programs or use a larger machine", 0, "")
    (folder / files.OUTCOME).write_text(json.dumps(to_jsonable(outcome)))


def _die_with_parent() -> None:
    # The parent holds the other end of stdin open; even a parent that is killed lets go of it.
    os.read(sys.stdin.fileno(), 1)
    os._exit(1)


def _export(job: Job, folder: Path) -> Outcome:
    try:
        import torch
    except ImportError as error:
        raise JobError(f"export needs torch, which does not load here ({error}); run `make test` once") from error
    from safetensors.torch import load, save

    torch.set_num_threads(job.threads)
    torch.manual_seed(0)
    network = _network(job)
    if job.weights is not None:
        _load_weights(network, Path(job.weights))
    network.eval()
    samples = load((folder / files.SAMPLES).read_bytes())[TENSOR]
    reference = _reference(network, job, samples)
    (folder / files.REFERENCE).write_bytes(save({TENSOR: reference.contiguous()}))
    _write_onnx(network, job, samples, folder / files.ONNX)
    return Outcome(None, reference.shape[1], str(torch.__version__))


def _network(job: Job) -> torch.nn.Module:
    from torch import nn

    if job.kind == "file":
        assert job.file is not None
        network = call_factory(Path(job.file), job.name)
    elif job.kind == "zoo":
        network = importlib.import_module("models.zoo").create(job.name, job.classes)
    else:
        network = _from_torchvision(job)
    if not isinstance(network, nn.Module):
        raise JobError(f"{job.name} returned a {type(network).__name__}; it must return a torch.nn.Module")
    return network


def _from_torchvision(job: Job) -> Any:
    try:
        from torchvision import models
    except ImportError as error:
        raise JobError(f"torchvision does not load here ({error}); run `make test` once") from error
    if job.name not in models.list_models(module=models):
        raise JobError(f"torchvision has no classification model {job.name!r}; see torchvision.models.list_models()")
    wanted = {} if job.classes is None else {"num_classes": job.classes}
    return models.get_model(job.name, weights=None, **wanted)


def _load_weights(network: torch.nn.Module, path: Path) -> None:
    weights = _without_prefix(_read_weights(path))
    expected = network.state_dict()
    problem = misfit(
        {name: tuple(tensor.shape) for name, tensor in weights.items()},
        {name: tuple(tensor.shape) for name, tensor in expected.items()},
    )
    if problem is not None:
        raise JobError(f"the weights in {path.name} do not fit the network: {problem}")
    network.load_state_dict(weights)


def _read_weights(path: Path) -> dict[str, torch.Tensor]:
    if path.suffix == ".safetensors":
        from safetensors.torch import load

        try:
            return load(path.read_bytes())
        except Exception as error:  # safetensors raises several kinds
            raise JobError(f"cannot read {path.name} as safetensors ({error}); check the file") from error
    import torch

    try:
        found: Any = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a zip, pickle or storage error, by format; torch's advice is to trust the file
        raise JobError(f"{path.name} is not plain tensors; save the network's state_dict as safetensors") from error
    for key in ("state_dict", "model_state_dict", "model"):
        if isinstance(found, dict) and isinstance(found.get(key), dict):
            found = found[key]
    if not isinstance(found, dict) or not all(isinstance(value, torch.Tensor) for value in found.values()):
        raise JobError(f"{path.name} holds no state_dict; save model.state_dict() as safetensors")
    return found


def _without_prefix(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    # DataParallel names every tensor of the network it wraps "module.something".
    if all(name.startswith("module.") for name in weights):
        return {name.removeprefix("module."): tensor for name, tensor in weights.items()}
    return weights


def _reference(network: torch.nn.Module, job: Job, samples: torch.Tensor) -> torch.Tensor:
    """float32 [N, classes] of the bare network; the normalisation is written out, not the front's, to prove it."""
    import torch

    outputs = []
    with torch.inference_mode():
        for batch in torch.split(samples, _REFERENCE_BATCH):
            if job.uint8_front:
                batch = batch.permute(0, 3, 1, 2).float() / 255
                batch = (batch - _per_channel(job.mean)) / _per_channel(job.std)
            outputs.append(_forward(network, batch))
    reference = torch.cat(outputs)
    if not torch.isfinite(reference).all():
        raise JobError("the network answers NaN or infinity on the sample images; check the weights and --preprocess")
    return reference


def _forward(network: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    import torch

    try:
        output = network(batch)
    except Exception as error:  # it is the user's code
        why = one_line(str(error), 200)
        raise JobError(f"the network fails on float32 {list(batch.shape)}: {why}; check --input") from error
    if not isinstance(output, torch.Tensor):
        raise JobError(f"the network returns a {type(output).__name__}; it must return one tensor [N, classes]")
    if output.ndim != 2 or len(output) != len(batch):
        raise JobError(f"the network returns {list(output.shape)} for {len(batch)} images; it must return [N, classes]")
    return output.float()


def _per_channel(values: Sequence[float]) -> torch.Tensor:
    import torch

    return torch.tensor(values, dtype=torch.float32).view(1, -1, 1, 1)


def _with_front(network: torch.nn.Module, job: Job) -> torch.nn.Module:
    """The network behind uint8 [N, H, W, C]: layout while it is still bytes, then cast, then one x * a + b."""
    import torch
    from torch import nn

    class Front(nn.Module):
        scale: torch.Tensor
        shift: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.network = network
            std = _per_channel(job.std)
            self.register_buffer("scale", 1 / (255 * std))
            self.register_buffer("shift", -_per_channel(job.mean) / std)

        def forward(self, images: torch.Tensor) -> Any:
            values = images.permute(0, 3, 1, 2).to(torch.float32)
            return self.network(values * self.scale + self.shift)

    return Front().eval()


def _write_onnx(network: torch.nn.Module, job: Job, samples: torch.Tensor, path: Path) -> None:
    import torch

    model = _with_front(network, job) if job.uint8_front else network
    assert not any(module.training for module in model.modules()), "a network in training mode; this is a bug"
    # A batch of 1 would be taken for a constant.
    example = samples[:2] if len(samples) > 1 else samples.repeat(2, *[1] * (samples.ndim - 1))
    batch = torch.export.Dim("batch", min=1, max=max(3, job.max_batch))
    try:
        program = torch.onnx.export(
            model,
            (example,),
            dynamo=True,
            opset_version=_OPSET,
            input_names=[files.INPUT_NAME],
            output_names=[files.OUTPUT_NAME],
            dynamic_shapes=({0: batch},),
            verbose=False,
        )
    except Exception as error:  # the exporter's errors share no base class
        raise JobError(
            f"torch cannot export this network to ONNX: {_root_cause(error)}; "
            "avoid operators without an ONNX form, and control flow that depends on the data"
        ) from error
    assert program is not None
    path.write_bytes(_without_traces(program.model_proto).SerializeToString())


def _without_traces(model: Any) -> Any:
    """The exporter notes source lines with their paths on every node: nobody else's business, and bulk."""
    graph = model.graph
    for item in (model, graph, *graph.node, *graph.input, *graph.output, *graph.value_info, *graph.initializer):
        item.ClearField("metadata_props")
        item.ClearField("doc_string")
    return model


def _root_cause(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return one_line(str(error), 120) or type(error).__name__


if __name__ == "__main__":
    main(Path(sys.argv[1]))
