"""A bare model: `model.onnx` in a version folder, without a manifest, as in a Triton repository.

What a bundle's manifest says is found out here: the tensors from the graph, the batch size and labels
from `config.pbtxt` where there is one, and whether the first dimension really is a batch from running it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from convoy.app.engines.batching import PROOF_ROWS, objection_to_batching
from convoy.app.engines.free_sizes import with_examples
from convoy.app.engines.memory import check_batch
from convoy.app.engines.onnxruntime import open_session, read_signature
from convoy.app.engines.signature import Signature
from convoy.models.errors import BundleError
from convoy.models.files import read_small, stays_inside
from convoy.models.onnx_digest import check_onnx_files
from convoy.models.priorities import Priorities
from convoy.models.spec import ModelSpec, TensorSpec
from convoy.models.store import BARE_MODEL, CONFIG, StoredVersion

DEFAULT_MAX_BATCH = 32


@dataclass(frozen=True, slots=True)
class BareModel:
    """What was found out about a bare model, and why it is batched or not."""

    path: Path
    spec: ModelSpec
    batch_reason: str


@dataclass(frozen=True, slots=True)
class _Config:
    """What we use of a config.pbtxt."""

    max_batch_size: int
    dims: dict[str, tuple[int, ...]]
    labels: tuple[str, ...]
    priorities: Priorities = field(default_factory=Priorities)


def read_bare_model(stored: StoredVersion, threads: int, configured_batch: int | None = None) -> BareModel:
    """Find out what a bare model is; `configured_batch` is a max_batch_size that goes before any other.

    Raises BundleError.
    """
    path = stored.folder / BARE_MODEL
    check_onnx_files(path)
    signature = read_signature(open_session(path, threads), path)
    config_path = stored.model_folder / CONFIG
    config = _read_config(config_path) if os.path.lexists(config_path) else None
    if configured_batch is not None:
        asked = replace(config or _Config(0, {}, ()), max_batch_size=configured_batch)
        spec = _with_examples(path, _spec_from_config(stored, signature, asked), threads)
        return BareModel(path, spec, f"max_batch_size is {configured_batch} by the request that loaded it")
    if config is not None:
        spec = _with_examples(path, _spec_from_config(stored, signature, config), threads)
        return BareModel(path, spec, f"max_batch_size is {config.max_batch_size} in {CONFIG}")
    signature = with_examples(path, signature, threads)
    whole = ModelSpec(stored.name, signature.inputs, signature.outputs, 0, None, "none", ())
    dynamic = all(spec.shape[:1] == (-1,) for spec in (*signature.inputs, *signature.outputs))
    if not dynamic:
        return BareModel(path, whole, "not batched: not every input and output has a dynamic first dimension")
    check_batch(whole.inputs, whole.outputs, PROOF_ROWS)
    objection = objection_to_batching(path, signature, threads)
    if objection:
        return BareModel(path, whole, f"not batched: {objection}")
    batched = replace(
        whole,
        inputs=_without_batch(signature.inputs),
        outputs=_without_batch(signature.outputs),
        max_batch_size=DEFAULT_MAX_BATCH,
    )
    return BareModel(path, batched, f"batched up to {DEFAULT_MAX_BATCH}: each row of a batch equals the row run alone")


def _without_batch(specs: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
    return tuple(spec.without_batch() for spec in specs)


def _with_examples(path: Path, spec: ModelSpec, threads: int) -> ModelSpec:
    """The same, with sizes at which to run what the configuration leaves free."""
    batch = (-1,) if spec.max_batch_size else ()
    sides = (tuple(replace(one, shape=(*batch, *one.shape)) for one in side) for side in (spec.inputs, spec.outputs))
    found = with_examples(path, Signature(*sides), threads)
    if not batch:
        return replace(spec, inputs=found.inputs, outputs=found.outputs)
    return replace(spec, inputs=_without_batch(found.inputs), outputs=_without_batch(found.outputs))


def _spec_from_config(stored: StoredVersion, signature: Signature, config: _Config) -> ModelSpec:
    inputs, outputs = (
        tuple(_configured(stored, spec, config) for spec in side) for side in (signature.inputs, signature.outputs)
    )
    return ModelSpec(
        stored.name, inputs, outputs, config.max_batch_size, None, "none", config.labels, config.priorities
    )


def _configured(stored: StoredVersion, spec: TensorSpec, config: _Config) -> TensorSpec:
    """The graph's tensor with the sizes that the configuration fixes."""
    batched = config.max_batch_size > 0
    where = f"{stored.model_folder / CONFIG}: tensor {spec.name!r}"
    if batched and spec.shape[:1] != (-1,):
        raise BundleError(f"{where} has no dynamic first dimension in the graph; set max_batch_size to 0")
    own = spec.shape[1:] if batched else spec.shape
    dims = config.dims.get(spec.name, own)
    compatible = len(dims) == len(own) and all(a == b or -1 in (a, b) for a, b in zip(dims, own, strict=True))
    if not compatible:
        raise BundleError(f"{where} has dims {list(dims)}, the graph has {list(own)}; make them agree")
    return replace(spec, shape=tuple(b if a < 0 else a for a, b in zip(dims, own, strict=True)))


def _read_config(path: Path) -> _Config:
    # Imported here: it drags in grpc, which nobody without a config.pbtxt should wait for.
    from google.protobuf import text_format
    from tritonclient.grpc import model_config_pb2

    try:
        message: Any = text_format.Parse(read_small(path).decode(), model_config_pb2.ModelConfig())
    except (OSError, ValueError, text_format.ParseError) as error:
        raise BundleError(f"{path}: cannot be read ({error}); correct it or remove it") from error
    tensors = [*message.input, *message.output]
    if any(tensor.HasField("reshape") for tensor in tensors):
        raise BundleError(f"{path}: reshape is not supported; export the model with the shape that clients send")
    labels = [_read_labels(path.parent, output.label_filename) for output in message.output if output.label_filename]
    return _Config(
        max_batch_size=message.max_batch_size,
        dims={tensor.name: tuple(tensor.dims) for tensor in tensors},
        labels=labels[0] if labels else (),
        priorities=_priorities(path, message.dynamic_batching),
    )


def _priorities(path: Path, batching: Any) -> Priorities:
    levels, default = batching.priority_levels, batching.default_priority_level
    if not levels and not default:
        return Priorities()
    try:
        return Priorities(levels, default)
    except BundleError as error:
        raise BundleError(
            f"{path}: {error}; correct priority_levels or default_priority_level in dynamic_batching"
        ) from error


def _read_labels(folder: Path, name: str) -> tuple[str, ...]:
    if not stays_inside(name):
        raise BundleError(f"{folder / CONFIG}: label_filename {name!r} leads out of {folder}; put the labels there")
    path = folder / name
    try:
        return tuple(read_small(path).decode().splitlines())
    except (OSError, ValueError) as error:
        raise BundleError(f"{path}: the labels that {CONFIG} names cannot be read ({error})") from error
