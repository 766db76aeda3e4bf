"""How a lane runs a batch: where scheduling's requests become an engine's parts, and answers come back.

The only place that knows both: scheduling knows no engines, and engines know no requests.
"""

from __future__ import annotations

from convoy.app.batch import Answer, BatchResult, EngineFailure
from convoy.app.engines.base import Engine
from convoy.app.engines.delivery import check_answer
from convoy.app.engines.parts import Part, Shapes
from convoy.app.scheduling.request import Request, Shape
from convoy.app.scheduling.scheduler import Runner
from convoy.app.scheduling.slab import Slab


def lane_runner(slab: Slab, engine: Engine) -> Runner:
    """How a lane runs a batch: the requests' slots become views, the engine does the rest.

    Whatever engine it is, only answers that the model declares leave this place: what reads them believes their shapes,
    and behind bytes that are missing would lie those of another request.
    """
    promises = _Promises(engine)

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
        for request, answers in zip(requests, result.answers, strict=True):
            promises.check(request, answers)
        return result

    return run


class _Promises:
    """What the outputs must be, worked out once for each number of samples."""

    def __init__(self, engine: Engine) -> None:
        self._specs, self._batched = engine.outputs, engine.batched
        self._known: dict[int, list[tuple[Shape, int]]] = {}  # by samples; the bytes are -1 where only the run knows

    def check(self, request: Request, answers: tuple[Answer, ...]) -> None:
        """Raises EngineFailure where an answer is not what was promised."""
        known = self._known.get(request.samples)
        if known is None:
            known = self._known[request.samples] = self._of(request.samples)
        for index, answer in zip(request.wanted, answers, strict=True):
            shape, nbytes = known[index]
            if len(answer.data) != nbytes or answer.shape != shape:
                check_answer(self._specs[index], shape, answer)

    def _of(self, samples: int) -> list[tuple[Shape, int]]:
        batch = (samples,) if self._batched else ()
        sizes = [spec.sample_bytes for spec in self._specs]
        return [
            ((*batch, *spec.shape), -1 if size is None else samples * size)
            for spec, size in zip(self._specs, sizes, strict=True)
        ]


def _whole(request: Request) -> Shapes:
    """The inputs' shapes with the batch dimension."""
    return tuple([(request.samples, *shape) for shape in request.shapes])
