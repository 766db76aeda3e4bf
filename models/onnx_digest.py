"""The identity of an ONNX model: a digest over its file and over the weights it keeps beside it.

A model above 2 GiB, and any that asks for it, keeps its tensors in other files of its folder. Those must
count: the same graph over other weights is another model, and a plan cached for the one must not serve the
other. Knows just enough of the format to find the names; needs no onnx library.
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

# The messages of an ONNX file in which tensors may lie, by the numbers of the fields in which they do.
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
    """The model's sha256; with external data, a sha256 over those of the file and of everything it names.

    Raises JobError where external data is missing or lies outside the model's folder, OSError where the
    model cannot be read.
    """
    own = sha256_file(path)
    try:
        names = external_data(path)
    except BundleError:  # what no library reads has nothing beside it
        names = ()
    beside = {location: _inside(path, location) for location in names}
    if not beside:
        return own
    whole = hashlib.sha256(own.encode())
    for location, file in beside.items():
        whole.update(f"\n{location}\n{sha256_file(file)}".encode())
    return whole.hexdigest()


def external_files(path: Path) -> dict[str, Path]:
    """Where the external data really lies, by the names that the model gives it, sorted; each is a regular file.

    Raises JobError where one is missing, no file, or outside the model's folder, OSError where the model cannot be
    read.
    """
    return {location: _inside(path, location) for location in external_data(path)}


def check_onnx_files(path: Path) -> tuple[str, ...]:
    """The files that a library will open for a model, judged before it does: the model's own and its external data.

    Gives the names of the external data, without detours, as they lie in the model's folder. Raises BundleError.
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
    """The names of the files beside `path` that hold its tensors, sorted; empty where it holds them itself.

    Those of every tensor that names one, whether it is used or not. Raises BundleError for what is no ONNX file.
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
    """All that the tensors of a model name. Raises ValueError and IndexError where it is no model."""
    left = [("model", 0, len(data))]  # no recursion: graphs lie in graphs as deep as a file likes
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
    # resolve() also follows links: where the bytes really lie is what counts.
    file = None if "\0" in location else (folder / location).resolve()
    if file is None or not file.is_relative_to(folder):
        raise JobError(f"{model}: its external data {location!r} is outside its folder; do not use this model")
    if not file.exists():
        raise JobError(f"{model}: its external data {location!r} is missing; copy it beside the model")
    check_regular(file)
    return file
