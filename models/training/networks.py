"""The network to train: from the zoo or torchvision, with a head for the data's classes, and initial weights.

The head is whatever changes its shape with the number of classes, so networks need no entry of their own.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from convoy.models import zoo
from convoy.models.bundle import sha256_file
from convoy.models.checkout import pip_install
from convoy.models.checkpoint import CheckpointHeader, read_checkpoint_header
from convoy.models.errors import JobError, UsageError
from convoy.models.samples import some
from convoy.models.spec import ImageSpec
from convoy.models.torchvision_preset import preset_image
from convoy.models.train_options import IMAGENET, TORCHVISION, TrainOptions
from convoy.models.weights.reading import FittedWeights, FoundWeights, fitted, read_weights
from convoy.models.weights.versions import versions_of, with_versions

# These two have an argument for their own weight initialisation.
_EXTRA: dict[str, dict[str, Any]] = {"googlenet": {"init_weights": False}, "inception_v3": {"init_weights": False}}


# Their published weights expect values between -1 and 1; torchvision converts inside the network.
_CENTRED = frozenset({"googlenet", "inception_v3"})


@dataclass(frozen=True, slots=True)
class Start:
    """Initial weights. `says` is for the header; `header` is that of one of our checkpoints."""

    weights: FoundWeights
    says: str
    header: CheckpointHeader | None = None
    is_other_task: bool = False


class InitialNetwork(NamedTuple):
    """A network at its start and its preprocessing: whether mean and deviation of `image` are fixed, rather than the
    data's. `started_from` is for the header; `learns` names the trainable parameters, None means all.
    """

    network: nn.Module
    image: ImageSpec
    is_settled: bool
    started_from: str = ""
    learns: frozenset[str] | None = None


def image_of(arch: str, size_px: int | None, start: Start | None) -> tuple[ImageSpec, bool]:
    """The preprocessing for a network, and whether its mean and deviation are fixed, rather than the data's.

    One of our checkpoints brings its own; torchvision's networks use the published one, with its mean and deviation if
    there are weights trained with them. Raises UsageError for a size that the zoo's networks do not take.
    """
    if start is not None and start.header is not None:
        image = replace(start.header.image, front="uint8_nhwc")
        return (image if size_px is None else _resized(image, size_px)), True
    if not arch.startswith(TORCHVISION):
        row = zoo.entry(arch)
        return ImageSpec.plain(row.height, row.width, row.channels, "uint8_nhwc"), False
    image = _published_image(arch.removeprefix(TORCHVISION))
    if size_px is not None:
        image = _resized(image, size_px)
    if start is None:
        return replace(image, mean=(0.0,) * 3, std=(1.0,) * 3), False
    return image, True


def build(arch: str, classes: int, image: ImageSpec) -> nn.Module:
    """A freshly initialised network. Raises UsageError for an unknown one, JobError if it does not take such images."""
    network = _drawn(arch, classes)
    network.eval()
    try:
        with torch.inference_mode():
            network(torch.zeros(1, image.channels, image.height, image.width))
    except (RuntimeError, ValueError, AssertionError) as error:  # each network has its own messages for it
        why = " ".join(str(error).split())
        raise JobError(
            f"{arch} does not accept images of {image.height}x{image.width} ({why}); change --image-size"
        ) from error
    return network


def head(arch: str, classes: int) -> frozenset[str]:
    """The names of the tensors whose shape depends on the number of classes."""
    shapes = []
    for count in (classes, classes + 1):
        made = _without_tensors(arch, count)
        shapes.append({name: tensor.shape for name, tensor in made.state_dict().items()})
    return frozenset(name for name, shape in shapes[0].items() if shapes[1][name] != shape)


def read_start(options: TrainOptions, labels: tuple[str, ...]) -> Start:
    """Read what `--weights` names. Raises JobError if it cannot be read or is for another network."""
    assert options.weights is not None
    if options.weights == IMAGENET:
        return _published_start(options.arch)
    path = Path(options.weights)
    header = read_checkpoint_header(path) if path.suffix == ".safetensors" else None
    if header is not None and header.architecture != options.arch:
        raise JobError(
            f"{path} holds the weights of {header.architecture}, not of {options.arch}; "
            f"pass --arch {header.architecture}"
        )
    found = read_weights(path, options.weights_key)
    says = f"{path.name}, sha256 {sha256_file(path)}"
    return Start(found, says, header, header is not None and header.labels != labels)


def fill(network: nn.Module, start: Start, head_names: frozenset[str]) -> FittedWeights:
    """Load the weights into the network. Returns what was loaded. Raises JobError if they do not fit.

    The head stays as initialised if the weights are for other classes, by number or by name.
    """
    weights = fitted(
        start.weights,
        network.state_dict(),
        advice="; check --arch",
        head=head_names,
        may_have_head=not start.is_other_task,
    )
    whole = network.state_dict() | weights.tensors
    network.load_state_dict(with_versions(whole, versions_of(weights.tensors)))
    return weights


def _without_tensors(arch: str, classes: int) -> nn.Module:
    try:
        with torch.device("meta"):
            return _drawn(arch, classes)
    except NotImplementedError:  # RegNet computes its widths with tensors
        with torch.random.fork_rng(devices=[]):
            return _drawn(arch, classes)


def _drawn(arch: str, classes: int) -> nn.Module:
    if arch.startswith(TORCHVISION):
        return _torchvision(arch.removeprefix(TORCHVISION), classes)
    return zoo.create(arch, classes)


def _torchvision(name: str, classes: int) -> nn.Module:
    models = _models()
    known = models.list_models(module=models)
    if name not in known:
        near = difflib.get_close_matches(name, known) or list(known)
        raise UsageError(f"torchvision has no classification model {name!r}; it has {some(near)}")
    return cast("nn.Module", models.get_model(name, weights=None, num_classes=classes, **_EXTRA.get(name, {})))


def _models() -> Any:
    try:
        from torchvision import models
    except ImportError as error:
        raise JobError(f"torchvision is not installed; {pip_install('export')}") from error
    return models


def _published(name: str) -> Any:
    models = _models()
    if name not in models.list_models(module=models):
        _torchvision(name, 2)  # the message lists the choices
    return models.get_model_weights(name).DEFAULT


def _published_image(name: str) -> ImageSpec:
    """torchvision's evaluation preset, for the network as we build it."""
    image = preset_image(_published(name).transforms())
    return replace(image, mean=(0.5,) * 3, std=(0.5,) * 3) if name in _CENTRED else image


def _resized(image: ImageSpec, size_px: int) -> ImageSpec:
    """The preset for another size, with the same ratio of resize to crop."""
    resize_px = round(size_px * image.resize_px / max(image.height, image.width))
    return replace(image, height=size_px, width=size_px, resize_px=resize_px)


def _published_start(arch: str) -> Start:
    name = arch.removeprefix(TORCHVISION)
    published = _published(name)
    try:
        weights = published.get_state_dict(progress=False, check_hash=True, weights_only=True)
    except Exception as error:  # network, disk and hash errors share no base class
        why = " ".join(str(error).split()) or type(error).__name__
        raise JobError(f"the weights of {arch} cannot be downloaded ({why}); pass --weights FILE") from error
    return Start(FoundWeights(f"{published}", weights, []), f"{published}", is_other_task=True)
