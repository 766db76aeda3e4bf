"""The names of classes: a model's labels, and a data set's names for them.

Reads label files, the word `imagenet`, and the JSON of `--class-map`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import StrictInt, StrictStr, TypeAdapter, ValidationError

from convoy.export.sources.torch_job import Inquiry
from convoy.export.sources.torch_process import ask
from convoy.models.errors import UsageError
from convoy.models.samples import some

_FORM = 'it as in {"n01440764": "tench", "n01443537": 1}'
_CLASS_MAP = TypeAdapter(dict[str, StrictInt | StrictStr])


def read_labels(path: Path, least: int = 2) -> tuple[str, ...]:
    """At least `least` classes, one per line; or ImageNet's if `path` is that word and not a file.

    Raises UsageError, JobError.
    """
    if path == Path("imagenet") and not path.is_file():
        # From any of torchvision's networks: all weights have the same classes in the same order.
        return distinct(ask(Inquiry("torchvision", "resnet50")).labels)
    try:
        lines = tuple(line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip())
    except OSError as error:
        raise UsageError(f"--labels {path}: {error.strerror}; pass a text file with one class per line") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"--labels {path}: not UTF-8 text; pass a text file with one class per line") from error
    doubles = sorted({line for line in lines if lines.count(line) > 1})
    if doubles:
        raise UsageError(f"--labels {path}: {doubles[0]!r} appears twice; class names must be unique")
    if len(lines) < least:
        raise UsageError(f"--labels {path}: {len(lines)} classes; at least {least} are needed, one per line")
    return lines


def distinct(labels: Sequence[str]) -> tuple[str, ...]:
    """ImageNet calls two classes "crane" and two "maillot"; the later ones get a number."""
    count = Counter(labels)
    first = {label: index for index, label in reversed(list(enumerate(labels)))}
    return tuple(
        f"{label} (class {index})" if count[label] > 1 and first[label] != index else label
        for index, label in enumerate(labels)
    )


def read_class_map(path: Path, labels: Sequence[str]) -> Mapping[str, str]:
    """A JSON object from a data set's class names to the labels in `labels`, or their indices.

    Raises UsageError, which names all mistakes.
    """
    try:
        given = _CLASS_MAP.validate_json(path.read_bytes())
    except OSError as error:
        raise UsageError(f"--class-map {path}: {error.strerror}; pass a JSON file, and write {_FORM}") from error
    except ValidationError as error:
        raise UsageError(f"--class-map {path}: not a JSON object of labels or outputs; write {_FORM}") from error
    names: dict[str, str] = {}
    wrong = []
    for folder, meant in given.items():
        if isinstance(meant, int) and 0 <= meant < len(labels):
            names[folder] = labels[meant]
        elif isinstance(meant, str) and meant in labels:
            names[folder] = meant
        else:
            wrong.append(f"{folder} is {meant!r}")
    if wrong:
        raise UsageError(
            f"--class-map {path}: {some(wrong)}, which are not among the {len(labels)} labels of the model; "
            "repair the file or pass other --labels"
        )
    return names
