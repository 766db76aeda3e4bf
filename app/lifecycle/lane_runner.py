"""How a lane runs a batch: where scheduling's requests become an engine's parts, and answers come back.

The only place that knows both: scheduling knows no engines, and engines know no requests.
"""

from __future__ import annotations

from convoy.app.engines.base import Blast, Engine, EngineFailure, Part
from convoy.app.scheduling.request import BatchAnswers, Request, Shape, StageTimes
from convoy.app.scheduling.scheduler import Reach, RunFailed, Runner
from convoy.app.scheduling.slab import Slab

Shapes = tuple[Shape, ...]
_REACH = {
    Blast.BATCH: Reach.BATCH,
    Blast.MEMORY: Reach.MEMORY,
    Blast.ENGINE: Reach.LANE,
    Blast.DEVICE: Reach.DEVICE,
}


def lane_runner(slab: Slab, engine: Engine) -> Runner:
    """How a lane runs a batch: the requests' slots become views, the engine does the rest."""

    def run(requests: tuple[Request, ...]) -> BatchAnswers:
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
        try:
            result = engine.run(parts)
        except EngineFailure as failure:
            raise RunFailed(str(failure), _REACH[failure.blast]) from failure
        if [len(answers) for answers in result.outputs] != [len(request.wanted) for request in requests]:
            raise RunFailed("the engine did not answer every request with the outputs that it wanted; this is a bug")
        times = StageTimes(result.copy_in_ns, result.compute_ns, result.copy_out_ns, result.waited_ns)
        return BatchAnswers(result.outputs, times)

    return run


def _whole(request: Request) -> Shapes:
    """The inputs' shapes with the batch dimension."""
    return tuple([(request.samples, *shape) for shape in request.shapes])
