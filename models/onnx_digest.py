"""The identity of an ONNX model: a digest over its file and over the weights it keeps beside it.

A model above 2 GiB, and any that asks for it, keeps its tensors in other files of its folder. Those must
count: the same graph over other weights is another model, and a plan cached for the one must not serve the
other. Knows just enough of the format to find the names; needs no onnx library.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import re
from pathlib import Path

from convoy.models.bundle import sha256_file
from convoy.models.errors import BundleError, JobError
from convoy.models.files import check_regular, open_regular

# TensorProto.external_data (field 13) of one entry, key "location", value: as every protobuf writer lays it out.
# The lengths are varints: of one byte up to 127, of two up to 16383.
_LOCATION = re.compile(rb"\x6a(?:[\x80-\xff][\x00-\x7f]|[\x00-\x7f])\x0a\x08location\x12([\x80-\xff]?)([\x00-\x7f])")


def onnx_digest(path: Path) -> str:
    """The model's sha256; with external data, a sha256 over those of the file and of everything it names.

    Raises JobError where external data is missing or lies outside the model's folder, OSError where the
    model cannot be read.
    """
    own = sha256_file(path)
    beside = external_files(path)
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
    """The names of the files beside `path` that hold its tensors, sorted; empty where it holds them itself."""
    with open_regular(path) as handle:
        if os.fstat(handle.fileno()).st_size == 0:
            return ()
        with mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ) as data:
            names = {_value(data, match) for match in _LOCATION.finditer(data)}
    return tuple(sorted(names))


def _value(data: mmap.mmap, match: re.Match[bytes]) -> str:
    low, high = match.group(1), match.group(2)[0]
    length = (low[0] & 0x7F) | (high << 7) if low else high
    return data[match.end() : match.end() + length].decode(errors="replace")


def _inside(model: Path, location: str) -> Path:
    folder = model.parent.resolve()
    # resolve() also follows links: where the bytes really lie is what counts.
    file = None if "\0" in location else (folder / location).resolve()
    if file is None or not file.is_relative_to(folder):
        raise JobError(f"{model}: its external data {location!r} lies outside its folder; do not use this model")
    if not file.exists():
        raise JobError(f"{model}: its external data {location!r} is missing; copy it beside the model")
    check_regular(file)
    return file
