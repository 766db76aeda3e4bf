"""How a lane runs a batch: where scheduling's requests become an engine's parts, and answers come back.

The only place that knows both: scheduling knows no engines, and engines know no requests.
"""

from __future__ import annotations

from convoy.app.batch import BatchResult, EngineFailure
from convoy.app.engines.base import Engine
from convoy.app.engines.delivery import check_answer
from convoy.app.engines.parts import Part
from convoy.app.scheduling.request import Request
from convoy.app.scheduling.scheduler import Runner
from convoy.app.scheduling.slab import Slab


def lane_runner(slab: Slab, engine: Engine) -> Runner:
    """How a lane runs a batch: the requests' slots become views, the engine does the rest.

    Whatever engine it is, only answers that the model declares leave this place: what reads them believes their shapes,
    and behind bytes that are missing would lie those of another request.
    """

    def part(request: Request) -> Part:
        batch, slots = _batch(engine, request), request.slots
        shapes = tuple([(*batch, *shape) for shape in request.shapes])
        inputs, outputs = slab.tensors(slots, request.inputs), slab.tensors(slots, request.outputs)
        return Part(request.samples, shapes, inputs, request.wanted, outputs)

    def run(requests: tuple[Request, ...]) -> BatchResult:
        result = engine.run([part(request) for request in requests])
        if [len(answers) for answers in result.answers] != [len(request.wanted) for request in requests]:
            raise EngineFailure(
                "the engine did not answer every request with the outputs that it wanted; this is a bug"
            )
        for request, answers in zip(requests, result.answers, strict=True):
            for index, answer in zip(request.wanted, answers, strict=True):
                spec = engine.outputs[index]
                check_answer(spec, (*_batch(engine, request), *spec.shape), answer)
        return result

    return run


def _batch(engine: Engine, request: Request) -> tuple[int, ...]:
    """The batch dimension of the request's tensors, where they have one."""
    return (request.samples,) if engine.batched else ()
