"""Heights and widths that an ONNX file leaves free: kept where the network takes several, fixed where it does not.

Knows what a file declares, and what it really runs at. What is fixed is written into a copy, so that every engine takes
it; the file itself answers at the same size, and is what the copy is held against.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from convoy.app.engines.free_sizes import (
    TRIED_PX,
    Size,
    is_free_image,
    size_of,
    sizes_that_run,
    with_examples,
)
from convoy.app.engines.onnxruntime import open_session, read_signature
from convoy.app.engines.signature import Signature
from convoy.export.sources import onnx_file
from convoy.export.sources.preprocess import AskedInput
from convoy.export.sources.torch_job import INPUT_NAME, TorchResult
from convoy.models.errors import JobError, UsageError
from convoy.models.spec import ImageSpec, TensorSpec

_FIXED = "fixed/model.onnx"
# At so many a network is shown to take any.
_PROOF_SIZES = 3


@dataclass(frozen=True, slots=True)
class FreeInput:
    """`file` is the graph to go on with, `size` where it is run and measured, None where no image is free in it.

    `sizes` are those to prove it at, that one first; empty where height and width are fixed. `remark` is for people.
    """

    file: Path
    size: Size | None = None
    sizes: tuple[Size, ...] = ()
    remark: str = ""


def settle(original: Path, asked: AskedInput | None, folder: Path, threads: int, inline_bytes: int) -> FreeInput:
    """What becomes of the file's free heights and widths; a copy with fixed ones is written to `folder`.

    Raises UsageError where `asked` does not fit the file, and JobError where the file runs at no size that is tried.
    """
    model = onnx_file.read(original)  # which first sees to it that no library reads what it should not
    signature = read_signature(open_session(original, threads), original)
    images = [spec for spec in signature.inputs if is_free_image(spec)]
    if asked is not None:
        _check(original, signature, images, asked)
    if not images:
        return FreeInput(original)
    wanted = None if asked is None or asked.size is None else asked.size
    found, example = signature, None
    for size in [wanted] if wanted else [onnx_file.stated_size(model), None]:
        if example is None:
            found = with_examples(original, signature, threads, size)
            example = next((spec for spec in found.inputs if is_free_image(spec) and spec.example), None)
    if example is None:
        tried = str(wanted) if wanted else ", ".join(f"{px}x{px}" for px in TRIED_PX)
        raise JobError(
            f"{original.name} leaves height and width of {images[0].name!r} free, {list(images[0].shape)}, and runs at "
            f"none of {tried}; pass a size that it takes, such as --input 3x320x480"
        )
    size = size_of(example)
    if asked is not None and not asked.is_free:
        fixed = _fix(model, found, folder, inline_bytes)
        return FreeInput(fixed, size, remark=f"height and width are fixed at {size} by --input")
    sizes = sizes_that_run(original, found, threads, _PROOF_SIZES - 1)
    if len(sizes) < _PROOF_SIZES:
        fixed = _fix(model, found, folder, inline_bytes)
        why = f"the file leaves them free, and runs at {size}, but hardly at any other size"
        return FreeInput(fixed, size, remark=f"height and width are fixed at {size}: {why}")
    return FreeInput(original, size, sizes)


def _check(original: Path, signature: Signature, images: list[TensorSpec], asked: AskedInput) -> None:
    takes = ", ".join(f"{spec.name} {list(spec.shape)}" for spec in signature.inputs)
    if not images:
        raise UsageError(
            f"--input is about the height and width of images, of which {original.name} leaves none free ({takes}); "
            "leave it out, or pass --preprocess"
        )
    for spec in images:
        if spec.shape[1] != asked.channels and spec.shape[-1] != asked.channels:
            raise UsageError(
                f"--input has {asked.channels} channels, and {original.name} takes {takes}; change --input"
            )


def _fix(model: Any, found: Signature, folder: Path, inline_bytes: int) -> Path:
    """The model in a file of its own, declaring the examples' sizes, in front and behind."""
    # In a folder of its own, for weights beside a graph have one name.
    target = folder / _FIXED
    target.parent.mkdir()
    del model.graph.value_info[:]  # they name what is free
    for declared, specs in ((model.graph.input, found.inputs), (model.graph.output, found.outputs)):
        examples = {spec.name: spec.example for spec in specs if spec.example}
        for value in declared:
            dims = value.type.tensor_type.shape.dim
            for axis, size in enumerate(examples.get(value.name, ())):
                if axis and not dims[axis].HasField("dim_value"):
                    dims[axis].dim_value = size
    onnx_file.write(model, target, inline_bytes)
    return target


def listed(sizes: Sequence[Size]) -> str:
    """The sizes in words."""
    *others, last = map(str, sizes)
    return f"{', '.join(others)} and {last}" if others else last


def free_sizes(image: ImageSpec | None, torch: TorchResult) -> tuple[Size, ...]:
    """Where a graph of images was held against its original: at the pictures' size first. Empty where that is fixed."""
    if not torch.elsewhere or image is None:
        return ()
    first = 1 if image.front == "uint8_nhwc" else 2
    others = (Size(*one.samples[INPUT_NAME].shape[first : first + 2]) for one in torch.elsewhere)
    return (Size(image.height, image.width), *others)
