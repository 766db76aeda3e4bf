"""A model in the words of Triton's ModelConfig, which clients read to learn batch size and layout."""

from __future__ import annotations

from typing import Any

from convoy.app.lifecycle.catalog import Served
from convoy.models.spec import ModelSpec, TensorSpec
from convoy.models.version_policy import Latest, Policy

_TRITON_TYPE_OF = {"BOOL": "TYPE_BOOL", "BYTES": "TYPE_STRING"}


def model_config(served: Served, policy: Policy) -> dict[str, Any]:
    """The ModelConfig as JSON, with the protobuf's field names. `policy`: which of the model's versions are served."""
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
            {**_tensor(one), "format": _format(spec, one), "optional": False, "is_shape_tensor": False}
            for one in spec.inputs
        ],
        "output": [
            {**_tensor(one), "label_filename": "labels.txt" if spec.labels_of(index) else "", "is_shape_tensor": False}
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


def _tensor(tensor: TensorSpec) -> dict[str, Any]:
    data_type = _TRITON_TYPE_OF.get(tensor.dtype, f"TYPE_{tensor.dtype}")
    return {"name": tensor.name, "data_type": data_type, "dims": list(tensor.shape)}


def _format(spec: ModelSpec, tensor: TensorSpec) -> str:
    """Told by the image preprocessing where there is one, else by where one or three channels stand."""
    if spec.image is not None:
        return "FORMAT_NHWC" if spec.image.front == "uint8_nhwc" else "FORMAT_NCHW"
    # An unbatched model's own first dimension may be a batch of one.
    sizes = tensor.shape[-3:] if len(tensor.shape) in (3, 4) else ()
    if len(sizes) == 3 and sizes[0] in (1, 3):
        return "FORMAT_NCHW"
    if len(sizes) == 3 and sizes[2] in (1, 3):
        return "FORMAT_NHWC"
    return "FORMAT_NONE"
