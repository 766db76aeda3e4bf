"""How a lane runs a batch: where scheduling's requests become an engine's parts, and answers come back.

The only place that knows both: scheduling knows no engines, and engines know no requests.
"""

from __future__ import annotations

from app.engines.base import Blast, Engine, EngineFailure, Part
from app.scheduling.request import Answer, BatchAnswers, Request, StageTimes
from app.scheduling.scheduler import Reach, RunFailed, Runner
from app.scheduling.slab import Slab

_REACH = {
    Blast.BATCH: Reach.BATCH,
    Blast.MEMORY: Reach.MEMORY,
    Blast.ENGINE: Reach.LANE,
    Blast.DEVICE: Reach.DEVICE,
}


def lane_runner(slab: Slab, engine: Engine) -> Runner:
    """How a lane runs a batch: the requests' slots become views, the engine does the rest."""

    def run(requests: tuple[Request, ...]) -> BatchAnswers:
        parts = [
            Part(
                samples=request.samples,
                shapes=tuple([(request.samples, *shape) if engine.batched else shape for shape in request.shapes]),
                inputs=tuple([slab.tensor(ref) for ref in request.inputs]),
                wanted=request.wanted,
                destinations=tuple([None if ref is None else slab.tensor(ref) for ref in request.outputs]),
            )
            for request in requests
        ]
        try:
            result = engine.run(parts)
        except EngineFailure as failure:
            raise RunFailed(str(failure), _REACH[failure.blast]) from failure
        return BatchAnswers(
            answers=tuple(
                [
                    tuple([Answer(index, *output) for index, output in zip(request.wanted, outputs, strict=True)])
                    for request, outputs in zip(requests, result.outputs, strict=True)
                ]
            ),
            times=StageTimes(result.copy_in_ns, result.compute_ns, result.copy_out_ns, result.waited_ns),
        )

    return run
