"""A model in the words of Triton's ModelConfig, which clients read to learn batch size and layout."""

from __future__ import annotations

from typing import Any

from convoy.app.submission.management import ManagedVersion
from convoy.models.spec import ModelSpec, TensorSpec

_TRITON_TYPE_OF = {"BOOL": "TYPE_BOOL", "BYTES": "TYPE_STRING"}


def model_config(served: ManagedVersion) -> dict[str, Any]:
    """The ModelConfig as JSON, with the protobuf's field names."""
    spec = served.spec
    config: dict[str, Any] = {
        "name": served.key.model,
        "platform": served.first.platform,
        "backend": "onnxruntime",
        "runtime": "",
        "version_policy": {"latest": {"num_versions": 1}},
        "max_batch_size": spec.max_batch_size,
        "input": [_input(spec, tensor) for tensor in spec.inputs],
        "output": [_output(spec, tensor, index) for index, tensor in enumerate(spec.outputs)],
        "instance_group": [{"name": served.key.model, "kind": "KIND_CPU", "count": 1, "gpus": [], "profile": []}],
        "default_model_filename": "model.onnx",
        "parameters": {},
        "model_warmup": [],
        "optimization": {},
        "model_transaction_policy": {"decoupled": False},
        "response_cache": {"enable": False},
    }
    if spec.max_batch_size > 1:
        config["dynamic_batching"] = {
            "preferred_batch_size": [spec.max_batch_size],
            "max_queue_delay_microseconds": 0,
            "preserve_ordering": False,
        }
    return config


def _input(spec: ModelSpec, tensor: TensorSpec) -> dict[str, Any]:
    return {**_tensor(tensor), "format": _format(spec, tensor), "optional": False, "is_shape_tensor": False}


def _output(spec: ModelSpec, tensor: TensorSpec, index: int) -> dict[str, Any]:
    label_filename = "labels.txt" if index == 0 and spec.labels else ""
    return {**_tensor(tensor), "label_filename": label_filename, "is_shape_tensor": False}


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
