"""What only TensorRT for RTX has when a plan is run: a runtime configuration, and kernels that are compiled here.

Kernels that fit every size are compiled with a context, and those for one size when it is first enqueued, as the
strategy for dynamic shapes says. A runtime cache keeps them for other contexts and, serialised, for another start.
What the real library does with its cache on a GPU is known from its documentation only.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.support.fake_tensorrt import HostMemory, Plays, new

# In place of a batch size: the kernels that fit every size.
EVERY_SIZE = 0


@dataclass
class Jit:
    """The script: a cache from another `origin` (version, device, driver) is refused, whoever made it.

    The record: the batch sizes for which kernels were `compiled`; those that came from a cache are not among them.
    """

    origin: str = "1.7.1 on Fake GPU"
    compiled: list[int] = field(default_factory=list)

    def create(self, context: Any) -> None:
        """A context begins."""
        self._settle(context, EVERY_SIZE)

    def enqueue(self, context: Any, size: int, *, is_static: bool) -> None:
        """A batch of `size` is enqueued in a context that has, if it `is_static`, no other size."""
        strategy = context.state["config"].dynamic_shapes_kernel_specialization_strategy.name
        if not is_static and size not in context.state["kernels"] and strategy != "NONE":
            self._settle(context, size)

    def _settle(self, context: Any, size: int) -> None:
        """Get kernels for this size."""
        key = (context.state["engine"].state["body"]["onnx"], size)
        cache = context.state["config"].state["cache"]
        known = set() if cache is None else cache.state["kernels"]
        if key not in known:
            self.compiled.append(size)
        known.add(key)
        context.state["kernels"].add(size)

    def dump(self, kernels: set[tuple[str, int]]) -> bytes:
        return json.dumps({"origin": self.origin, "kernels": sorted(kernels)}).encode()

    def load(self, blob: bytes) -> set[tuple[str, int]] | None:
        """The kernels in a serialised cache; None where it is refused."""
        try:
            body = json.loads(blob)
        except ValueError:
            return None
        return {(onnx, size) for onnx, size in body["kernels"]} if body["origin"] == self.origin else None


def new_config(engine: Any, strategy: Any = None) -> Any:
    """A runtime configuration with the library's defaults."""
    trt = engine.module
    return new(
        trt,
        "IRuntimeConfig",
        cuda_graph_strategy=trt.CudaGraphStrategy.DISABLED,
        dynamic_shapes_kernel_specialization_strategy=trt.DynamicShapesKernelSpecializationStrategy.LAZY,
        allocation=strategy or trt.ExecutionContextAllocationStrategy.STATIC,
        cache=None,
    )


def config_plays(jit: Jit, complain: Callable[[Any], None]) -> Plays:
    """`complain` logs why something is refused, in the words of the script."""

    def set_runtime_cache(config: Any, cache: Any = None) -> bool:
        config.state["cache"] = cache
        return True

    def set_allocation(config: Any, strategy: Any = None) -> None:
        config.state["allocation"] = strategy or config.module.ExecutionContextAllocationStrategy.STATIC

    def create_runtime_cache(config: Any) -> Any:
        return new(config.module, "IRuntimeCache", kernels=set(), logger=config.state["logger"])

    def create_runtime_config(engine: Any) -> Any:
        config = new_config(engine)
        config.state["logger"] = engine.state["logger"]
        return config

    def deserialize(cache: Any, blob: Any) -> bool:
        kernels = jit.load(bytes(blob))
        if kernels is None:
            complain(cache)
            return False
        cache.state["kernels"] |= kernels
        return True

    return {
        ("ICudaEngine", "create_runtime_config"): create_runtime_config,
        ("IRuntimeConfig", "create_runtime_cache"): create_runtime_cache,
        ("IRuntimeConfig", "set_runtime_cache"): set_runtime_cache,
        ("IRuntimeConfig", "set_execution_context_allocation_strategy"): set_allocation,
        ("IRuntimeCache", "deserialize"): deserialize,
        ("IRuntimeCache", "serialize"): lambda cache: HostMemory(jit.dump(cache.state["kernels"])),
    }
