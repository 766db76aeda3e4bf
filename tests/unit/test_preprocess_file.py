"""What a file of `--preprocess` may say, and that its schema says the same."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from convoy.export.sources.preprocess_file import PreprocessFile, read_preprocess_file, schema
from convoy.models.errors import UsageError
from convoy.models.spec import ImageSpec

DOCS = Path(__file__).parents[2] / "docs"
GOOD: dict[str, Any] = json.loads(schema())["examples"][0]


def read(tmp_path: Path, content: object) -> ImageSpec:
    path = tmp_path / "recipe.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return read_preprocess_file(path, "uint8_nhwc")


def test_it_has_the_fields_of_the_specification_but_the_front() -> None:
    assert PreprocessFile.model_fields.keys() - {"schema_path"} == {
        field.name for field in dataclasses.fields(ImageSpec)
    } - {"front"}


def test_the_schema_in_docs_is_the_readers_own() -> None:
    printed = subprocess.run(
        [sys.executable, "-m", "convoy.export.sources.preprocess_file"], capture_output=True, text=True, check=True
    )
    assert printed.stdout == schema() == (DOCS / "preprocess.schema.json").read_text()


def test_the_example_is_read_and_fits_the_schema(tmp_path: Path) -> None:
    rules = json.loads(schema())
    jsonschema.Draft202012Validator.check_schema(rules)
    for example in (GOOD, {"$schema": "preprocess.schema.json", **GOOD}):
        jsonschema.validate(example, rules)
        image = read(tmp_path, example)
        assert (image.height, image.resize_px, image.mean) == (224, 256, (0.485, 0.456, 0.406))
    told = (DOCS / "export.md").read_text().partition("preprocess.schema.json")[2].partition("```json")[2]
    assert json.loads(told.partition("```")[0]) == {"$schema": "preprocess.schema.json", **GOOD}


@pytest.mark.parametrize(
    "wrong",
    [
        {"height": 0},
        {"width": "224"},
        {"channels": 2},
        {"resize_mode": "shorter"},
        {"resize_px": 1.5},
        {"interpolation": "cubic"},
        {"antialias": "yes"},
        {"mean": [0.1, "x", 0.1]},
        {"std": [1, 1, 0]},
        {"std": []},
        {"widht": 224},
    ],
)
def test_what_the_schema_refuses_is_refused_by_the_fields_name(tmp_path: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(GOOD | wrong, json.loads(schema()))
    with pytest.raises(UsageError, match=rf"recipe\.json: {next(iter(wrong))}[.:]"):
        read(tmp_path, GOOD | wrong)


def test_everything_that_is_missing_or_wrong_is_named_at_once(tmp_path: Path) -> None:
    fields = {name: value for name, value in GOOD.items() if name not in ("width", "antialias")}
    with pytest.raises(UsageError) as caught:
        read(tmp_path, fields | {"std": [1, 1], "interpolation": "cubic", "resize_px": 100, "colour": "RGB"})
    for words in (
        "width: missing",
        "antialias: missing",
        "std: 3 values are needed, one per channel",
        "interpolation: Input should be 'nearest', 'bilinear', 'bicubic' or 'lanczos'",
        "resize_px: 100 is below the crop, whose longer side is 224",
        "colour: unknown field",
    ):
        assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_straight_resize_needs_no_room_for_a_crop(tmp_path: Path) -> None:
    straight = GOOD | {"resize_mode": "exact"}
    assert read(tmp_path, straight | {"resize_px": 1}).resize_px == 1
    del straight["resize_px"]
    jsonschema.validate(straight, json.loads(schema()))
    assert read(tmp_path, straight).resize_px == 224
    with pytest.raises(UsageError, match=r"recipe\.json: resize_px: missing"):
        read(tmp_path, straight | {"resize_mode": "shorter_side"})
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(straight | {"resize_mode": "shorter_side"}, json.loads(schema()))


@pytest.mark.parametrize(("content", "words"), [("{", "not valid JSON"), ("[]", "should be an object")])
def test_what_is_no_object_is_one_line(tmp_path: Path, content: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        read(tmp_path, content)
