"""How a batch is computed on the fake GPU: by the CPU, at the addresses of a fake TensorRT context, in two pieces."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.support.fake_cuda import FakeCuda

if TYPE_CHECKING:
    from tests.support.tensorrt_run import Runs

_tokens = itertools.count(1)


def halves(runs: Runs, context: Any) -> tuple[Callable[[], None], Callable[[], None]]:
    """A batch's work in two pieces: the first leaves something in the scratch memory that the second needs."""
    token, alive = next(_tokens), weakref.ref(context)

    def scratch() -> np.ndarray:
        assert alive() is not None, "the context was destroyed with work under way"
        return runs.cuda.read(context_scratch, 8).view(np.int64)

    context_scratch, _ = context.state["scratch"]

    def first() -> None:
        runs.steps.append(("begins", token))
        scratch()[0] = token

    def second() -> None:
        runs.steps.append(("ends", token))
        if scratch()[0] == token:
            _compute(runs, alive())
        # Else somebody else computed in the same memory meanwhile, and the outputs stay what they were.

    return first, second


def inputs_of(runs: Runs, context: Any) -> dict[str, np.ndarray]:
    addresses, session = context.state["addresses"], context.state["engine"].state["session"]
    return {
        node.name: _array(runs.cuda, addresses[node.name], _numpy_type(node), context.state["shapes"][node.name])
        for node in session.get_inputs()
    }


def _compute(runs: Runs, context: Any) -> None:
    session, addresses = context.state["engine"].state["session"], context.state["addresses"]
    feeds = {name: array.copy() for name, array in inputs_of(runs, context).items()}
    names = [node.name for node in session.get_outputs()]
    for name, array in zip(names, session.run(names, feeds), strict=True):
        np.copyto(_array(runs.cuda, addresses[name], array.dtype, array.shape), runs.distorts(array))


def _array(cuda: FakeCuda, address: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> np.ndarray:
    nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    return cuda.read(address, nbytes).view(dtype).reshape(shape)


def _numpy_type(node: Any) -> np.dtype[Any]:
    names = {"tensor(float)": "f4", "tensor(float16)": "f2", "tensor(bool)": "?", "tensor(uint8)": "u1"}
    return np.dtype(names.get(node.type) or node.type[len("tensor(") : -1])
