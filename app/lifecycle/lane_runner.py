"""How a lane runs a batch: where scheduling's requests become an engine's parts, and answers come back.

The only place that knows both: scheduling knows no engines, and engines know no requests.
"""

from __future__ import annotations

from convoy.app.batch import BatchResult, EngineFailure
from convoy.app.engines.base import Engine
from convoy.app.engines.parts import Part, Shapes
from convoy.app.scheduling.request import Request
from convoy.app.scheduling.scheduler import Runner
from convoy.app.scheduling.slab import Slab


def lane_runner(slab: Slab, engine: Engine) -> Runner:
    """How a lane runs a batch: the requests' slots become views, the engine does the rest."""

    def run(requests: tuple[Request, ...]) -> BatchResult:
        whole: dict[int, Shapes] = {}  # by samples; in all else the shapes of a batch agree
        parts = []
        for request in requests:
            samples = request.samples
            shapes = whole.get(samples)
            if shapes is None:
                shapes = whole[samples] = _whole(request) if engine.batched else request.shapes
            slots = request.slots
            inputs, outputs = slab.tensors(slots, request.inputs), slab.tensors(slots, request.outputs)
            parts.append(Part(samples, shapes, inputs, request.wanted, outputs))
        result = engine.run(parts)
        if [len(answers) for answers in result.answers] != [len(request.wanted) for request in requests]:
            raise EngineFailure(
                "the engine did not answer every request with the outputs that it wanted; this is a bug"
            )
        return result

    return run


def _whole(request: Request) -> Shapes:
    """The inputs' shapes with the batch dimension."""
    return tuple([(request.samples, *shape) for shape in request.shapes])
