"""One variant under test: its file, and the engine that will serve it.

Knows how to open the serving engine for a file, which every measurement goes through.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from convoy.app.engines.base import Engine, run_arrays
from convoy.app.engines.cpu import cpu_budget
from convoy.app.engines.onnxruntime import OnnxRuntimeCpuEngine
from convoy.export.variants.precision import Recipe
from convoy.export.variants.simulate import write_rounding_twin
from convoy.models.spec import Activation, ModelSpec


@dataclass(frozen=True, slots=True)
class Candidate:
    """A variant whose file exists; `engine` is open for as long as the candidate is in use.

    `activation` is the model's, which tells what a single output means.
    """

    recipe: Recipe
    path: Path
    engine: Engine
    activation: Activation = "softmax"

    def logits(self, images: np.ndarray) -> np.ndarray:
        """float32 [n, outputs] for images [n, ...]; n is at most the engine's largest batch."""
        (output,) = self.engine.outputs
        return run_arrays(self.engine, {self.engine.inputs[0].name: images})[output.name]


@contextmanager
def opened(spec: ModelSpec, recipes: Sequence[Recipe], folder: Path) -> Iterator[tuple[Candidate, ...]]:
    """Candidates for files in `folder`, warmed up, closed at the end.

    A variant for another device runs here as its rounding twin, which answers as that device would. Raises
    BundleError for a file that the engine does not load, EngineFailure for one that it cannot run.
    """
    with ExitStack() as stack:
        candidates = []
        for recipe in recipes:
            engine = OnnxRuntimeCpuEngine(
                folder / recipe.file if recipe.target == "cpu" else _twin(stack, folder / recipe.file),
                inputs=spec.inputs,
                outputs=spec.outputs,
                max_batch_size=spec.max_batch_size,
                precision=recipe.precision,
                threads=cpu_budget(),
            )
            stack.callback(engine.close)
            engine.warm_up()
            candidates.append(Candidate(recipe, folder / recipe.file, engine, spec.activation))
        yield tuple(candidates)


def _twin(stack: ExitStack, path: Path) -> Path:
    folder = Path(stack.enter_context(TemporaryDirectory(prefix="convoy-twin-")))
    return write_rounding_twin(path, folder / path.name)
