"""What a lane's runner makes of an engine's results."""

from __future__ import annotations

import pytest

from convoy.app.batch import EngineFailure
from convoy.app.lifecycle.lane_runner import lane_runner
from convoy.app.scheduling.request import ModelKey, Request, TensorPlace
from convoy.app.scheduling.slab import Slab
from convoy.models.spec import TensorSpec
from tests.support.fake_engine import FakeEngine

NBYTES = 4


@pytest.mark.parametrize("missing", ["a request", "an output"])
def test_an_engine_that_leaves_an_answer_out_has_failed(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else who waits for it would wait for ever, or be sent what lay in its memory before."""
    x, y = TensorSpec("x", "FP32", (1,)), TensorSpec("y", "FP32", (1,))
    engine = FakeEngine((x,), (y,), max_batch_size=4)
    slab = Slab(1 << 12)
    requests = []
    for number in range(2):
        ref = slab.reserve(2 * NBYTES).ref
        places = (TensorPlace(0, 0, NBYTES),), (0,), (TensorPlace(0, NBYTES, NBYTES),)
        requests.append(Request(number, ModelKey("rows", 1), 1, ((1,),), (ref,), *places, 0))
    run = lane_runner(slab, engine)
    assert [len(answers) for answers in run(tuple(requests)).answers] == [1, 1]

    whole = engine.run

    def without(parts):
        result = whole(parts)
        first, second = result.answers
        return result._replace(answers=(first,) if missing == "a request" else (first, second[:0]))

    monkeypatch.setattr(engine, "run", without)
    with pytest.raises(EngineFailure, match="every request"):
        run(tuple(requests))
