"""Metadata of the server and its models, as plain documents that HTTP and gRPC encode.

The field names are the protocol's; JSON and protobuf share them.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from convoy.app.calls.call import find_served
from convoy.app.calls.shared_memory import Region
from convoy.app.core import Core
from convoy.app.lifecycle.catalog import WHOLE_MODEL, Served
from convoy.app.telemetry.statistics import Duration, Observed
from convoy.app.version import VERSION
from convoy.models.errors import NotFound
from convoy.models.spec import ModelSpec, TensorSpec
from convoy.models.version_policy import Latest, Policy

_TRITON_TYPE_OF = {"BOOL": "TYPE_BOOL", "BYTES": "TYPE_STRING"}


def model_config(served: Served, policy: Policy) -> dict[str, Any]:
    """The ModelConfig as JSON, with the protobuf's field names. `policy` says which versions are served."""
    spec = served.spec
    count = len(served.loaded.engines)
    return {
        "name": served.key.model,
        "platform": served.first.platform,
        "backend": "onnxruntime",
        "runtime": "",
        "version_policy": _version_policy(policy),
        "max_batch_size": spec.max_batch_size,
        "input": [
            {**_config_tensor(one), "format": _format(spec, one), "optional": False, "is_shape_tensor": False}
            for one in spec.inputs
        ],
        "output": [
            {
                **_config_tensor(one),
                "label_filename": "labels.txt" if spec.labels_of(index) else "",
                "is_shape_tensor": False,
            }
            for index, one in enumerate(spec.outputs)
        ],
        "instance_group": [{"name": served.key.model, "kind": "KIND_CPU", "count": count, "gpus": [], "profile": []}],
        "default_model_filename": "model.onnx",
        "parameters": {},
        "model_warmup": [],
        "optimization": {},
        "model_transaction_policy": {"decoupled": False},
        "response_cache": {"enable": False},
        "dynamic_batching": {
            "preferred_batch_size": [spec.max_batch_size] if spec.max_batch_size > 1 else [],
            "max_queue_delay_microseconds": 0,
            "preserve_ordering": False,
            "priority_levels": spec.priorities.levels,
            "default_priority_level": spec.priorities.default,
        },
    }


def _version_policy(policy: Policy) -> dict[str, Any]:
    if isinstance(policy, Latest):
        return {"latest": {"num_versions": policy.count}}
    return {"all": {}} if policy == "all" else {"specific": {"versions": list(policy)}}


def _config_tensor(tensor: TensorSpec) -> dict[str, Any]:
    data_type = _TRITON_TYPE_OF.get(tensor.dtype, f"TYPE_{tensor.dtype}")
    return {"name": tensor.name, "data_type": data_type, "dims": list(tensor.shape)}


def _format(spec: ModelSpec, tensor: TensorSpec) -> str:
    """The format by the image preprocessing, or by the position of one or three channels."""
    if spec.image is not None:
        return "FORMAT_NHWC" if spec.image.front == "uint8_nhwc" else "FORMAT_NCHW"
    # The first dimension of an unbatched model may be a batch of one.
    sizes = tensor.shape[-3:] if len(tensor.shape) in (3, 4) else ()
    if len(sizes) == 3 and sizes[0] in (1, 3):
        return "FORMAT_NCHW"
    if len(sizes) == 3 and sizes[2] in (1, 3):
        return "FORMAT_NHWC"
    return "FORMAT_NONE"


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
    """Server metadata with the extensions that this server offers; clients choose by them what to send."""
    own = ["system_shared_memory"] if core.shared_memory.is_allowed else []
    return {"name": name, "version": VERSION, "extensions": [*EXTENSIONS, *own]}


def model_metadata(core: Core, model: str, version: str | None) -> Document:
    """The metadata of a model. Raises NotFound or Unavailable."""
    served = find_served(core.catalog, model, version)
    batch = [-1] if served.spec.max_batch_size else []
    return {
        "name": model,
        "versions": [str(other.key.version) for other in core.catalog.versions(model)],
        "platform": served.first.platform,
        "inputs": [_tensor_metadata(spec, batch) for spec in served.spec.inputs],
        "outputs": [_tensor_metadata(spec, batch) for spec in served.spec.outputs],
    }


async def repository_index(core: Core, *, only_ready: bool) -> list[Document]:
    """Every known version, and the names of models that were never loaded."""
    index = core.catalog.index()
    listed = [
        {
            "name": one.name,
            **({} if one.version == WHOLE_MODEL else {"version": str(one.version)}),
            "state": one.state.value,
            "reason": one.reason,
        }
        for one in index
        if one.state.value == "READY" or not only_ready
    ]
    if only_ready:
        return listed
    never_loaded = set(await core.control.names_in_store()) - {one.name for one in index}
    return listed + [{"name": name} for name in sorted(never_loaded)]


def model_statistics(core: Core, model: str | None, version: str | None) -> Document:
    """The statistics of a version, of all versions of a model, or of all models.

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
    """The registered regions of system shared memory."""
    return [{"name": one.name, "key": one.key, "offset": one.offset, "byte_size": one.byte_size} for one in registered]


def no_cuda_region(name: str) -> NotFound:
    """The error for a CUDA region, none of which exist."""
    return NotFound(f"Unable to find cuda shared memory region: '{name[:100]}'; use system shared memory")


def _tensor_metadata(spec: TensorSpec, batch: list[int]) -> Document:
    return {"name": spec.name, "datatype": spec.dtype, "shape": [*batch, *spec.shape]}


def _statistics(served: Observed) -> Document:
    """Statistics with every key, which clients expect."""
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
