"""Whether an engine answers as the fp32 graph does on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle

import numpy as np

from convoy.app.engines.base import Engine, run_arrays
from convoy.app.engines.cpu import cpu_budget
from convoy.app.engines.onnxruntime import OnnxRuntimeCpuEngine
from convoy.export.proof.verify import relative_error
from tests.gpu.proof.records import Agreement, Setting
from tests.gpu.proof.subjects import Subject

# Whole batches and ones that are padded, in turn.
_CHUNKS = (1, 7, 32, 5, 128)
_REFERENCE_BATCH = 16


class Reference:
    """The fp32 graph's answers on the CPU, worked out once per network."""

    def __init__(self) -> None:
        self._answers: dict[str, dict[str, np.ndarray]] = {}

    def of(self, subject: Subject) -> dict[str, np.ndarray]:
        """float32 [n, classes] by the pictures' kind. Raises BundleError and EngineFailure."""
        if subject.name not in self._answers:
            engine = OnnxRuntimeCpuEngine(
                subject.files["fp32"],
                inputs=subject.spec.inputs,
                outputs=subject.spec.outputs,
                max_batch_size=_REFERENCE_BATCH,
                precision="fp32",
                threads=cpu_budget(),
            )
            try:
                engine.warm_up()
                pictures = _pictures(subject)
                self._answers[subject.name] = {kind: _ask(engine, some, (_REFERENCE_BATCH,)) for kind, some in pictures}
            finally:
                engine.close()
        return self._answers[subject.name]


def compare(engine: Engine, subject: Subject, setting: Setting, reference: Reference) -> Iterator[Agreement]:
    """One row for random pictures and one for real ones. Raises EngineFailure."""
    expected = reference.of(subject)
    for kind, pictures in _pictures(subject):
        answers = _ask(engine, pictures, _CHUNKS)
        yield Agreement(
            network=subject.name,
            engine=setting.engine,
            precision=setting.precision,
            pictures=kind,
            images=len(pictures),
            # JSON has no infinity.
            max_relative_error=min(relative_error(answers, expected[kind]), 1e9),
            top1_agreement=float((answers.argmax(axis=1) == expected[kind].argmax(axis=1)).mean()),
        )


def _pictures(subject: Subject) -> tuple[tuple[str, np.ndarray], ...]:
    return ("random", subject.random), ("real", subject.real)


def _ask(engine: Engine, pictures: np.ndarray, chunks: tuple[int, ...]) -> np.ndarray:
    answers, start = [], 0
    for chunk in cycle(chunks):
        if start >= len(pictures):
            break
        some = pictures[start : start + min(chunk, engine.info.batch_sizes[-1])]
        answers.append(run_arrays(engine, {engine.inputs[0].name: some})[engine.outputs[0].name])
        start += len(some)
    return np.concatenate(answers)
