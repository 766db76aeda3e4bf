"""From a network to an ONNX file that takes batches, and the network's own answers as the reference.

Knows the exporter, the uint8 front and large files. The answers are computed without the front.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import torch
from torch import nn

from convoy.export.sources import torch_job as files
from convoy.export.sources.onnx_file import portable
from convoy.export.sources.torch_child import outputs, pools
from convoy.export.sources.torch_job import TorchJob, one_line
from convoy.models.errors import JobError
from convoy.models.samples import some

# Of an answer's length: an input that is off by rounding, through all layers, changes less, and another choice of
# queries changes more.
_MOVED = 1e-3


def normalised(samples: Sequence[torch.Tensor], job: TorchJob) -> Sequence[torch.Tensor]:
    """The input of the bare network, from samples in the job's format: images normalised, [N, C, H, W]."""
    if not job.uint8_front:
        return samples
    (images,) = samples
    values = images.permute(0, 3, 1, 2).float() / 255
    return [(values - _per_channel(job.mean)) / _per_channel(job.std)]


def settle(network: torch.nn.Module, job: TorchJob, samples: Sequence[torch.Tensor]) -> None:
    """Run lazy layers once, which take their shapes from their input. Raises JobError if that fails."""
    lazy = torch.nn.parameter.UninitializedParameter | torch.nn.parameter.UninitializedBuffer
    if any(isinstance(one, lazy) for one in (*network.parameters(), *network.buffers())):
        network.eval()
        with torch.no_grad():
            answer(network, job, normalised([one[:2] for one in samples], job))


def why_alone(network: torch.nn.Module, job: TorchJob, samples: Sequence[torch.Tensor]) -> str:
    """Why the network cannot take several samples at once, although it takes one; otherwise empty.

    Raises JobError if memory is short.
    """
    # More than one, and not a number that a network is likely to be fixed at.
    several = 3
    few, one = ([tensor[:count] for tensor in samples] for count in (several, 1))
    if len(few[0]) < several:
        return ""
    with torch.no_grad():
        try:
            answer(network, job, normalised(few, job))
        except JobError as error:
            if is_want_of_memory(error):
                raise
            problem = str(error).removesuffix("; check --input")
        else:
            return ""
        try:
            answer(network, replace(job, is_alone=True), normalised(one, job))
        except JobError:
            return ""  # the error is reported when it gets all samples
    return problem


def is_want_of_memory(error: BaseException) -> bool:
    """Whether it is an out-of-memory error of torch, the C++ library or the exporter."""
    words = ("can't allocate memory", "bad_alloc", "not enough memory", "Cannot allocate memory", "MemoryError")
    return isinstance(error, MemoryError) or any(word in str(error) for word in words)


def reference(network: torch.nn.Module, job: TorchJob, samples: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """The bare network's outputs by name, floats as float32. The normalisation is written out and not the front's, to
    prove that.
    """
    answers = _answers(network, job, samples)
    broken = [name for name, one in answers.items() if one.is_floating_point() and not torch.isfinite(one).all()]
    if broken:
        what = f" in {broken[0]}" if len(answers) > 1 else ""
        raise JobError(
            f"the network answers NaN or infinity on the sample images{what}; check the weights and --preprocess"
        )
    return answers


def on_noise(network: torch.nn.Module, job: TorchJob, samples: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same for noise, for which NaN and infinity are valid; empty if the network does not run on it."""
    try:
        answers = _answers(network, job, samples)
        return _without_close_calls(answers, network, job, samples) if job.layout == "detr" else answers
    except (JobError, RuntimeError):
        return {}


def _without_close_calls(
    answers: dict[str, torch.Tensor], network: torch.nn.Module, job: TorchJob, samples: Sequence[torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The answers with NaN for samples on which rounding changes them; empty if it does on all.

    Many places of noise are alike, and some DETRs take the best of them as queries. Which ones is up to the last bit.
    """
    moved = _answers(network, job, samples, is_moved=True)
    is_close = torch.zeros(len(samples[0]), dtype=torch.bool)
    for name, one in answers.items():
        is_close |= (moved[name] - one).flatten(1).norm(dim=1) > _MOVED * one.flatten(1).norm(dim=1)
    if is_close.all():
        return {}
    return {name: one.masked_fill(is_close.view(-1, *[1] * (one.ndim - 1)), torch.nan) for name, one in answers.items()}


def _answers(
    network: torch.nn.Module, job: TorchJob, samples: Sequence[torch.Tensor], *, is_moved: bool = False
) -> dict[str, torch.Tensor]:
    """With `is_moved`, each value of the input is off by what rounding of all layers amounts to, and so are zeros."""
    generator = torch.Generator().manual_seed(0)

    def given(batch: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        values = normalised(batch, job)
        return [one + 1e-5 * torch.randn(one.shape, generator=generator) for one in values] if is_moved else values

    with torch.inference_mode(), _in_evaluation(network, job):
        size = 1 if job.is_alone else 8
        batches = zip(*(torch.split(one, size) for one in samples), strict=True)
        parts = [answer(network, job, given(batch)) for batch in batches]
    try:
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    except (RuntimeError, KeyError) as error:  # shapes or names that differ
        raise JobError(
            f"the network's outputs differ in shape from batch to batch ({one_line(str(error))}), so that it "
            "cannot be batched; return tensors whose shapes do not depend on the values"
        ) from error


def elsewhere(
    network: torch.nn.Module, job: TorchJob, samples: Mapping[str, torch.Tensor]
) -> tuple[dict[str, dict[str, torch.Tensor]], str]:
    """The outputs for the first of `samples`, by name, at the sizes at which the network runs; or why there are too
    few.
    """
    answers: dict[str, dict[str, torch.Tensor]] = {}
    problem = ""
    for name in sorted(samples):
        try:
            answers[name] = reference(network, job, (samples[name],))
        except JobError as error:
            problem = problem or str(error).removesuffix("; check --input")
        if len(answers) == files.OTHER_SIZES:
            return answers, ""
    return {}, problem


@contextmanager
def _in_evaluation(network: torch.nn.Module, job: TorchJob) -> Iterator[None]:
    """Raise JobError at the end if a module ran in training mode, because its answers are not reproducible."""
    trained: dict[str, str] = {}

    def watch(name: str) -> Any:
        def note(module: torch.nn.Module, inputs: object) -> None:
            if module.training:
                trained.setdefault(name, type(module).__name__)

        return note

    modules = list(network.named_modules()) if job.kind != "pt2" else []
    hooks = [module.register_forward_pre_hook(watch(name)) for name, module in modules]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    trained |= {name: type(module).__name__ for name, module in modules if module.training and name not in trained}
    if trained:
        shown = some([f"{name or 'itself'} ({kind})" for name, kind in trained.items()])
        raise JobError(
            f"the network puts {shown} into training mode when it runs, where answers depend on chance or on the other "
            "images; take train() out of its forward()"
        )


def answer(network: torch.nn.Module, job: TorchJob, batch: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """The outputs by name, floats as float32. Raises JobError for invalid inputs or outputs."""
    shown = ", ".join(f"{str(one.dtype).removeprefix('torch.')} {list(one.shape)}" for one in batch)
    try:
        output = outputs.call(network, job.inputs, batch)
    except MemoryError:
        raise
    except Exception as error:  # it is the user's code
        why = one_line(str(error)) or type(error).__name__
        if job.kind == "pt2":
            raise JobError(
                f"{job.name} does not take {shown} ({why}); check --input, and export it with "
                "dynamic_shapes for the batch"
            ) from error
        is_precision = any(word in why for word in ("Half", "BFloat16", "double", "dtype"))
        advice = "let its forward() keep the precision of the images" if is_precision else "check --input"
        raise JobError(f"the network fails on {shown}: {why}; {advice}") from error
    found = _named(output, job)
    if not job.is_alone:
        outputs.check_batch(found, len(batch[0]), output)
    return found


def _named(output: Any, job: TorchJob) -> dict[str, torch.Tensor]:
    """The outputs that are exported, by name, floats as float32. Raises JobError."""
    name_all = outputs.of_one if job.is_alone else outputs.named
    found = outputs.read_by(job.layout, name_all(output, job.inputs))
    return {name: _in_float32(one) for name, one in found.items()}


def _in_float32(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.is_floating_point() else tensor


def _per_channel(values: Sequence[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32).view(1, -1, 1, 1)


def _wrapped(network: torch.nn.Module, job: TorchJob) -> torch.nn.Module:
    """The network with its outputs as a flat tuple, behind uint8 [N, H, W, C]: cast, then transpose, then one x * a +
    b.

    Cast first, because TensorRT takes uint8 inputs only directly into a Cast.
    """

    class Wrapped(nn.Module):
        scale: torch.Tensor
        shift: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.network = network
            if job.uint8_front:
                std = _per_channel(job.std)
                self.register_buffer("scale", 1 / (255 * std))
                self.register_buffer("shift", -_per_channel(job.mean) / std)

        def forward(self, *tensors: torch.Tensor) -> Any:
            if job.uint8_front:
                values = tensors[0].to(torch.float32).permute(0, 3, 1, 2)
                tensors = (values * self.scale + self.shift,)
            return tuple(_named(outputs.call(self.network, job.inputs, tensors), job).values())

    wrapped = Wrapped()
    wrapped.training = False  # not eval(), which an inner exported program would refuse
    return wrapped


def write_onnx(
    network: torch.nn.Module,
    job: TorchJob,
    samples: Sequence[torch.Tensor],
    names: Sequence[str],
    path: Path,
    *,
    is_free: bool = False,
) -> None:
    """Write the graph to `path`, with its outputs called `names`, and large parameters beside it.

    Raises JobError if there is no ONNX form, and NotBatchedError if only the number of samples is the problem.
    """
    model = _wrapped(network, job)
    if job.kind != "pt2":
        assert not any(module.training for module in model.modules()), "a network in training mode; this is a bug"
    if job.is_alone:
        example = tuple(one[:1] for one in samples)
    else:
        # A batch of 1 would be treated as a constant.
        example = tuple(one[:2] if len(one) > 1 else one.repeat(2, *[1] * (one.ndim - 1)) for one in samples)
    try:
        with pools.exportable():
            program = _convert(model, example, names, job, is_free=is_free)
    except MemoryError:
        raise
    except Exception as error:  # the exporter's errors share no base class
        raise JobError(_why_not(error)) from error
    if not job.is_alone and isinstance(program.model.graph.inputs[0].shape[0], int):
        raise outputs.NotBatchedError(
            "the network takes only as many images at a time as it was exported with; let its forward() read their "
            "number as images.shape[0], and not by len() or as a constant"
        )
    tensors = [*network.parameters(), *network.buffers()]
    if sum(tensor.nbytes for tensor in tensors) <= job.inline_bytes:
        path.write_bytes(portable(program.model_proto).SerializeToString())
    else:
        # One protobuf holds 2 GiB at most. The graph names the other file.
        import onnx_ir

        onnx_ir.save(program.model, path, external_data=files.EXTERNAL_DATA)
        path.write_bytes(portable(onnx.load(path, load_external_data=False)).SerializeToString())


def _convert(
    model: torch.nn.Module, example: tuple[torch.Tensor, ...], names: Sequence[str], job: TorchJob, *, is_free: bool
) -> Any:
    dims: dict[int, Any] = {0: torch.export.Dim("batch", min=1, max=max(3, job.max_batch))}
    if is_free:
        # Not named: a named size may not relate to others, as with a stride.
        dims |= dict.fromkeys((1, 2) if job.uint8_front else (2, 3), torch.export.Dim.DYNAMIC)
    return torch.onnx.export(
        model,
        example,
        dynamo=True,
        # What torch writes without converting; every kind of QDQ can be expressed in it.
        opset_version=20,
        input_names=list(job.inputs),
        output_names=list(names),
        dynamic_shapes=None if job.is_alone else ((dims,) * len(example),),
        verbose=False,
    )


def _why_not(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    cause = str(error).strip() or type(error).__name__
    operator = re.search(r"OpOverload\(op='([\w.:]+)'", cause)
    if operator:
        return f"the operator {operator[1]} has no ONNX form; replace it in the network's forward()"
    return (
        f"torch cannot export this network to ONNX: {one_line(cause)}; "
        "avoid operators without an ONNX form, and control flow that depends on the data"
    )
