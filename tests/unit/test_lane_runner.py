"""What a lane's runner makes of an engine's results."""

from __future__ import annotations

from dataclasses import replace

import pytest

from convoy.app.engines.batch import BatchResult, EngineFailure, FailureScope, StageTimes
from convoy.app.lifecycle.model_lifecycle import lane_runner
from convoy.app.scheduling.request import ModelKey, Request, TensorRef
from convoy.app.scheduling.slab import Slab
from convoy.models.spec import TensorSpec
from convoy.models.tensors import TensorBytes, pack
from tests.support.fake_engine import FakeEngine

NBYTES = 4
X, Y = TensorSpec("x", "FP32", (1,)), TensorSpec("y", "FP32", (1,))


def two_requests(slab: Slab) -> tuple[Request, ...]:
    requests = []
    for number in range(2):
        ref = slab.reserve(2 * NBYTES).ref
        places = (TensorRef(ref, 0, NBYTES),), (0,), (TensorRef(ref, NBYTES, NBYTES),)
        requests.append(Request(number, ModelKey("rows", 1), 1, ((1,),), (ref,), *places, 0))
    return tuple(requests)


@pytest.mark.parametrize("missing", ["a request", "an output"])
def test_an_engine_that_leaves_an_answer_out_has_failed(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else who waits for it would wait for ever, or be sent what lay in its memory before."""
    engine = FakeEngine((X,), (Y,), max_batch_size=4)
    slab = Slab(1 << 12)
    requests = two_requests(slab)
    run = lane_runner(slab, engine)
    assert [len(answers) for answers in run(requests).answers] == [1, 1]

    whole = engine.run

    def without(parts):
        result = whole(parts)
        first, second = result.answers
        return result._replace(answers=(first,) if missing == "a request" else (first, second[:0]))

    monkeypatch.setattr(engine, "run", without)
    with pytest.raises(EngineFailure, match="every request"):
        run(requests)


TEXTS = bytes(pack([b"one"]))


@pytest.mark.parametrize(
    ("spec", "answer", "says"),
    [
        (Y, ((1, 1), bytes(8)), "'y' has 8 bytes"),  # a place that is longer than what was written
        (Y, ((1, 1), b""), "'y' has 0 bytes"),
        (Y, ((1, 2), bytes(8)), r"'y' has the shape \[1, 2\], but the model declares \[1, 1\]"),
        (Y, ((2, 1), bytes(8)), r"'y' has the shape \[2, 1\], but the model declares \[1, 1\]"),
        (Y, ((1, 0), b""), r"'y' has the shape \[1, 0\]"),
        (Y, ((1,), bytes(4)), r"'y' has the shape \[1\]"),
        (replace(Y, shape=(-1,)), ((1, 3), bytes(8)), "'y' has 8 bytes"),
        (replace(Y, shape=(-1,)), ((2, 3), bytes(24)), r"'y' has the shape \[2, 3\]"),
        (replace(Y, shape=(-1, 2)), ((1, 3), bytes(12)), r"'y' has the shape \[1, 3\]"),
        (TensorSpec("y", "BYTES", (1,)), ((1, 1), TEXTS * 2), "number of string elements 2 for output 'y'"),
        (TensorSpec("y", "BYTES", (1,)), ((1, 1), TEXTS[:-1]), "incomplete string data for output 'y'"),
        (TensorSpec("y", "BYTES", (1,)), ((1, 2), TEXTS * 2), r"'y' has the shape \[1, 2\]"),
    ],
)
def test_no_answer_leaves_an_engine_that_is_not_what_the_model_declares(
    spec: TensorSpec, answer: tuple[tuple[int, ...], bytes], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = FakeEngine((X,), (spec,), max_batch_size=4)
    slab = Slab(1 << 12)
    wrong = TensorBytes(answer[0], memoryview(answer[1]))
    monkeypatch.setattr(engine, "run", lambda parts: BatchResult(((wrong,),) * len(parts), StageTimes(0, 0, 0)))
    with pytest.raises(EngineFailure, match=says) as failed:
        lane_runner(slab, engine)(two_requests(slab))
    assert failed.value.scope is FailureScope.BATCH
