"""The identity of an ONNX model: a digest over its file and over external weights.

A model above 2 GiB, and any that asks for it, keeps its tensors in other files of its folder. Those must count: the
same graph with other weights is another model, and must not get its cached plans. Reads just enough of the format to
find the names, without the onnx library.
"""

from __future__ import annotations

import hashlib
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

from convoy.models.bundle import sha256_file
from convoy.models.errors import BundleError, JobError
from convoy.models.files import check_regular, open_regular
from convoy.models.onnx_wire import fields

# The messages of an ONNX file that may contain tensors, with the numbers of those fields.
_MESSAGES: dict[str, dict[int, str]] = {
    "model": {7: "graph", 20: "training", 25: "function"},
    "training": {1: "graph", 2: "graph"},
    "graph": {1: "node", 5: "tensor", 15: "sparse"},
    "function": {7: "node", 11: "attribute"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 22: "sparse", 23: "sparse"},
    "sparse": {1: "tensor", 2: "tensor"},
    "tensor": {13: "entry"},
}
_KEY, _VALUE = 1, 2  # of an entry, which is text by name


def onnx_digest(path: Path) -> str:
    """The model's sha256; with external data, a sha256 over those of all its files.

    Raises JobError if external data is missing or outside the model's folder, and OSError if the model cannot be read.
    """
    own = sha256_file(path)
    try:
        names = external_data(path)
    except BundleError:  # an unreadable file has no external data
        names = ()
    beside = {location: _inside(path, location) for location in names}
    if not beside:
        return own
    whole = hashlib.sha256(own.encode())
    for location, file in beside.items():
        whole.update(f"\n{location}\n{sha256_file(file)}".encode())
    return whole.hexdigest()


def external_files(path: Path) -> dict[str, Path]:
    """The real paths of external data by the names in the model, sorted; each is a regular file.

    Raises JobError if one is missing, not a file, or outside the model's folder, and OSError if the model cannot be
    read.
    """
    return {location: _inside(path, location) for location in external_data(path)}


def check_onnx_files(path: Path) -> tuple[str, ...]:
    """Check the files that a library will open for a model: its own and its external data.

    Returns the normalised names of the external data in the model's folder. Raises BundleError.
    """
    try:
        return tuple(os.path.normpath(location) for location in external_files(path))
    except OSError as error:
        raise BundleError(f"{path}: cannot be read ({error.strerror}); copy it into the store again") from error
    except BundleError:
        raise
    except JobError as error:
        raise BundleError(str(error)) from error


def external_data(path: Path) -> tuple[str, ...]:
    """The names of the files beside `path` with its tensors, sorted; empty if it contains them itself.

    Includes tensors that are not used. Raises BundleError if it is not an ONNX file.
    """
    with open_regular(path) as handle:
        if os.fstat(handle.fileno()).st_size == 0:
            return ()
        with mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                return tuple(sorted(set(_locations(data))))
            except (IndexError, ValueError) as error:
                raise BundleError(f"{path}: is not an ONNX file ({error}); copy it again") from error


def _locations(data: mmap.mmap) -> Iterator[str]:
    """All locations that tensors of a model name. Raises ValueError and IndexError if it is not a model."""
    left = [("model", 0, len(data))]  # no recursion, because graphs may be nested arbitrarily deep
    while left:
        kind, start, end = left.pop()
        if kind == "entry":
            texts = {
                number: data[first:last] for number, first, last in fields(data, start, end)
            }  # the last one counts
            if texts.get(_KEY) == b"location":
                yield texts.get(_VALUE, b"").decode(errors="replace")
            continue
        inner = _MESSAGES[kind]
        left += [(inner[number], first, last) for number, first, last in fields(data, start, end) if number in inner]


def _inside(model: Path, location: str) -> Path:
    folder = model.parent.resolve()
    # resolve() also follows links: the real location counts.
    file = None if "\0" in location else (folder / location).resolve()
    if file is None or not file.is_relative_to(folder):
        raise JobError(f"{model}: its external data {location!r} is outside its folder; do not use this model")
    if not file.exists():
        raise JobError(f"{model}: its external data {location!r} is missing; copy it beside the model")
    check_regular(file)
    return file
