"""A bare model: an ONNX file in a version folder, without a manifest, as in a Triton repository.

Finds out what a bundle's manifest says: the tensors from the graph, the batch size, labels and more from `config.pbtxt`
if there is one, and from a run whether the first dimension really is a batch.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, replace
from pathlib import Path

from convoy.app.engines.base import Signature
from convoy.app.engines.dimensions import PROOF_ROWS, RowCheck, check_rows, with_examples
from convoy.app.engines.memory import check_batch
from convoy.app.engines.onnxruntime import open_session, read_signature
from convoy.app.loading.triton_config import ROWS_ARE_INDEPENDENT, Configuration, read_configuration
from convoy.models.errors import BundleError
from convoy.models.onnx_digest import check_onnx_files
from convoy.models.spec import ModelSpec, TensorSpec
from convoy.models.store import CONFIG, StoredVersion

_log = logging.getLogger("convoy")
DEFAULT_MAX_BATCH = 32


@dataclass(frozen=True, slots=True)
class BareModel:
    """What was found out about a bare model, and why it is batched or not."""

    path: Path
    spec: ModelSpec
    batch_reason: str


def read_bare_model(
    stored: StoredVersion, threads: int, configured_batch: int | None = None, max_batch: int | None = None
) -> BareModel:
    """Find out what a bare model is; `configured_batch` is a max_batch_size that takes precedence.

    No batch above `max_batch` is served, whatever the model takes. Raises BundleError.
    """
    config = read_configuration(stored)
    path = stored.folder / config.model_file
    signature = _signature(path, config, threads)
    reason = f"max_batch_size is {config.max_batch_size} in {CONFIG}"
    if configured_batch is not None:
        config = replace(config, max_batch_size=configured_batch)
        reason = f"max_batch_size is {configured_batch} in the load request"
    config.refuse((*config.mistakes, *config.objections_to(signature)))
    signature = Signature(_fixed(signature.inputs, config), _fixed(signature.outputs, config))
    signature = with_examples(path, signature, threads)
    size = config.max_batch_size
    if size is None:
        size, reason = _batch_size_of(path, signature, threads, max_batch)
    elif config.rows_are_independent:
        reason += f", and {ROWS_ARE_INDEPENDENT} in {CONFIG} overrides the check of its rows"
    elif (largest := min(size, max_batch or size)) > 1:
        _ensure_independent(path, reason, _rows(path, signature, threads, largest))
    inputs, outputs = (_without_batch(side) if size else side for side in (signature.inputs, signature.outputs))
    labels, *further = [config.labels(spec.name) for spec in outputs] or [()]
    spec = ModelSpec(
        stored.name, inputs, outputs, size, None, "none", labels, config.priorities, further_labels=tuple(further)
    )
    return BareModel(path, spec, reason)


def _signature(path: Path, config: Configuration, threads: int) -> Signature:
    """The file's inputs and outputs. Raises BundleError, with the configuration's own mistakes if it has any."""
    if not config.serves_onnx:
        config.refuse(config.mistakes)
    try:
        if not os.path.lexists(path):
            raise BundleError(_no_file(path))
        check_onnx_files(path)
        return read_signature(open_session(path, threads), path)
    except BundleError as error:
        if config.mistakes:
            config.refuse((*config.mistakes, str(error)))
        raise


def _no_file(path: Path) -> str:
    others = sorted(one.name for one in path.parent.iterdir()) if path.parent.is_dir() else []
    there = f"; found {', '.join(others[:3])}" if others else ""
    return f"{path}: no such file{there}; put the ONNX file there, or name it in {CONFIG} with default_model_filename"


def _batch_size_of(path: Path, signature: Signature, threads: int, max_batch: int | None) -> tuple[int, str]:
    """The batch size of a model without a configuration, 0 if it has no batch, and why."""
    if any(spec.shape[:1] != (-1,) for spec in (*signature.inputs, *signature.outputs)):
        return 0, "not batched: not every input and output has a dynamic first dimension"
    largest = max(PROOF_ROWS, min(DEFAULT_MAX_BATCH, max_batch or DEFAULT_MAX_BATCH))
    objection = _rows(path, signature, threads, largest).objection
    if objection:
        return 0, f"not batched: {objection}"
    return DEFAULT_MAX_BATCH, f"batched up to {DEFAULT_MAX_BATCH}: each row of a batch equals the row run alone"


def _ensure_independent(path: Path, where: str, rows: RowCheck) -> None:
    """Raise BundleError if a batch's rows depend on each other; an inconclusive check is only logged."""
    if rows.is_open:
        _log.warning(
            "%s: %s, but it is unknown whether rows of a batch affect each other: %s", path, where, rows.objection
        )
    elif rows.objection:
        raise BundleError(
            f"{path}: {where}, but {rows.objection}; set max_batch_size: 0, and dims with the first dimension, so that "
            f"each request runs alone. If the rows are independent, declare it in {CONFIG}: "
            f'parameters {{ key: "{ROWS_ARE_INDEPENDENT}" value {{ string_value: "true" }} }}'
        )


def _rows(path: Path, signature: Signature, threads: int, largest: int) -> RowCheck:
    """Raises BundleError for a batch that does not fit into memory."""
    check_batch(_without_batch(signature.inputs), _without_batch(signature.outputs), largest)
    return check_rows(path, signature, threads, largest=largest)


def _without_batch(specs: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
    return tuple(spec.without_batch() for spec in specs)


def _fixed(specs: tuple[TensorSpec, ...], config: Configuration) -> tuple[TensorSpec, ...]:
    """The graph's tensors with the sizes that the configuration fixes, except the batch."""
    batch = 1 if config.max_batch_size else 0
    return tuple(replace(spec, shape=(*spec.shape[:batch], *config.dims(spec, spec.shape[batch:]))) for spec in specs)
