"""An ONNX file as the source of a model of images: its graph behind our own front.

The result is compared with the original's answers, in ONNX Runtime without optimisation and one image at a time. A file
that is served as it is uses `convoy.export.sources.onnx_plain`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from convoy.app.engines.cpu import cpu_budget
from convoy.app.engines.dimensions import Size
from convoy.app.engines.onnxruntime import open_session, read_signature
from convoy.export.proof.outcomes import relative_errors
from convoy.export.rows import Rows, count_of
from convoy.export.sources import onnx_file
from convoy.export.sources.onnx_file import DoesNotRunError, Original
from convoy.export.sources.onnx_sizes import write_batched
from convoy.export.sources.preprocess import InputSize
from convoy.export.sources.torch_job import ANY_BATCH, INPUT_NAME, ONNX, OTHER_SIZES, Answered, TorchResult
from convoy.models.errors import JobError
from convoy.models.spec import ImageSpec, TensorSpec, fits

# Images that show how far rounding moves the outputs.
_ROUNDED = 8
_AS_TENSORS = "leave --preprocess out to serve it with its own tensors"


@dataclass(frozen=True, slots=True)
class _ImageInput:
    """`size` and `batch` have -1 for dynamic sizes; `last` distinguishes [N, H, W, C] from [N, C, H, W]."""

    name: str
    channels: int
    size: tuple[int, int]
    last: bool
    batch: int


def image_size(path: Path) -> InputSize | None:
    """The graph's image size, if it or its metadata declare one that can be an image's."""
    try:
        found = _image_input(path)
    except JobError:
        return None
    height, width = found.size
    if min(height, width) < 0 and (stated := onnx_file.stated_size(onnx_file.read(path))) is not None:
        height, width = (
            side if side > 0 else said for side, said in zip(found.size, (stated.height, stated.width), strict=True)
        )
    return InputSize(3 if found.channels == 3 else 1, height, width) if min(height, width) > 0 else None


def image_channels(path: Path) -> tuple[int, ...]:
    """The number of channels of the graph's images, whatever their size; None if it does not declare it."""
    try:
        return (_image_input(path).channels,)
    except JobError:
        return ()


def wrap(
    original: Path,
    shown: str,
    image: ImageSpec,
    samples: Rows,
    folder: Path,
    others: Sequence[np.ndarray],
    noise: Rows,
) -> TorchResult:
    """Write the graph with our front to `folder`. `samples` are in the front's format, `others` of other sizes.

    It need not run on the samples of `noise`. With `others`, dynamic heights and widths stay dynamic if the graph runs
    at `OTHER_SIZES` of these. The input is renamed to `INPUT_NAME`, outputs keep their names. Raises JobError if the
    graph does not take one such image or does not return numbers.
    """
    found = _image_input(original)
    _check_outputs(original)
    if found.batch > 1:
        raise JobError(
            f"{original.name} takes exactly {found.batch} images at a time; export it again with a dynamic batch, or a "
            "batch of 1"
        )
    if found.channels != image.channels or any(a not in (-1, b) for a, b in zip(found.size, _px(image), strict=True)):
        raise JobError(
            f"{original.name} takes {found.channels} channels of {_shown(found.size)}, the preprocessing gives "
            f"{image.channels} of {_shown(_px(image))}; pass another --input or --preprocess"
        )
    target = folder / ONNX
    batching = write_batched(original, target, Size(*_px(image)))
    elsewhere = _elsewhere(original, found, image, others) if -1 in found.size else ()
    model = onnx.load(str(target), load_external_data=False)
    _add_front(model.graph, found, image, batched=batching.batched, is_free=bool(elsewhere))
    target.write_bytes(model.SerializeToString())
    normalised = _normalised(samples[INPUT_NAME], image)
    reference = _finite_answers(original, found, normalised)
    _check_rows(original, reference, count_of(samples))
    noisy = _normalised(noise[INPUT_NAME], image)
    return TorchResult(
        target,
        reference,
        torch_version="",
        max_batch=ANY_BATCH if batching.batched else 1,
        remark="; ".join(filter(None, (batching.reason, _why_fixed(found, image, others, elsewhere)))),
        original=f"{shown} in ONNX Runtime",
        elsewhere=elsewhere,
        noise=_on_noise(noise, lambda: _answers(original, found, noisy), lambda: _moved(original, found, noisy)),
        rounding=_rounding(_moved(original, found, normalised), reference),
    )


def _moved(original: Path, found: _ImageInput, images: np.ndarray) -> Rows:
    """The answers to a few of the images, each value off by up to a unit in its last place."""
    few = images[:_ROUNDED]
    off = np.random.default_rng(0).uniform(-1, 1, few.shape).astype(np.float32)
    return _answers(original, found, few * (1 + np.finfo(np.float32).eps * off))


def _rounding(moved: Rows, reference: Rows) -> dict[str, float]:
    """How far rounding moved each output, ||a - b|| / ||b||, at most of any sample."""
    return {
        name: float(relative_errors(array, reference[name][: len(array)]).max())
        for name, array in moved.items()
        if array.dtype.kind == "f"
    }


def _elsewhere(
    original: Path, found: _ImageInput, image: ImageSpec, others: Sequence[np.ndarray]
) -> tuple[Answered, ...]:
    """The original's answers at the first sizes at which it runs; none if they are too few."""
    answered: list[Answered] = []
    for samples in others:
        with suppress(JobError):
            reference = _finite_answers(original, found, _normalised(samples, image))
            answered.append(Answered({INPUT_NAME: samples}, reference))
        if len(answered) == OTHER_SIZES:
            return tuple(answered)
    return ()


def _why_fixed(
    found: _ImageInput, image: ImageSpec, others: Sequence[np.ndarray], elsewhere: Sequence[Answered]
) -> str:
    """Why height and width are not dynamic, if the user may expect it; otherwise empty."""
    fixed = f"height and width are fixed at {_shown(_px(image))}"
    if not others:
        free = f"--input {image.channels}x{image.height}?x{image.width}? leaves them free, as the file does"
        return f"{fixed}; {free}" if -1 in found.size else ""
    if elsewhere:
        return ""
    return f"{fixed}: {'the file runs hardly at any other size' if -1 in found.size else 'the file fixes them'}"


def _image_input(path: Path) -> _ImageInput:
    onnx_file.read(path)
    signature = read_signature(open_session(path, cpu_budget()), path)
    shown = ", ".join(f"{spec.name} {spec.dtype} {list(spec.shape)}" for spec in signature.inputs)
    if len(signature.inputs) != 1:
        raise JobError(f"{path.name} has {len(signature.inputs)} inputs ({shown}), not one image; {_AS_TENSORS}")
    (spec,) = signature.inputs
    if spec.dtype == "BYTES":
        raise JobError(
            f"{path.name} takes strings ({shown}), which bundles do not support; serve the file as it is, from "
            f"STORE/{path.stem}/1/model.onnx"
        )
    if spec.dtype != "FP32" or len(spec.shape) != 4:
        advice = "export it with an FP32 input" if spec.dtype == "BF16" else _AS_TENSORS
        raise JobError(f"{path.name} takes {shown}, not FP32 [N, C, H, W]; {advice}")
    first, last = spec.shape[1], spec.shape[3]
    is_last = first not in (1, 3) and last in (1, 3)
    if not is_last and first not in (1, 3):
        raise JobError(f"{path.name} takes {shown}: images have 1 or 3 channels, not {first}; {_AS_TENSORS}")
    size = (spec.shape[1], spec.shape[2]) if is_last else (spec.shape[2], spec.shape[3])
    return _ImageInput(spec.name, last if is_last else first, size, is_last, spec.shape[0])


def tensor_inputs(path: Path, given: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
    """The file's inputs by its own names and dtypes; dynamic sizes are those of the samples.

    Raises JobError if these do not fit.
    """
    onnx_file.read(path)
    takes = read_signature(open_session(path, cpu_budget()), path).inputs
    named = {spec.name: spec for spec in given}
    if len(takes) == len(given) == 1:
        named = {takes[0].name: given[0]}
    listed = ", ".join(f"{spec.name} {spec.dtype} {list(spec.shape)}" for spec in takes)
    if set(named) != {spec.name for spec in takes}:
        raise JobError(f"{path.name} takes {listed}, and there is {', '.join(named)}; rename the arrays")
    for spec in takes:
        sizes = named[spec.name].shape
        if len(spec.shape) != len(sizes) + 1 or not fits(sizes, spec.shape[1:]):
            raise JobError(f"{path.name} takes {listed}, and a sample of {spec.name} is {list(sizes)}; change them")
    return tuple(TensorSpec(spec.name, spec.dtype, named[spec.name].shape) for spec in takes)


def take(original: Path, shown: str, samples: Rows, folder: Path, noise: Rows) -> TorchResult:
    """Take the graph with its own inputs, which name the samples. It need not run on the `noise`.

    Raises JobError if it cannot be batched.
    """
    target = folder / ONNX
    _check_outputs(original)
    batching = write_batched(original, target)
    if not batching.batched:
        raise JobError(
            f"{original.name} is {batching.reason}, and variants are made of what can be batched alone; leave "
            "--calibrate and --evaluate out to serve it as it is, a sample at a time"
        )
    try:
        reference = _finite(original, Original(original).one_by_one(samples))
    except DoesNotRunError as error:
        raise JobError(
            f"{original.name} does not run on the samples ({error}); pass arrays such as it takes"
        ) from error
    _check_rows(original, reference, count_of(samples))
    return TorchResult(
        target,
        reference,
        torch_version="",
        remark=batching.reason,
        original=f"{shown} in ONNX Runtime",
        noise=_on_noise(noise, lambda: Original(original).one_by_one(noise)),
    )


def _on_noise(noise: Rows, answer: Callable[[], Rows], moved: Callable[[], Rows] | None = None) -> Answered | None:
    """None if the original does not run on it, or not to a row per sample. `moved` are its answers to rounded noise."""
    try:
        answers = answer()
        rounded = moved() if moved is not None else {}
    except DoesNotRunError:
        return None
    if any(len(one) != count_of(noise) for one in answers.values()):
        return None
    return Answered(noise, answers, _rounding(rounded, answers))


def _check_outputs(path: Path) -> None:
    for spec in read_signature(open_session(path, cpu_budget()), path).outputs:
        if spec.dtype in ("BF16", "BYTES"):
            kind = "strings" if spec.dtype == "BYTES" else "BF16"
            raise JobError(f"{path.name} gives {kind} in {spec.name}, which Convoy cannot verify; export it otherwise")


def _check_rows(path: Path, reference: Rows, count: int) -> None:
    for name, array in reference.items():
        if len(array) != count:
            raise JobError(
                f"{path.name} gives {name} {list(array.shape)} for {count} samples, one at a time, so that it cannot "
                f"be batched; {_AS_TENSORS}"
            )


def _add_front(graph: Any, found: _ImageInput, image: ImageSpec, *, batched: bool, is_free: bool) -> None:
    """Replace the graph's input by ours: bytes [N, H, W, C] are transposed, cast and normalised as x * a + b."""
    inner = "convoy.input"
    _rename(graph, found.name, inner)
    _rename(graph, INPUT_NAME, "convoy.images")
    is_bytes = image.front == "uint8_nhwc"
    per_channel = (1, 1, 1, -1) if found.last else (1, -1, 1, 1)
    mean, std = (np.array(values, np.float32).reshape(per_channel) for values in (image.mean, image.std))
    steps: list[tuple[str, list[str], dict[str, Any]]] = []
    if is_bytes:  # first of all, because TensorRT takes uint8 inputs only directly into a Cast
        steps.append(("Cast", [], {"to": onnx.TensorProto.FLOAT}))
    if is_bytes != found.last:
        steps.append(("Transpose", [], {"perm": [0, 3, 1, 2] if is_bytes else [0, 2, 3, 1]}))
    if is_bytes:
        for name, array in (("convoy.scale", 1 / (255 * std)), ("convoy.shift", -mean / std)):
            graph.initializer.append(onnx.numpy_helper.from_array(array.astype(np.float32), name))
        steps += [("Mul", ["convoy.scale"], {}), ("Add", ["convoy.shift"], {})]
    nodes, tensor = [], INPUT_NAME
    for index, (kind, others, attributes) in enumerate(steps or [("Identity", [], {})]):
        output = inner if index == max(len(steps), 1) - 1 else f"convoy.front{index}"
        nodes.append(onnx.helper.make_node(kind, [tensor, *others], [output], f"convoy.{kind.lower()}", **attributes))
        tensor = output
    own = list(graph.node)
    del graph.node[:]
    graph.node.extend([*nodes, *own])
    kept = [value for value in graph.input if value.name != inner]
    del graph.input[:]
    sizes = image.free_tensor_shape if is_free else image.tensor_shape
    names = iter(("height", "width"))
    shape = ["batch" if batched else 1, *(next(names) if size < 0 else size for size in sizes)]
    dtype = onnx.TensorProto.UINT8 if is_bytes else onnx.TensorProto.FLOAT
    graph.input.extend([onnx.helper.make_tensor_value_info(INPUT_NAME, dtype, shape), *kept])


def _rename(graph: Any, old: str, new: str) -> None:
    """Rename a tensor wherever it is read, written or declared, in inner graphs as well."""
    for declared in (*graph.input, *graph.value_info, *graph.initializer):
        if declared.name == old:
            declared.name = new
    for node in graph.node:
        for names in (node.input, node.output):
            names[:] = [new if name == old else name for name in names]
        for attribute in node.attribute:
            for inner in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
                _rename(inner, old, new)


def _normalised(samples: np.ndarray, image: ImageSpec) -> np.ndarray:
    """float32 [N, C, H, W]; written out without the front's arithmetic, to prove that."""
    if image.front != "uint8_nhwc":
        return samples
    mean, std = (np.array(values, np.float32) for values in (image.mean, image.std))
    values: np.ndarray = ((samples.astype(np.float32) / 255 - mean) / std).transpose(0, 3, 1, 2)
    return values


def _answers(original: Path, found: _ImageInput, images: np.ndarray) -> dict[str, np.ndarray]:
    laid_out = images.transpose(0, 2, 3, 1) if found.last else images
    return Original(original).one_by_one({found.name: np.ascontiguousarray(laid_out)})


def _finite_answers(original: Path, found: _ImageInput, images: np.ndarray) -> dict[str, np.ndarray]:
    try:
        return _finite(original, _answers(original, found, images))
    except DoesNotRunError as error:
        size = _shown((images.shape[2], images.shape[3]))
        raise JobError(f"{original.name} does not run at {size} ({error}); pass another --input") from error


def _finite(original: Path, reference: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    for name, array in reference.items():
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            which = f" in {name}" if len(reference) > 1 else ""
            raise JobError(
                f"{original.name} answers NaN or infinity{which} on the samples; check it, and --preprocess where "
                "there is one"
            )
    return reference


def _px(image: ImageSpec) -> tuple[int, int]:
    return (image.height, image.width)


def _shown(size: tuple[int, int]) -> str:
    return "x".join("?" if px < 0 else str(px) for px in size)
