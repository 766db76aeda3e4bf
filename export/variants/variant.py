"""One variant under test: its file, and the engine that will serve it.

Knows how to open the serving engine for a file, which every measurement goes through.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from convoy.app.engines.base import Engine, run_arrays
from convoy.app.engines.cpu import cpu_budget
from convoy.app.engines.jobs import Job, Place
from convoy.app.engines.machine import find_cpu
from convoy.app.engines.table import REFERENCE, Row
from convoy.export.rows import Rows
from convoy.export.variants.precision import Recipe
from convoy.export.variants.simulate import write_rounding_twin
from convoy.models.bundle import Variant
from convoy.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class OpenVariant:
    """A variant whose file exists; `engine` is open for as long as the candidate is in use.

    `spec` is the model's, which tells what its outputs mean. `is_twin`: the engine runs what answers as another device
    would.
    """

    recipe: Recipe
    path: Path
    engine: Engine
    spec: ModelSpec
    is_twin: bool = False

    def answers(self, inputs: Rows) -> dict[str, np.ndarray]:
        """Every output [n, ...] for inputs [n, ...]; n is at most the engine's largest batch."""
        return run_arrays(self.engine, inputs)


@contextmanager
def opened(spec: ModelSpec, recipes: Sequence[Recipe], folder: Path) -> Iterator[tuple[OpenVariant, ...]]:
    """Candidates for files in `folder`, warmed up, closed at the end.

    A variant for another device runs here as its rounding twin, which answers as that device would. Raises
    BundleError for a file that the engine does not load, EngineFailure for one that it cannot run.
    """
    with ExitStack() as stack:
        candidates = []
        for recipe in recipes:
            row, path = recipe.row, folder / recipe.file
            engine = (
                open_engine(spec, recipe, row, path)
                if row
                else open_engine(spec, recipe, REFERENCE, _twin(stack, path))
            )
            stack.callback(engine.close)
            engine.warm_up()
            candidates.append(OpenVariant(recipe, path, engine, spec, is_twin=row is None))
        yield tuple(candidates)


@dataclass(frozen=True, slots=True)
class OtherEngines:
    """What `opened_elsewhere` opened. `refused` says by variant's file and by library why one is not there."""

    candidates: tuple[OpenVariant, ...]
    refused: Mapping[str, Mapping[str, str]]


@contextmanager
def opened_elsewhere(
    spec: ModelSpec, recipes: Sequence[Recipe], folder: Path, check: Callable[[OpenVariant], None] = lambda one: None
) -> Iterator[OtherEngines]:
    """The same files in the other engines of this machine's CPU, as far as they load there and pass the check.

    `check` raises JobError for one that answers otherwise than it should.
    """
    with ExitStack() as stack:
        found: list[OpenVariant] = []
        refused: dict[str, dict[str, str]] = {}
        for recipe in recipes:
            for row in recipe.other_rows:
                try:
                    engine = open_engine(spec, recipe, row, folder / recipe.file)
                    stack.callback(engine.close)
                    engine.warm_up()
                    candidate = OpenVariant(recipe, folder / recipe.file, engine, spec)
                    check(candidate)
                except Exception as error:  # whatever a library raises costs its own figures alone
                    assert row.library is not None, "export measures every engine of a CPU; this is a bug"
                    # A manifest names no folder of this machine.
                    why = str(error).replace(f"{folder}/", "")
                    refused.setdefault(recipe.file, {})[row.library(find_cpu())] = why
                else:
                    found.append(candidate)
        yield OtherEngines(tuple(found), refused)


def open_engine(spec: ModelSpec, recipe: Recipe, row: Row, path: Path) -> Engine:
    """The row's engine for a variant's file on this CPU. Raises BundleError."""
    variant = Variant(path.name, recipe.precision, recipe.target, True, "", 0.0, None, None)
    of_model = (path.parent, spec, (variant,), None)
    job = Job(*of_model, spec.max_batch_size, "auto", find_cpu(), plan_cache=None, threads=cpu_budget())
    return row.open(job, variant, Place())


def _twin(stack: ExitStack, path: Path) -> Path:
    folder = Path(stack.enter_context(TemporaryDirectory(prefix="convoy-twin-")))
    return write_rounding_twin(path, folder / path.name)
