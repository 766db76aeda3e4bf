"""The metadata of torchvision's and timm's models: names, preprocessing, labels, published weights.

Translates it into `ImageSpec`, and refuses if that would be a guess.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from convoy.export.sources.published_recipes import timm_image
from convoy.export.sources.torch_job import Description, Inquiry, TorchJob
from convoy.models.errors import BundleError, JobError, UsageError
from convoy.models.samples import some
from convoy.models.spec import ImageSpec
from convoy.models.tasks import Task
from convoy.models.torchvision_preset import preset_image, segmentation_image


def describe(inquiry: Inquiry) -> Description:
    """Raises UsageError for an unknown name and JobError for a missing library."""
    if inquiry.kind == "timm":
        return _describe_timm(inquiry.name)
    models, task = torchvision_models(), torchvision_task(inquiry.name)
    published = models.get_model_weights(inquiry.name).DEFAULT
    if task == "detect":
        image, why = _read(detector_image, models.get_model(inquiry.name, weights=None, weights_backbone=None))
    else:
        image, why = _read(preset_image if task == "classify" else segmentation_image, published.transforms())
    return Description(
        image=image, why_no_image=why, labels=tuple(published.meta.get("categories", ())), weights=published.name
    )


def torchvision_models() -> Any:
    """torchvision.models. Raises JobError."""
    try:
        from torchvision import models
    except ImportError as error:
        raise JobError(f"torchvision does not load here ({error}); run `make test` once") from error
    return models


def timm_with(name: str) -> Any:
    """timm, if it has a model of this name. Raises JobError, and UsageError if it has none."""
    try:
        import timm
    except ImportError as error:
        raise JobError(f"timm does not load here ({error}); run `pip install timm`") from error
    if not timm.is_model(name):
        raise UsageError(f"timm has no model {name!r}; {_near(name, timm.list_models())}")
    return timm


def torchvision_task(name: str) -> Task:
    """The task that the model is published for. Raises UsageError for a name that torchvision does not have."""
    models = torchvision_models()
    rooms: tuple[tuple[Any, Task], ...]
    rooms = (models, "classify"), (models.segmentation, "segment"), (models.detection, "detect")
    known = {one: task for module, task in rooms for one in models.list_models(module=module)}
    if name not in known:
        raise UsageError(
            f"torchvision has no classification, segmentation or detection model {name!r}; {_near(name, list(known))}"
        )
    return known[name]


def purpose(job: TorchJob) -> Task | None:
    """The purpose of a network that is not a classifier; None if it is unknown, or is a classifier."""
    if job.kind != "torchvision":
        return None
    task = torchvision_task(job.name)
    return None if task == "classify" else task


def detector_image(model: Any) -> ImageSpec:
    """How one of torchvision's detectors prepares pictures inside; here outside, directly to one size."""
    from convoy.export.sources.torch_child.detectors import input_px

    height, width = input_px(model)
    plain = ImageSpec.plain(height, width, 3, "uint8_nhwc")
    # It scales without antialiasing, and on values of 0..1.
    mean, std = tuple(model.transform.image_mean), tuple(model.transform.image_std)
    return replace(plain, antialias=False, mean=mean, std=std)


def _near(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known)
    return f"did you mean {some(near)}?" if near else f"it has {some(list(known))}"


def _read(translate: Any, recipe: Any) -> tuple[ImageSpec | None, str]:
    try:
        return translate(recipe), ""
    except (JobError, BundleError) as error:
        return None, str(error)


def _describe_timm(name: str) -> Description:
    settings = timm_with(name).get_pretrained_cfg(name)
    if settings is None:
        return Description(why_no_image=f"timm says nothing about images for {name}")
    recipe = settings.to_dict()
    image, why = _read(timm_image, recipe)
    return Description(
        image=image, why_no_image=why, labels=tuple(recipe.get("label_names") or ()), weights=settings.tag or ""
    )
