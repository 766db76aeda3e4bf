from __future__ import annotations

import json
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from convoy.loadtest.answers import FULL_EVERY, FULL_FIRST, AnswerCheck, error_text
from convoy.loadtest.problems import MAX_TEXT_CHARS, Fault

PREDICTION = json.dumps({"model": "m", "predictions": [{"class_id": 7, "label": None, "score": 0.5}]}).encode()
UNREAD = FULL_FIRST + 1  # a ticket that is not among those read in full


def outputs(*rows: dict[str, object]) -> bytes:
    return json.dumps({"model_name": "m", "outputs": list(rows)}).encode()


JSON_OUTPUT = {"name": "y", "datatype": "FP32", "shape": [1, 2], "data": [1.0, 2.0]}
BINARY_OUTPUT = {"name": "y", "datatype": "FP32", "shape": [1, 2], "parameters": {"binary_data_size": 8}}
TWO_FLOATS = struct.pack("<2f", 1, 2)


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("predictions", PREDICTION),
        ("predictions", b'{"model": "m", "detections": []}'),
        ("predictions", b'{"model": "m", "detections": [{"box": [0, 0, 1, 1], "class_id": 1, "score": 0.5}]}'),
        ("predictions", b'{"model": "m", "segmentation": {"classes": [{"class_id": 1, "share": 1.0, "rle": {}}]}}'),
        ("infer", outputs(JSON_OUTPUT)),
        ("infer", outputs({**JSON_OUTPUT, "data": [[1.0, 2.0]]})),
        ("infer", outputs(JSON_OUTPUT) + b"\n"),
        ("infer", outputs({**JSON_OUTPUT, "data": [float("nan"), float("inf")]})),
        ("infer", outputs(BINARY_OUTPUT) + TWO_FLOATS),
        ("infer", outputs(BINARY_OUTPUT) + b"        "),  # a tensor may look like white space
        ("infer", outputs(BINARY_OUTPUT, JSON_OUTPUT) + TWO_FLOATS),
        ("infer", outputs({**JSON_OUTPUT, "shape": [0], "data": []})),
    ],
)
def test_good_answers_are_good(route, body):
    assert AnswerCheck(route)(0, 200, body) is None


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("predictions", b""),
        ("predictions", b"<html>ok</html>"),
        ("predictions", b'{"predictions": [{"class_id": 1, "score": 0.5}]}'),
        ("predictions", b'{"model": "m", "predictions": []}'),
        ("predictions", b'{"model": "m", "predictions": [{"class_id": 1}]}'),
        ("predictions", b'{"model": "m", "predictions": 7}'),
        ("predictions", b'{"model": "m", "detections": [{"class_id": 1, "score": 0.5}]}'),
        ("predictions", b'{"model": "m", "segmentation": {"classes": [{"class_id": 1}]}}'),
        ("predictions", b'["model"]'),
        ("predictions", PREDICTION[:-3]),
        ("infer", b'{"outputs": []}'),
        ("infer", outputs({**JSON_OUTPUT, "data": [1.0]})),
        ("infer", outputs(BINARY_OUTPUT)),
        ("infer", outputs(BINARY_OUTPUT) + TWO_FLOATS + b"x"),
        ("infer", b'{"outputs": ' + b"[" * 5000),
        ("infer", outputs({"name": "y"})),
    ],
)
def test_a_200_that_is_no_answer_is_garbage(route, body):
    problem = AnswerCheck(route)(0, 200, body)
    assert problem.fault is Fault.GARBAGE


def test_every_answer_is_searched_and_a_sample_read_in_full():
    check = AnswerCheck("predictions")
    half = b'{"model": "m", "predictions": [{"class'
    assert check(UNREAD, 200, b"nonsense") is not None
    assert check(UNREAD, 200, half) is None
    assert check(FULL_EVERY * 100, 200, half) is not None


def test_an_error_carries_status_and_the_servers_own_words():
    problem = AnswerCheck("infer")(UNREAD, 429, b'{"error": "the queue is full"}')
    assert (problem.fault, problem.status, problem.text) == (Fault.HTTP, 429, "the queue is full")


def test_what_a_server_says_cannot_steer_the_terminal():
    text = error_text(b'{"error": "one\\ntwo \\u001b[31m three ' + b"x" * 1000 + b'"}')
    assert "\x1b" not in text
    assert "\n" not in text
    assert len(text) <= MAX_TEXT_CHARS


@given(st.binary(max_size=200), st.integers(100, 599), st.integers(0, 200))
def test_no_bytes_break_the_check(body, status, ticket):
    for route in ("predictions", "infer"):
        problem = AnswerCheck(route)(ticket, status, body)
        assert problem.text.isprintable()
