"""The identity of an ONNX model: a digest over its file and over the weights it keeps beside it.

A model above 2 GiB, and any that asks for it, keeps its tensors in other files of its folder. Those must
count: the same graph over other weights is another model, and a plan cached for the one must not serve the
other. Knows just enough of the format to find the names; needs no onnx library.
"""

from __future__ import annotations

import hashlib
import mmap
import re
from pathlib import Path

from models.bundle import sha256_file
from models.errors import JobError

# TensorProto.external_data (field 13) of one entry, key "location", value: as every protobuf writer lays it out.
# The lengths are varints: of one byte up to 127, of two up to 16383.
_LOCATION = re.compile(rb"\x6a(?:[\x80-\xff][\x00-\x7f]|[\x00-\x7f])\x0a\x08location\x12([\x80-\xff]?)([\x00-\x7f])")


def onnx_digest(path: Path) -> str:
    """The model's sha256; with external data, a sha256 over those of the file and of everything it names.

    Raises JobError where external data is missing or lies outside the model's folder, OSError where the
    model cannot be read.
    """
    own = sha256_file(path)
    locations = external_data(path)
    if not locations:
        return own
    whole = hashlib.sha256(own.encode())
    for location in locations:
        whole.update(f"\n{location}\n{sha256_file(_inside(path, location))}".encode())
    return whole.hexdigest()


def external_data(path: Path) -> tuple[str, ...]:
    """The names of the files beside `path` that hold its tensors, sorted; empty where it holds them itself."""
    with path.open("rb") as handle:
        if path.stat().st_size == 0:
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
    file = (folder / location).resolve()
    if not file.is_relative_to(folder):
        raise JobError(f"{model}: its external data {location!r} lies outside its folder; do not use this model")
    if not file.is_file():
        raise JobError(f"{model}: its external data {location!r} is missing; copy it beside the model")
    return file
