"""`convoy.export(model, ...)`: an export from Python or a notebook."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

from rich.console import Console

from convoy.export.cache import StepCache, default_root
from convoy.export.command import export_bundle, refuse_missing
from convoy.export.config_file import as_yaml
from convoy.export.options import ExportOptions
from convoy.export.plan import parse_tensors
from convoy.export.progress import SILENT
from convoy.export.proof.proving import LeftOut
from convoy.export.sources.preprocess import (
    ImageChanges,
    changes_of,
    is_of_tensors,
    parse_changes,
    parse_input,
    resolve_image,
)
from convoy.export.sources.transforms import recipe_of
from convoy.export.terminal import RichProgress, summary
from convoy.models.bundle import Manifest, Variant, read_manifest
from convoy.models.errors import UsageError

_WIDTH = 100
_CONVOLUTION_DIMS = 4


@dataclass(frozen=True, slots=True, repr=False)
class ExportResult:
    """A published bundle in its `folder`. Prints as the command's table."""

    folder: Path
    manifest: Manifest

    @property
    def name(self) -> str:
        return self.manifest.spec.name

    @property
    def version(self) -> int:
        return int(self.folder.name)

    @property
    def variants(self) -> tuple[Variant, ...]:
        """One per precision, fp32 first: accuracy, latency, whether it is served and why."""
        return self.manifest.variants

    @property
    def accuracy(self) -> float | None:
        """Top-1 (0..1) of fp32, or its mean score by `metric`; None if nothing was evaluated."""
        measured = self.manifest.variants[0].accuracy
        return None if measured is None else measured.top1

    @property
    def report(self) -> Path:
        """The HTML report."""
        return self.folder / "report.html"

    def __repr__(self) -> str:
        console = Console(file=io.StringIO(), width=_WIDTH, color_system=None, force_jupyter=False)
        console.print(summary(self.manifest))
        console.print(f"published {self.folder}", soft_wrap=True, highlight=False)
        return str(console.file.getvalue()).strip("\n")  # type: ignore[attr-defined]

    def _repr_html_(self) -> str:
        console = Console(file=io.StringIO(), width=_WIDTH, record=True, force_jupyter=False)
        console.print(summary(self.manifest))
        # Jupyter would show a plain <pre> in its text font.
        monospaced = '<pre style="line-height: normal; font-family: monospace">{code}</pre>'
        return console.export_html(inline_styles=True, code_format=monospaced)


def export(
    model: Any,
    *,
    name: str | None = None,
    preprocess: Any = None,
    data: str | Path | None = None,
    labels: Sequence[str] | str | Path | None = None,
    store: str | Path = "store",
    progress: bool = True,
    **options: Any,
) -> ExportResult:
    """Export a model, prove that it is right, and publish it in a store.

    `model` is a `torch.nn.Module`, the path of an ONNX file, or any other SOURCE of `convoy export`. `preprocess` is
    the image preparation: a torchvision transform, or a value of `--preprocess`. `data` is a data set or an image
    folder; its calibration part sets the ranges of INT8, its test part measures accuracy. `labels` are the classes in
    the order of the outputs, or a file of them; by default the folders of `data`. `options` are other fields of
    `convoy.export.options.ExportOptions`, such as `input="3x224x224"` or `precisions="fp32,int8"`.

    Raises UsageError for wrong usage and JobError for what cannot be exported; the store is then unchanged.
    """
    with tempfile.TemporaryDirectory(prefix="convoy-python-") as temporary:
        folder = Path(temporary)
        given: dict[str, Any] = {"store": Path(store), **_typed(options)}
        in_memory = []
        if name is not None:
            given["name"] = name
        if data is not None:
            given["data"] = str(data)
        if isinstance(labels, str | Path):
            given["labels"] = Path(labels)
        elif labels is not None:
            given["labels"] = folder / "labels.txt"
            given["labels"].write_text("".join(f"{label}\n" for label in labels), encoding="utf-8")
            in_memory.append("labels")
        given = _preprocessing(preprocess, given.get("input")) | given
        if isinstance(model, str | Path):
            given["source"] = str(model)
        else:
            given |= {"source": str(_saved(model, folder, given)), "trust": True}
            given["name"] = given.get("name") or type(model).__name__.lower()
            in_memory += ["source", "trust"]
        asked = ExportOptions(**given)
        left_out = LeftOut()
        with RichProgress(Console()) as shown:
            published = export_bundle(
                asked,
                shown if progress else SILENT,
                StepCache(default_root()),
                left_out,
                partial(as_yaml, left_out=in_memory),
            )
        manifest = read_manifest(published)
        refuse_missing(asked, manifest, left_out)
        return ExportResult(published, manifest)


def _typed(options: dict[str, Any]) -> dict[str, Any]:
    """The options, with text as paths for fields that are paths. Raises UsageError for unknown options."""
    kinds = get_type_hints(ExportOptions)
    if unknown := sorted(options.keys() - kinds.keys()):
        near = get_close_matches(unknown[0], kinds, 1)
        raise UsageError(f"unknown option {unknown[0]!r}{f'; did you mean {near[0]!r}?' if near else ''}")
    is_path = {field for field, kind in kinds.items() if kind is Path or Path in get_args(kind)}
    return {
        field: Path(value) if field in is_path and isinstance(value, str) else value for field, value in options.items()
    }


def _preprocessing(preprocess: Any, input_shape: str | None) -> dict[str, str]:
    """The options equivalent to a transform, or `--preprocess` unchanged. Raises UsageError, JobError."""
    if preprocess is None:
        return {}
    if isinstance(preprocess, str | Path):
        return {"preprocess": str(preprocess)}
    known = parse_input(input_shape).of_pictures if input_shape is not None else None
    steps = changes_of(recipe_of(preprocess, "preprocess"), "preprocess", known)
    if not steps.antialias:
        raise UsageError("preprocess scales tensors with antialias=False; pass it as 'file.py:transform'")
    size = steps.exact or steps.crop
    said = {
        "input": f"{steps.channels}x{size.height}x{size.width}" if steps.channels and size else None,
        "mean": ",".join(map(str, steps.mean or ())),
        "std": ",".join(map(str, steps.std or ())),
        "resize": str(steps.exact or steps.resize_px or ""),
        "crop": str(steps.crop or ""),
        "interpolation": steps.interpolation,
    }
    return {key: text for key, text in said.items() if text}


def _saved(module: Any, folder: Path, given: dict[str, Any]) -> Path:
    """The module as a torch.export program in `folder`, with a dynamic batch. Raises UsageError, JobError."""
    from convoy.export.sources.torch_child import module_file, ultralytics_form

    file = folder / "module.pt2"
    own, asked = module_file.own_copy(module), given.get("input")
    size = None if asked is None or is_of_tensors(asked) else parse_input(asked).of_pictures
    said = ultralytics_form.describe(own, (size.height, size.width) if size else ())
    shapes = [(3, *said.size)] if said.size else _input_shapes(given, own)
    module_file.save_module(own, shapes, said, file)
    return file


def _channels_of(module: Any) -> Literal[1, 3]:
    """The input channels of the first convolution; 3 if they are neither 1 nor 3."""
    weights = (one for one in getattr(module, "parameters", tuple)() if one.dim() == _CONVOLUTION_DIMS)
    first = next(weights, None)
    return 1 if first is not None and first.shape[1] == 1 else 3


def _input_shapes(given: dict[str, Any], module: Any) -> list[tuple[int, ...]]:
    """The shape of one sample of each input. Raises UsageError if it is unknown."""
    said = given.get("input")
    if said is not None and is_of_tensors(said):
        return [spec.shape for spec in parse_tensors(said)]
    size = parse_input(said).of_pictures if said is not None else None
    if size is not None:
        return [(size.channels, size.height, size.width)]
    steps = (given.get(key) for key in ("mean", "std", "resize", "crop", "interpolation"))
    changes: ImageChanges = parse_changes(*steps)
    image = resolve_image(
        *(given.get("preprocess"), None, None, None, "uint8_nhwc", "a module says nothing", changes),
        find_channels=lambda _: _channels_of(module),
    )
    return [(image.channels, image.height, image.width)]
