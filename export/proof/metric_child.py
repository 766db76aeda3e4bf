"""`python -m convoy.export.proof.metric_child FILE FUNCTION`: answers frames of outputs and targets with scores.

A frame is its length in 8 bytes, followed by that many bytes: an `.npz` on the way in, JSON on the way out. What the
function prints goes to the log. Ends when its parent closes the pipe.
"""

from __future__ import annotations

import io
import json
import os
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import numpy as np

from convoy.export.sources.user_code import blame, load_function
from convoy.models.errors import JobError

OUT, TARGETS = "out:", "targets"
_LENGTH = struct.Struct("<Q")


def write_frame(stream: IO[bytes], content: bytes) -> None:
    """Write a frame. Raises OSError if no one reads."""
    stream.write(_LENGTH.pack(len(content)) + content)
    stream.flush()


def read_frame(stream: IO[bytes]) -> bytes:
    """Read a frame. Raises EOFError at the end."""
    head = stream.read(_LENGTH.size)
    content = stream.read(_LENGTH.unpack(head)[0]) if len(head) == _LENGTH.size else b""
    if len(head) < _LENGTH.size or len(content) < _LENGTH.unpack(head)[0]:
        raise EOFError
    return content


def main(file: Path, name: str) -> None:
    """Answer until the pipe is closed."""
    # What the user's code prints must not mix with the frames.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    function: Callable[..., Any] | None = None
    while True:
        try:
            frame = read_frame(sys.stdin.buffer)
        except EOFError:
            return
        try:
            function = function or load_function(file, name)
            answer: dict[str, Any] = {"scores": _scores(function, frame, file, name) if frame else []}
        except JobError as error:
            answer = {"error": str(error)}
        write_frame(answers, json.dumps(answer).encode())


def _scores(function: Callable[..., Any], frame: bytes, file: Path, name: str) -> list[float]:
    with np.load(io.BytesIO(frame), allow_pickle=False) as arrays:
        targets = arrays[TARGETS]
        outputs = {key.removeprefix(OUT): arrays[key] for key in arrays.files if key.startswith(OUT)}
    shown, count = f"{file.name}:{name}", len(targets)
    given = outputs if len(outputs) > 1 else next(iter(outputs.values()))
    try:
        scores = np.asarray(function(given, targets))
    except (Exception, SystemExit) as error:
        raise JobError(f"{shown} failed: {blame(error, file)}") from error
    if scores.shape != (count,) or scores.dtype.kind not in "biuf":
        raise JobError(
            f"{shown} returned {scores.dtype} {list(scores.shape)} for {count} samples; it must return one number for "
            f"each sample, [{count}]"
        )
    if not np.isfinite(scores).all():
        first = int(np.argmin(np.isfinite(scores)))
        raise JobError(
            f"{shown} returned {float(scores[first])} for sample {first} of a batch; a score must be a finite number"
        )
    return [float(score) for score in scores]


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
