"""What the server says about itself and its models: plain documents, which each wire writes in its own way.

The field names are the protocol's, and the same in its JSON and its protobuf messages.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from convoy.app.core import Core
from convoy.app.edge.oip.lookup import find_served
from convoy.app.lifecycle.listing import WHOLE_MODEL, Listing
from convoy.app.submission.shared_memory import Region
from convoy.app.telemetry.observed import Observed
from convoy.app.telemetry.statistics import Duration
from convoy.app.version import VERSION
from convoy.models.errors import NotFound
from convoy.models.spec import TensorSpec

EXTENSIONS = (
    "classification",
    "model_configuration",
    "binary_tensor_data",
    "parameters",
    "statistics",
    "schedule_policy",
    "model_repository",
    "model_repository(unload_dependents)",
)
CUDA_IS_NOT_OFFERED = (
    "CUDA shared memory is not supported by this server: it would let clients hand pointers to the device; "
    "use system shared memory or send the tensor in the request"
)
Document = dict[str, Any]


def server_metadata(core: Core, name: str) -> Document:
    """The extensions are those that this very server offers; clients decide by them what to send."""
    own = ["system_shared_memory"] if core.shared_memory.is_allowed else []
    return {"name": name, "version": VERSION, "extensions": [*EXTENSIONS, *own]}


def model_metadata(core: Core, model: str, version: str | None) -> Document:
    """Raises NotFound or Unavailable."""
    served = find_served(core.catalog, model, version)
    batch = [-1] if served.spec.max_batch_size else []
    return {
        "name": model,
        "versions": [str(other.key.version) for other in core.catalog.versions(model)],
        "platform": served.first.platform,
        "inputs": [_tensor(spec, batch) for spec in served.spec.inputs],
        "outputs": [_tensor(spec, batch) for spec in served.spec.outputs],
    }


async def repository_index(core: Core, *, only_ready: bool) -> list[Document]:
    """Every version that is known, and by name alone what could be loaded and never was."""
    index = core.catalog.index()
    listed = [_line(one) for one in index if one.state.value == "READY" or not only_ready]
    if only_ready:
        return listed
    never_loaded = set(await core.control.names_in_store()) - {one.name for one in index}
    return listed + [{"name": name} for name in sorted(never_loaded)]


def _line(one: Listing) -> Document:
    version = {} if one.version == WHOLE_MODEL else {"version": str(one.version)}
    return {"name": one.name, **version, "state": one.state.value, "reason": one.reason}


def model_statistics(core: Core, model: str | None, version: str | None) -> Document:
    """The statistics extension: of a version, of all versions of a model, or of everything.

    Raises NotFound or Unavailable.
    """
    if model is None:
        chosen = core.catalog.served()
    elif version is not None:
        chosen = [find_served(core.catalog, model, version)]
    else:
        find_served(core.catalog, model, None)
        chosen = core.catalog.versions(model)
    return {"model_stats": [_statistics(served) for served in chosen]}


def regions(registered: list[Region]) -> list[Document]:
    """System shared memory, as far as clients have registered it."""
    return [{"name": one.name, "key": one.key, "offset": one.offset, "byte_size": one.byte_size} for one in registered]


def no_cuda_region(name: str) -> NotFound:
    """There is none of any name."""
    return NotFound(f"Unable to find cuda shared memory region: '{name[:100]}'")


def _tensor(spec: TensorSpec, batch: list[int]) -> Document:
    return {"name": spec.name, "datatype": spec.dtype, "shape": [*batch, *spec.shape]}


def _statistics(served: Observed) -> Document:
    """Readers of the statistics want every key."""
    own = served.statistics
    durations = {
        "success": own.success,
        "fail": own.fail,
        "queue": own.queue,
        "compute_input": own.compute.compute_input,
        "compute_infer": own.compute.compute_infer,
        "compute_output": own.compute.compute_output,
        "cache_hit": Duration(),
        "cache_miss": Duration(),
    }
    return {
        "name": served.key.model,
        "version": str(served.key.version),
        "last_inference": own.last_inference_ms,
        "inference_count": own.inference_count,
        "execution_count": own.execution_count,
        "inference_stats": {name: dataclasses.asdict(duration) for name, duration in durations.items()},
        "response_stats": {},
        "batch_stats": [
            {"batch_size": size, **dataclasses.asdict(one)} for size, one in sorted(own.by_batch_size.items())
        ],
        "memory_usage": [],
    }
