"""The file of `--preprocess`: its fields, their values, and the JSON schema for editors.

    python -m convoy.export.sources.preprocess_file > preprocess.schema.json

Knows JSON and the rules of `ImageSpec`, so that all mistakes are reported at once.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue, ValidationError, ValidationInfo

from convoy.export.sources.published_recipes import is_timm, is_transformers, timm_image, transformers_image
from convoy.models.errors import JobError, UsageError
from convoy.models.spec import ChannelOrder, Front, ImageSpec, Interpolation, PadPosition, ResizeMode

_Px = Annotated[int, Field(ge=1)]
_EXAMPLE: dict[str, JsonValue] = {
    "height": 224,
    "width": 224,
    "channels": 3,
    "resize_mode": "shorter_side",
    "resize_px": 256,
    "interpolation": "bilinear",
    "antialias": True,
    "mean": [0.485, 0.456, 0.406],
    "std": [0.229, 0.224, 0.225],
}

_NEEDS_RESIZE_PX: dict[str, JsonValue] = {
    "if": {"properties": {"resize_mode": {"const": "shorter_side"}}},
    "then": {"required": ["resize_px"], "properties": {"resize_px": {"type": "integer"}}},
}


def _is_one_per_channel(values: tuple[float, ...], info: ValidationInfo) -> tuple[float, ...]:
    channels = info.data.get("channels")
    if channels is not None and len(values) != channels:
        raise ValueError(f"{channels} values are needed, one per channel")
    return values


def _is_no_less_than_the_crop(resize_px: int | None, info: ValidationInfo) -> int:
    crop = max(info.data.get("height", 0), info.data.get("width", 0))
    if info.data.get("resize_mode") != "shorter_side":
        return resize_px or crop
    if resize_px is None:
        raise ValueError("missing")
    if resize_px < crop:
        raise ValueError(f"{resize_px} is below the crop, whose longer side is {crop}")
    return resize_px


class PreprocessFile(BaseModel):
    """How encoded images become the network's input."""

    # The fields of `ImageSpec` except `front`, which is `--front`'s. Later fields are checked against earlier ones, so
    # their order matters.
    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        title="Preprocessing",
        json_schema_extra={"examples": [_EXAMPLE], **_NEEDS_RESIZE_PX},
    )

    schema_path: str | None = Field(None, alias="$schema", description="Where this schema lies, for an editor.")
    height: _Px = Field(description="Height of the network's input in pixels.")
    width: _Px = Field(description="Width of the network's input in pixels.")
    channels: Literal[1, 3] = Field(description="1 for grey, 3 for colour.")
    resize_mode: ResizeMode = Field(
        description="shorter_side: scale until the shorter side is resize_px, then cut height x width out of the "
        "centre. exact: scale straight to height x width. letterbox: scale until it fits into height x width, and pad."
    )
    resize_px: Annotated[_Px | None, AfterValidator(_is_no_less_than_the_crop)] = Field(
        None,
        validate_default=True,
        description="Pixels of the shorter side before the cut; only for the resize_mode shorter_side.",
    )
    interpolation: Interpolation = Field(description="How pixels are computed when an image is scaled.")
    antialias: bool = Field(description="Whether scaling down takes all pixels into account, as Pillow does.")
    mean: Annotated[tuple[float, ...], AfterValidator(_is_one_per_channel)] = Field(
        min_length=1, max_length=3, description="Is subtracted from values scaled to 0..1; one per channel."
    )
    std: Annotated[tuple[Annotated[float, Field(gt=0)], ...], AfterValidator(_is_one_per_channel)] = Field(
        min_length=1, max_length=3, description="The difference is divided by it; one per channel."
    )
    pad_value: Annotated[int, Field(ge=0, le=255)] = Field(114, description="Grey of a letterbox's padding, 0 to 255.")
    pad_position: PadPosition = Field(
        "center", description="Place of the image in a letterbox: center, as Ultralytics, or top_left, as YOLOX."
    )
    scale_up: bool = Field(True, description="Whether a letterbox enlarges images that are smaller.")
    channel_order: ChannelOrder = Field(
        "rgb", description="bgr for networks trained on images as OpenCV reads them; mean and std are in this order."
    )


def read_preprocess_file(path: Path, front: Front) -> ImageSpec:
    """Convoy's own file, timm's `config.json` or transformers' `preprocessor_config.json`.

    Raises UsageError, which names every field that is missing or wrong.
    """
    try:
        content = path.read_bytes()
        if (published := _published(content)) is not None:
            return replace(published, front=front)
        fields = PreprocessFile.model_validate_json(content).model_dump(exclude={"schema_path"})
        return ImageSpec(**fields, front=front)
    except OSError as error:
        raise UsageError(
            f"--preprocess {path}: {error.strerror}; pass a name such as imagenet, or a JSON file that exists"
        ) from error
    except ValidationError as error:
        raise UsageError(f"--preprocess {path}: {_all_of(error)}; repair the file") from error
    except (JobError, LookupError, TypeError, ValueError) as error:
        raise UsageError(f"--preprocess {path}: {error}; repair the file") from error


def _published(content: bytes) -> ImageSpec | None:
    """What timm or transformers wrote; None for any other file. Raises the errors of a broken file."""
    try:
        recipe = json.loads(content)
    except ValueError:
        return None
    if not isinstance(recipe, dict):
        return None
    if is_timm(recipe):
        return timm_image(recipe)
    return transformers_image(recipe) if is_transformers(recipe) else None


def schema() -> str:
    """The JSON schema of the file, as in docs/preprocess.schema.json."""
    head: dict[str, Any] = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
    return json.dumps(head | PreprocessFile.model_json_schema(), indent=2) + "\n"


def _all_of(error: ValidationError) -> str:
    return "; ".join(
        f"{'.'.join(map(str, one['loc']))}: {_in_words(one['type'], one['msg'])}"
        if one["loc"]
        else _in_words(one["type"], one["msg"])
        for one in error.errors(include_url=False)
    )


def _in_words(kind: str, message: str) -> str:
    if kind == "missing":
        return "missing"
    if kind == "extra_forbidden":
        return "unknown field"
    return message.removeprefix("Value error, ").replace("Invalid JSON: ", "not valid JSON: ")


if __name__ == "__main__":
    print(schema(), end="")
