"""Checks whether a response is valid.

Every response is searched for a word that a valid one contains. The first hundred and every 64th are parsed in full,
which finds a server that sends 200 with a wrong body and still leaves time to generate load.
"""

from __future__ import annotations

import json
import math
from typing import Any, Literal

from convoy.loadtest.problems import MAX_TEXT_CHARS, Fault, Problem, one_line

Form = Literal["predictions", "infer", "plain"]

FULL_FIRST = 100
FULL_EVERY = 64
HEAD_BYTES = 64 * 1024
WORDS: dict[Form, bytes] = {"predictions": b'"model"', "infer": b'"outputs"', "plain": b""}


class AnswerCheck:
    """Call it with (ticket, status, body). None means a valid response.

    `form` "plain" is for servers with other routes: the body is not parsed, only `word` must be in its first 64 KiB.
    With `word` None, the word is one that every valid response of this form contains.
    """

    def __init__(self, form: Form, word: bytes | None = None) -> None:
        self.form: Form = form
        self.word = WORDS[form] if word is None else word

    def __call__(self, ticket: int, status: int, body: bytes) -> Problem | None:
        if status != 200:
            return Problem(Fault.HTTP, error_text(body), status)
        if body.find(self.word, 0, HEAD_BYTES) < 0:
            return Problem(
                Fault.GARBAGE,
                f"200 without {one_line(self.word.decode('utf-8', 'backslashreplace'))}: {_excerpt(body)}",
            )
        if self.form != "plain" and (ticket < FULL_FIRST or ticket % FULL_EVERY == 0):
            return self.read_in_full(body)
        return None

    def read_in_full(self, body: bytes) -> Problem | None:
        # latin-1 maps each byte to one character, so the end of the JSON is a byte position, and the tensors after it
        # are decoded, too.
        text = body.decode("latin-1").lstrip()
        try:
            answer, end = json.JSONDecoder().raw_decode(text)
            good = _good_predictions(answer) if self.form == "predictions" else _good_outputs(answer, text[end:])
        except (ValueError, KeyError, TypeError, RecursionError):
            good = False
        return None if good else Problem(Fault.GARBAGE, f"200 with an invalid body: {_excerpt(body)}")


def error_text(body: bytes) -> str:
    """The `error` of the protocol, else the beginning of the body."""
    try:
        answer = json.loads(body)
    except (ValueError, RecursionError):
        return _excerpt(body)
    if isinstance(answer, dict) and "error" in answer:
        return one_line(str(answer["error"]))
    return _excerpt(body)


def _good_predictions(answer: dict[str, Any]) -> bool:
    """Classes, boxes or a class map. An image may have no boxes, but never no classes."""
    if "detections" in answer:
        return all({"box", "class_id", "score"} <= found.keys() for found in answer["detections"])
    if "segmentation" in answer:
        return all({"class_id", "share", "rle"} <= found.keys() for found in answer["segmentation"]["classes"])
    return bool(answer["predictions"]) and all({"class_id", "score"} <= found.keys() for found in answer["predictions"])


def _good_outputs(answer: dict[str, list[dict[str, object]]], behind: str) -> bool:
    """Each output has as many values as its shape says, or as many binary bytes as it declares."""
    outputs = answer["outputs"]
    binary_bytes = 0
    for output in outputs:
        if "data" in output:
            data, shape = output["data"], output["shape"]
            if not isinstance(data, list) or not isinstance(shape, list) or _count(data) != math.prod(shape):
                return False
        else:
            parameters = output["parameters"]
            binary_bytes += int(parameters["binary_data_size"]) if isinstance(parameters, dict) else 0
    return bool(outputs) and len(behind if binary_bytes else behind.strip()) == binary_bytes


def _count(data: object) -> int:
    return sum(_count(item) for item in data) if isinstance(data, list) else 1


def _excerpt(body: bytes) -> str:
    if not body:
        return "(empty body)"
    return one_line(body[:MAX_TEXT_CHARS].decode("utf-8", "backslashreplace"))
