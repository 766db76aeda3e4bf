"""A bare model: an ONNX file in a version folder, without a manifest, as in a Triton repository.

What a bundle's manifest says is found out here: the tensors from the graph, the batch size, labels and more from
`config.pbtxt` where there is one, and whether the first dimension really is a batch from running it.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, replace
from pathlib import Path

from convoy.app.engines.batching import PROOF_ROWS, RowCheck, check_rows
from convoy.app.engines.free_sizes import with_examples
from convoy.app.engines.memory import check_batch
from convoy.app.engines.onnxruntime import open_session, read_signature
from convoy.app.engines.signature import Signature
from convoy.app.loading.triton_config import ROWS_ARE_INDEPENDENT, Configuration, read_configuration
from convoy.models.errors import BundleError
from convoy.models.onnx_digest import check_onnx_files
from convoy.models.spec import ModelSpec, TensorSpec
from convoy.models.store import BARE_MODEL, CONFIG, StoredVersion

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
    """Find out what a bare model is; `configured_batch` is a max_batch_size that goes before any other.

    No batch of more than `max_batch` is served, whatever the model takes. Raises BundleError.
    """
    config = read_configuration(stored)
    path = stored.folder / (BARE_MODEL if config is None else config.model_file)
    signature = _signature(path, config, threads)
    if config is None and configured_batch is None:
        return _found_out(stored, path, signature, threads, max_batch)
    asked = config or Configuration(stored.model_folder / CONFIG)
    where = f"max_batch_size is {asked.max_batch_size} in {CONFIG}"
    if configured_batch is not None:
        asked = replace(asked, max_batch_size=configured_batch)
        where = f"max_batch_size is {configured_batch} by the request that loaded it"
    asked.refuse((*asked.mistakes, *asked.objections_to(signature)))
    return _as_configured(stored, path, signature, asked, where, threads, max_batch)


def _signature(path: Path, config: Configuration | None, threads: int) -> Signature:
    """What the file takes and gives. Raises BundleError, with the configuration's own mistakes where it has any."""
    if config is not None and not config.serves_onnx:
        config.refuse(config.mistakes)
    try:
        if not os.path.lexists(path):
            raise BundleError(_no_file(path))
        check_onnx_files(path)
        return read_signature(open_session(path, threads), path)
    except BundleError as error:
        if config is not None and config.mistakes:
            config.refuse((*config.mistakes, str(error)))
        raise


def _no_file(path: Path) -> str:
    others = sorted(one.name for one in path.parent.iterdir()) if path.parent.is_dir() else []
    there = f"; there is {', '.join(others[:3])}" if others else ""
    return f"{path}: no such file{there}; put the ONNX file there, or name it in {CONFIG} with default_model_filename"


def _found_out(
    stored: StoredVersion, path: Path, signature: Signature, threads: int, max_batch: int | None
) -> BareModel:
    """A model of which nothing is said but what the graph says."""
    signature = with_examples(path, signature, threads)
    whole = ModelSpec(stored.name, signature.inputs, signature.outputs, 0, None, "none", ())
    dynamic = all(spec.shape[:1] == (-1,) for spec in (*signature.inputs, *signature.outputs))
    if not dynamic:
        return BareModel(path, whole, "not batched: not every input and output has a dynamic first dimension")
    largest = max(PROOF_ROWS, min(DEFAULT_MAX_BATCH, max_batch or DEFAULT_MAX_BATCH))
    objection = _rows(path, signature, threads, largest).objection
    if objection:
        return BareModel(path, whole, f"not batched: {objection}")
    batched = replace(
        whole,
        inputs=_without_batch(signature.inputs),
        outputs=_without_batch(signature.outputs),
        max_batch_size=DEFAULT_MAX_BATCH,
    )
    return BareModel(path, batched, f"batched up to {DEFAULT_MAX_BATCH}: each row of a batch equals the row run alone")


def _as_configured(
    stored: StoredVersion,
    path: Path,
    signature: Signature,
    config: Configuration,
    where: str,
    threads: int,
    max_batch: int | None,
) -> BareModel:
    """Raises BundleError where a batch's rows depend on each other, but by the configuration's own word."""
    fixed = Signature(_fixed(signature.inputs, config), _fixed(signature.outputs, config))
    found = with_examples(path, fixed, threads)
    size = config.max_batch_size
    inputs, outputs = (_without_batch(side) if size else side for side in (found.inputs, found.outputs))
    labels, *further = (config.labels(spec.name) for spec in outputs)
    spec = ModelSpec(
        stored.name, inputs, outputs, size, None, "none", labels, config.priorities, further_labels=tuple(further)
    )
    largest = min(size, max_batch or size)
    if config.rows_are_independent:
        where += f", and {ROWS_ARE_INDEPENDENT} in {CONFIG} goes before the check of its rows"
    elif largest > 1:
        _ensure_independent(path, where, _rows(path, found, threads, largest))
    return BareModel(path, spec, where)


def _ensure_independent(path: Path, where: str, rows: RowCheck) -> None:
    """Raises BundleError where a batch's rows depend on each other; what cannot be told is only logged."""
    if rows.is_open:
        _log.warning("%s: %s, and whether a batch's rows depend on each other is open: %s", path, where, rows.objection)
    elif rows.objection:
        raise BundleError(
            f"{path}: {where}, but {rows.objection}; set max_batch_size: 0, and dims with the first dimension, so that "
            f"each request runs alone. If that is how it is meant, say so in {CONFIG}: "
            f'parameters {{ key: "{ROWS_ARE_INDEPENDENT}" value {{ string_value: "true" }} }}'
        )


def _rows(path: Path, signature: Signature, threads: int, largest: int) -> RowCheck:
    """Raises BundleError for a batch that does not fit into memory."""
    check_batch(_without_batch(signature.inputs), _without_batch(signature.outputs), largest)
    return check_rows(path, signature, threads, largest=largest)


def _without_batch(specs: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
    return tuple(spec.without_batch() for spec in specs)


def _fixed(specs: tuple[TensorSpec, ...], config: Configuration) -> tuple[TensorSpec, ...]:
    """The graph's tensors with the sizes that the configuration fixes, the batch's not among them."""
    batch = 1 if config.max_batch_size else 0
    return tuple(replace(spec, shape=(*spec.shape[:batch], *config.dims(spec, spec.shape[batch:]))) for spec in specs)
