"""SOURCE on the command line, and what is known about the network before it is loaded.

That is the origin of its weights, its classes, and its preprocessing: as stated by the checkpoint's header, the zoo, an
ONNX file, or the registry that published the model. The registry is asked in a child process, because it needs torch.
`convoy.export.plan` applies the user's options.
"""

from __future__ import annotations

import importlib.util
import json
import re
import zipfile
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from convoy.app.engines.dimensions import Size
from convoy.export.class_names import distinct
from convoy.export.options import ExportOptions, MissingOption, Mistakes
from convoy.export.sources.onnx_metadata import StatedModel, of_ultralytics, stated_model
from convoy.export.sources.onnx_source import image_channels, image_size
from convoy.export.sources.preprocess import InputSize, resized
from convoy.export.sources.torch_job import DESCRIPTION, Description, Inquiry, SourceKind, WeightsFrom
from convoy.export.sources.torch_process import ask
from convoy.export.sources.user_code import parse_call
from convoy.models import zoo
from convoy.models.checkpoint import CheckpointHeader, read_checkpoint_header
from convoy.models.errors import JobError, UsageError
from convoy.models.records import from_jsonable
from convoy.models.spec import ImageSpec


@dataclass(frozen=True, slots=True)
class ModelSource:
    """`name` is the registry's name, the factory in `file`, or the file's own name.

    `published` names the registry's weights if those are used, or says that they are random.
    """

    kind: SourceKind
    name: str
    file: Path | None = None
    published: str = ""

    @property
    def path(self) -> Path:
        """The file, if the source is one."""
        assert self.file is not None
        return self.file

    @property
    def shown(self) -> str:
        """Its form in the manifest: a user's file by name only, because folders belong to the machine."""
        beside = f" ({self.published})" if self.published else ""
        if self.file is None:
            return f"{self.kind}:{self.name}{beside}"
        return f"{self.file.name}:{self.name}{beside}" if self.kind == "file" else self.file.name

    @property
    def has_registry(self) -> bool:
        """Whether a registry publishes the network with weights and their preprocessing."""
        return self.kind in ("torchvision", "timm")

    @property
    def carries_weights(self) -> bool:
        """Whether graph and weights are one file."""
        return self.kind in ("onnx", "pt2")


# A user's file, and its factory or a call of it.
_CALL = re.compile(r"(.+?\.py):(.*)", re.DOTALL)
# Names of factories that say nothing about the network.
_GENERIC = re.compile(r"(get|build|create|make|load)?_?(cnn|factory|me|model|net|network|new)?", re.IGNORECASE)


def default_name(source: ModelSource) -> str:
    """The default name of a model: that of the network, the function or the file."""
    name = source.name
    if source.kind == "file":
        function = parse_call(source.name).name
        name = source.path.stem if _GENERIC.fullmatch(function) else function
    elif source.carries_weights:
        name = source.path.stem
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-._")[:128] or "model"


def parse_source(text: str, *, trust: bool = False) -> ModelSource:
    """SOURCE as a record. Raises UsageError if it is invalid, missing, or needs `trust`."""
    head, _, tail = text.rpartition(":")
    if (call := _CALL.fullmatch(text)) is not None:
        return _factory(text, call[1], call[2])
    if head == "zoo":
        zoo.entry(tail)
        return ModelSource("zoo", tail)
    if head == "torchvision":
        return ModelSource("torchvision", tail)
    if head == "timm":
        if importlib.util.find_spec("timm") is None:
            raise UsageError(f"SOURCE {text!r} needs timm, which is not installed; run `pip install timm`")
        return ModelSource("timm", tail)
    if text.endswith(".py"):
        raise UsageError(
            f"SOURCE {text!r} has no function name; write {text}:factory, a function that returns the network"
        )
    if text.endswith(".onnx"):
        return ModelSource("onnx", Path(text).name, _existing(text, text))
    if text.endswith(".pt2"):
        if not trust:
            raise UsageError(
                f"SOURCE {text!r} carries pickle, which can run any code when it is read; pass --trust if you know "
                "who made it"
            )
        return ModelSource("pt2", Path(text).name, _existing(text, text))
    if text.endswith((".pt", ".pth", ".ckpt", ".safetensors")):
        raise UsageError(f"SOURCE {text!r} is a checkpoint without its network; {_advice_for_checkpoint(text)}")
    raise UsageError(
        f"SOURCE {text!r} is not understood; use zoo:NAME, torchvision:NAME, timm:NAME, path/to/file.py:factory, "
        "model.onnx or model.pt2"
    )


def _advice_for_checkpoint(text: str) -> str:
    is_safe = text.endswith(".safetensors")
    header = read_checkpoint_header(Path(text)) if is_safe and Path(text).is_file() else None
    if header is not None:
        return f"pass zoo:{header.architecture} --weights {text}"
    advice = f"pass file.py:factory --weights {text}, where factory is a function that returns the network"
    if is_safe:
        return advice
    return f"{advice}. For Ultralytics, return YOLO({text!r}), or run `yolo export model={text} format=onnx`"


def _factory(text: str, head: str, tail: str) -> ModelSource:
    file = _existing(text, head)
    try:
        parse_call(tail)
    except ValueError as error:
        raise UsageError(f"SOURCE {text!r}: {error}; write {head}:factory or '{head}:Net(num_classes=5)'") from error
    return ModelSource("file", tail, file)


def parse_function(text: str, flag: str) -> tuple[Path, str]:
    """Parse `file.py:function` of an option. Raises UsageError."""
    head, _, tail = text.rpartition(":")
    if not head.endswith(".py") or not tail.isidentifier():
        raise UsageError(f"{flag} {text!r} is not understood; write file.py:function")
    return _existing(text, head, flag), tail


def _existing(text: str, path: str, flag: str = "SOURCE") -> Path:
    file = Path(path)
    if not file.is_file():
        raise UsageError(f"{flag} {text!r}: there is no file {path}; check the path")
    return file.resolve()


# The value of `--weights` for the registry's published weights.
PUBLISHED = Path("default")


@dataclass(frozen=True, slots=True)
class Stated:
    """The top-1 in percent that the checkpoint's header states, the data set, and the hash of the test images."""

    percent: float
    dataset: str
    test_sha256: str | None


@dataclass(frozen=True, slots=True)
class Origin:
    """`size` is the network's input size if it is known; if `image` is None, `why_no_image` says why.

    `labels` are those of the weights. `are_labels_sure` is False if they belong to the published weights and others are
    loaded, whose number of classes only torch can tell. `model` is what an ONNX file, a checkpoint, a
    network of Ultralytics or the zoo says of a network that is not a classifier.
    """

    source: ModelSource
    weights: Path | None
    weights_from: WeightsFrom
    size: InputSize | None
    image: ImageSpec | None
    why_no_image: str
    labels: tuple[str, ...]
    are_labels_sure: bool
    stated: Stated | None = None
    model: StatedModel | None = None


def find_origin(options: ExportOptions, source: ModelSource, size: InputSize | None, mistakes: Mistakes) -> Origin:
    """What is known about the source. If a registry knows the rest, missing weights are noted in `mistakes`.

    `size` is the input that the user wants, to which a registry's preset is scaled in proportion. Raises UsageError for
    an unknown name or missing or superfluous weights, and JobError for what cannot be read or asked.
    """
    weights: Path | None = None
    weights_from: WeightsFrom = "random"
    given = partial(_weights, options.weights, source, is_random=options.random_weights)
    if source.has_registry:  # it knows labels and preprocessing without weights
        weights, weights_from = mistakes.attempt(given) or (weights, weights_from)
    else:
        weights, weights_from = given()
    if source.kind == "file" and weights is not None and mistakes.attempt(_check_weights, weights) is None:
        weights = None
    if source.carries_weights:
        known = image_size(source.path) if source.kind == "onnx" else None
        plain = Origin(source, source.file, "network", known, None, "the file does not say", (), True)
        model = _stated_in(source, size or known) if options.task != "none" else None
        if model is None:
            return plain
        return replace(
            plain, size=known or InputSize.of(model.image), image=model.image, labels=model.labels, model=model
        )
    if source.kind == "file" and options.task != "none":
        said = mistakes.attempt(_ask_network, source, size)
        model = _stated_by(said, source) if said is not None else None
        if model is not None:
            own = InputSize.of(model.image)
            return Origin(source, weights, weights_from, own, model.image, "", model.labels, True, model=model)
    header = _header(weights, source) if weights else None
    if header is not None:
        found = Origin(source, weights, weights_from, _zoo_size(source), header.image, "", header.labels, True)
        return replace(found, stated=_stated_accuracy(header), model=_model_of(header))
    why = "the checkpoint does not say" if weights else "the network does not say"
    plain = Origin(source, weights, weights_from, _zoo_size(source), None, why, (), True)
    if source.kind == "zoo":
        return replace(plain, model=_model_of_zoo(source.name))
    is_told = options.preprocess is not None and options.labels is not None and options.weights != PUBLISHED
    if not source.has_registry or is_told:
        return plain
    said = ask(Inquiry(source.kind, source.name))
    return replace(
        plain,
        source=replace(source, published=said.weights) if weights_from == "registry" else source,
        image=resized(said.image, size) if said.image and size else said.image,
        why_no_image=said.why_no_image,
        labels=distinct(said.labels),
        are_labels_sure=weights_from == "registry",
    )


def _stated_in(source: ModelSource, size: InputSize | None) -> StatedModel | None:
    """What the file of a network says of it. Raises UsageError for tasks that cannot be served from pictures."""
    if source.kind == "onnx":
        return stated_model(source.path, size)
    try:
        with zipfile.ZipFile(source.path) as archive:
            (name,) = (one for one in archive.namelist() if one.endswith(f"/{DESCRIPTION}"))
            said = from_jsonable(Description, json.loads(archive.read(name)), DESCRIPTION)
    except (OSError, ValueError, zipfile.BadZipFile):  # other programs have no description
        return None
    return _stated_by(said, source)


def _stated_by(said: Description, source: ModelSource) -> StatedModel | None:
    """Raises UsageError for tasks that cannot be served from pictures."""
    if not said.metadata:
        return None
    size = InputSize(3, *said.size)
    return of_ultralytics(source.shown, "the Ultralytics network", said.metadata, said.outputs, size)


def _ask_network(source: ModelSource, size: InputSize | None) -> Description:
    """What the network of a user's function says of itself. Raises UsageError if the function fails."""
    if importlib.util.find_spec("ultralytics") is None:
        return Description()  # only its networks say something
    try:
        shape = (size.height, size.width) if size else ()
        return ask(Inquiry(source.kind, source.name, str(source.file), shape, is_about_metadata=True))
    except JobError as error:
        raise UsageError(str(error)) from error


def _stated_accuracy(header: CheckpointHeader) -> Stated | None:
    """What export's own measurement must repeat: the top-1 of a classifier."""
    if header.task != "classify":
        return None
    test = header.split.get("test")
    return Stated(100 * header.test_accuracy, header.dataset, test.sha256 if test else None)


def _model_of(header: CheckpointHeader) -> StatedModel | None:
    """How the outputs of a network are read that is not a classifier."""
    if header.task == "classify":
        return None
    said = header.task, header.image, header.labels, header.detection, header.activation
    return StatedModel("the checkpoint", *said)


def _model_of_zoo(name: str) -> StatedModel | None:
    row = zoo.entry(name)
    if row.task == "classify":
        return None
    image = ImageSpec.plain(row.height, row.width, row.channels, "uint8_nhwc")
    return StatedModel("the zoo", row.task, image, (), row.detection, row.activation)


def channels_of(source: ModelSource, size: Size) -> int:
    """The number of channels of this network's images, 1 or 3, determined by running it.

    `size` is the images'. Raises UsageError if it takes both, or neither, and JobError if it cannot be asked.
    """
    if source.kind == "onnx":
        taken = image_channels(source.path)
    elif source.kind in ("file", "pt2"):
        taken = ask(Inquiry(source.kind, source.name, str(source.file), (size.height, size.width))).channels
    else:
        taken = (3,)  # the zoo states it, and registries have colour images
    if len(taken) != 1:
        why = "runs on 1 and on 3 channels" if taken else "runs on neither 1 nor 3 channels at this size"
        raise UsageError(
            f"--mean and --std have one value, but {source.shown} {why}; pass "
            f"--input 3x{size.height}x{size.width} or 1x{size.height}x{size.width}, or --preprocess"
        )
    return taken[0]


def _weights(weights: Path | None, source: ModelSource, *, is_random: bool) -> tuple[Path | None, WeightsFrom]:
    if is_random and (weights is not None or source.carries_weights):
        own = "--weights" if weights is not None else source.shown
        raise UsageError(f"--random-weights and the weights of {own} exclude each other; leave one out")
    if source.carries_weights:
        if weights is not None:
            raise UsageError(f"{source.shown} carries its weights; leave --weights out")
        return None, "network"
    if weights is None:
        if source.kind == "file":
            return None, "network"
        if is_random:
            return None, "random"
        if source.has_registry:
            ask(Inquiry(source.kind, source.name))  # unknown names are refused first
        download = ", --weights default to download the published ones" if source.has_registry else ""
        raise MissingOption(
            f"{source.shown} has no weights of its own; pass --weights FILE.safetensors{download}, or --random-weights "
            "to try the graph without",
            *("--weights", "default" if source.has_registry else "FILE.safetensors"),
        )
    if weights == PUBLISHED and source.has_registry:
        return None, "registry"
    return weights, "file"


def _check_weights(weights: Path) -> Path:
    """Raises UsageError if the file does not exist."""
    if not weights.is_file():
        raise UsageError(f"there is no checkpoint at {weights}; check the path, or run `convoy train`")
    return weights


def _header(weights: Path, source: ModelSource) -> CheckpointHeader | None:
    _check_weights(weights)
    if weights.suffix != ".safetensors":
        return None
    header = read_checkpoint_header(weights)
    if header and source.kind == "zoo" and header.architecture != source.name:
        raise JobError(
            f"{weights} holds the weights of {header.architecture}, not of {source.name}; "
            f"export zoo:{header.architecture}, or pass other weights"
        )
    return header


def _zoo_size(source: ModelSource) -> InputSize | None:
    if source.kind != "zoo":
        return None
    entry = zoo.entry(source.name)
    return InputSize(1 if entry.channels == 1 else 3, entry.height, entry.width)
