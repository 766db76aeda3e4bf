"""From measured variants to a published bundle: what may serve and why, the canary, the manifest, the folder.

Bundles are signed here, and `convoy export --remeasure` makes a new version of an existing one.
"""

from __future__ import annotations

import platform
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from convoy.app.engines.batch import EngineFailure
from convoy.app.engines.cpu import cpu_budget, has_int8_dot_product
from convoy.app.engines.measure import is_worthwhile
from convoy.export.ahead import judged_by_builder
from convoy.export.config_file import EXPORT_FILE
from convoy.export.data import ExportData, ImageSet
from convoy.export.plan import ExportPlan
from convoy.export.profiling.profile import Timings, measured_everywhere
from convoy.export.profiling.roofline import measure_roofline
from convoy.export.progress import Progress
from convoy.export.proof.proving import AccuracyGate
from convoy.export.proof.sanity import NOTHING_FOUND, Sanity
from convoy.export.proof.verify import Score
from convoy.export.report.page import render
from convoy.export.rows import Rows, bytes_of, count_of, joined, picked
from convoy.export.sources.onnx_sizes import free_sizes
from convoy.export.sources.torch_job import EXTERNAL_DATA, TorchResult
from convoy.export.variants.making import Made
from convoy.export.variants.precision import RECIPES, Recipe
from convoy.export.variants.variant import OpenVariant, opened, opened_elsewhere
from convoy.models.bundle import (
    CANARY,
    LABELS,
    MANIFEST,
    REPORT,
    SCHEMA_VERSION,
    SIGNATURE,
    Bundle,
    Canary,
    Comparison,
    FileRecord,
    LatencyTable,
    Manifest,
    Mistakes,
    Provenance,
    Roofline,
    Target,
    Variant,
    canary_bytes,
    open_bundle,
    seal,
    sha256_file,
)
from convoy.models.checkpoint import convoy_version, installed_versions
from convoy.models.errors import BundleError, JobError, UsageError
from convoy.models.spec import ModelSpec
from convoy.models.store import Store, is_version

_WHY_NOT_MEASURED: dict[Target, str] = {
    "cpu": "out of time",
    "openvino": "needs OpenVINO on a processor with BF16",
    "cuda": "no GPU available",
    "tensorrt": "no GPU available",
}
_TOOLS = ("onnx", "onnxruntime", "onnxruntime-gpu", "numpy", "Pillow")


@dataclass(frozen=True, slots=True)
class Measured:
    """Everything that was found out about one variant."""

    made: Made
    score: Score
    timings: Timings


def verdicts(
    measured: Sequence[Measured],
    errors: Mapping[str, float],
    data: ExportData,
    gate: AccuracyGate,
    torch: TorchResult,
    samples: str = "images",
) -> tuple[Variant, ...]:
    """The variants with the verdict on each; the first is the fp32 reference, whose errors, by output, are against
    torch.
    """
    reference = measured[0]
    kind = data.evaluation.kind if data.evaluation else "images" if isinstance(data.calibration, ImageSet) else "rows"
    # A file of arrays has no held-out part, unless it or another one is evaluated on.
    held_out = "held-out " if data.evaluation or kind == "images" else ""
    inputs = f"{held_out}{kind}" if data.real else "random inputs, because --calibrate and --evaluate were not given"
    error = max(errors.values())
    each = f" ({', '.join(f'{name} {own:.1g}' for name, own in errors.items())})" if len(errors) > 1 else ""
    noise = ", and on noise of both signs" if torch.noise is not None else ""
    proof = f"equals {torch.original} to {error:.1g}{each} on {count_of(data.samples)} {inputs}{noise}"
    variants = [_variant(reference, True, proof, errors)]
    for one in measured[1:]:
        passes, proof = _proved(one, gate, real=data.real, samples=samples)
        accuracy = one.score.accuracy
        is_recovered = gate.passes(accuracy) if accuracy else None
        errors = one.score.output_errors
        variants.append(judged_by_speed(_variant(one, passes, proof, errors, is_recovered=is_recovered)))
    return tuple(variants)


def _proved(one: Measured, gate: AccuracyGate, *, real: bool, samples: str) -> tuple[bool, str]:
    passes, proof = gate.verdict(one.score, real=real, samples=samples)
    if passes:
        return True, proof
    tried = len(one.made.trade_offs)
    kept = f"{one.made.kept_layers} layer{'s' * (one.made.kept_layers != 1)}"
    best = f"the best of {tried} files that were tried, with {kept} in higher precision" if tried > 1 else ""
    return False, "; ".join(filter(None, (proof, best, one.made.drift)))


def judged_by_speed(variant: Variant) -> Variant:
    """A variant that passes the gate serves only if it is faster, or if that was not measured."""
    if not variant.passes_gate:
        return variant
    table = max((one for one in variant.latencies if one.speedup), key=_least_gain, default=None)
    if table is None or table.speedup is None:
        return replace(variant, reason=f"{variant.proof}; speed not measured: {_WHY_NOT_MEASURED[variant.target]}")
    gain = table.speedup
    pace = f"{gain.median:.2f} times the speed of fp32 on the export machine ({gain.low:.2f} to {gain.high:.2f})"
    if not is_worthwhile(table):
        return replace(variant, serve=False, reason=f"speed-up not significant: {pace}; {variant.proof}")
    return replace(variant, reason=f"{pace}; {variant.proof}")


def _least_gain(table: LatencyTable) -> float:
    return table.speedup.low if table.speedup else 0.0


def _variant(
    one: Measured, passes: bool, proof: str, errors: Mapping[str, float], *, is_recovered: bool | None = None
) -> Variant:
    """As if only the gate counted."""
    recipe = one.made.recipe
    # JSON has no infinity; an answer that is not finite has a larger error than any.
    finite = {name: min(error, sys.float_info.max) for name, error in errors.items()}
    return Variant(
        file=recipe.file,
        precision=recipe.precision,
        target=recipe.target,
        serve=passes,
        reason=proof,
        max_relative_error=max(finite.values()),
        accuracy=one.score.accuracy,
        latency=one.timings.latency,
        calibration_method=one.made.method,
        audit=one.made.audit,
        trade_offs=one.made.trade_offs,
        kept_layers=one.made.kept_layers if len(one.made.trade_offs) > 1 else None,
        is_recovered=is_recovered if len(one.made.trade_offs) > 1 else None,
        drift=one.made.drift,
        passes_gate=passes,
        proof=proof,
        search=one.made.search,
        output_errors=finite if len(finite) > 1 else {},
        agreement=None if one.score.accuracy else one.score.agreement,
        other_latencies=one.timings.other_latencies,
        refused_by=dict(one.timings.refused_by),
    )


def remarked(variants: tuple[Variant, ...], remark: str) -> tuple[Variant, ...]:
    """The same variants, with further remarks on the network in the first one's reason."""
    reference, *others = variants
    return (replace(reference, reason=f"{reference.reason}; {remark}" if remark else reference.reason), *others)


def make_canary(fp32: OpenVariant, samples: Rows) -> Canary:
    """Up to 32 samples, at most 4 MiB with their fp32 outputs, as the serving engine answers them one by one."""
    first = fp32.answers(picked(samples, slice(1)))
    sample_bytes = bytes_of(picked(samples, slice(1))) + bytes_of(first)
    # The file's header takes some of it.
    count = max(1, min(32, ((4 << 20) - 4096) // sample_bytes, count_of(samples)))
    answers = [first, *(fp32.answers(picked(samples, slice(row, row + 1))) for row in range(1, count))]
    inputs = {name: np.ascontiguousarray(array) for name, array in picked(samples, slice(count)).items()}
    return Canary(inputs, joined(answers))


def provenance(plan: ExportPlan, data: ExportData, torch: TorchResult) -> Provenance:
    """Names, versions and hashes; no paths of this machine."""
    return Provenance(
        source=plan.source.shown,
        weights_sha256=sha256_file(plan.weights) if plan.weights else None,
        calibration=data.calibration.record if data.calibration else None,
        evaluation=data.evaluation.record if data.evaluation else None,
        tools={
            "convoy": convoy_version(),
            "python": platform.python_version(),
            **({"torch": torch.torch_version} if torch.torch_version else {}),
            **installed_versions(*_TOOLS),
            "int8 weights": "8 bits"
            if has_int8_dot_product()
            else "7 bits, because this CPU has no 8-bit dot products",
        },
        created_at=datetime.now(UTC).isoformat(timespec="microseconds"),
        weights_entry=torch.weights_entry,
        free_sizes=tuple(map(str, free_sizes(plan.image, torch))),
        preprocessing=plan.preprocessing,
    )


def publish(
    store: Store,
    spec: ModelSpec,
    made: Path,
    variants: Sequence[Variant],
    canary: Canary,
    origin: Provenance,
    roofline: Roofline | None,
    *,
    scores: str = "",
    sanity: Sanity = NOTHING_FOUND,
    mistakes: Mistakes | None = None,
    comparisons: tuple[Comparison, ...] = (),
    signer: BundleSigner | None = None,
    options: str,
) -> Path:
    """Write the bundle as the model's next version and return its folder; `made` has the variants' files.

    `scores` says why the outputs have their activation, `sanity` whether the reference is right, `mistakes` what it
    answers wrongly, `comparisons` what a variant loses on some images. `options` is the file that repeats the export.
    Raises JobError if the disk is full or read-only; then nothing remains.
    """
    with store.writing(spec.name) as folder:
        for variant in variants:
            shutil.copyfile(made / variant.file, folder / variant.file)
        if (made / EXTERNAL_DATA).exists():
            shutil.copyfile(made / EXTERNAL_DATA, folder / EXTERNAL_DATA)
        if spec.labels:
            (folder / LABELS).write_text("".join(f"{label}\n" for label in spec.labels), encoding="utf-8")
        (folder / CANARY).write_bytes(canary_bytes(canary))
        (folder / EXPORT_FILE).write_text(options, encoding="utf-8")
        files = {path.name: _record(path) for path in sorted(folder.iterdir())}
        content = Manifest(
            *(SCHEMA_VERSION, spec, tuple(variants), files, origin, roofline),
            scores=scores,
            findings=sanity.findings,
            objections=sanity.objections,
            mistakes=mistakes,
            comparisons=comparisons,
        )
        manifest = _sealed(content, folder, signer)
    return _published(store, spec.name, manifest)


def publish_again(store: Store, bundle: Bundle, content: Manifest, signer: BundleSigner | None = None) -> Path:
    """Publish the same files with another manifest and report as the next version; returns its folder.

    Raises JobError if the disk is full or read-only; then nothing remains.
    """
    files = {name: record for name, record in content.files.items() if name != REPORT}
    with store.writing(content.spec.name) as folder:
        for name in files:
            shutil.copyfile(bundle.path(name), folder / name)
        manifest = _sealed(replace(content, files=files), folder, signer)
    return _published(store, content.spec.name, manifest)


def _sealed(content: Manifest, folder: Path, signer: BundleSigner | None) -> bytes:
    """Write the report, the manifest, whose bytes are returned, and the signature; `content` has all other files."""
    # The report lists all other files; its own hash can only be in the manifest.
    (folder / REPORT).write_text(render(content), encoding="utf-8")
    manifest = seal(replace(content, files={**content.files, REPORT: _record(folder / REPORT)}))
    (folder / MANIFEST).write_bytes(manifest)
    if signer is not None:
        signer.sign(folder)
    return manifest


def _record(path: Path) -> FileRecord:
    return FileRecord(sha256_file(path), path.stat().st_size)


def _published(store: Store, name: str, manifest: bytes) -> Path:
    # Two exports may end at once, so the highest version need not be ours.
    for stored in store.versions(name):
        if stored.is_bundle and (stored.folder / MANIFEST).read_bytes() == manifest:
            return stored.folder
    raise AssertionError("the published version is not there; this is a bug")


# Signatures are OpenSSF's (https://github.com/sigstore/model-transparency): `model_signing verify key` reads what is
# written here, and a server with `--require-signature` loads what `model_signing sign key` has signed.


class BundleSigner:
    """Holds a private key, which is read at once, so that a long export does not end with a wrong one. Raises
    UsageError.
    """

    def __init__(self, key_file: Path) -> None:
        try:
            library: Any = import_module("model_signing.signing")
            self._hashing: Any = import_module("model_signing.hashing")
        except ImportError as error:
            raise UsageError(f"--sign needs {error.name}; pip install 'convoy-serve[signing]'") from error
        try:
            self._config = library.Config().use_elliptic_key_signer(private_key=key_file)
        except Exception as error:  # whatever the libraries raise for an invalid file
            raise UsageError(
                f"--sign {key_file} is not an unencrypted PEM private key of an elliptic curve ({error}); make "
                "one with `openssl ecparam -name prime256v1 -genkey -noout`"
            ) from error

    def sign(self, folder: Path) -> None:
        """Write the signature of all other files in the folder."""
        left_out = self._hashing.Config().set_ignored_paths(paths=[Path(SIGNATURE)])
        self._config.set_hashing_config(left_out).sign(folder, folder / SIGNATURE)


def signer_of(key_file: Path | None) -> BundleSigner | None:
    """None if nothing is to be signed. Raises UsageError."""
    return None if key_file is None else BundleSigner(key_file)


# `convoy export --remeasure`: accuracy, files and the builder's verdicts stay as they are. A version of a model never
# changes, because a server may be serving it; the result is the next version.


def remeasure(folder: Path, store: Path, progress: Progress, signer: BundleSigner | None = None) -> Path:
    """Measure the bundle in `folder` again. Returns the new version's folder.

    It is written to the store that contains the bundle, or to `store` if there is none. Raises UsageError if there is
    no folder, and JobError for a bundle that cannot be measured, is of an older version, or was changed.
    """
    if not folder.is_dir():
        raise UsageError(f"there is no folder {folder}; pass a version's, such as store/NAME/1")
    try:
        bundle = open_bundle(folder)
    except BundleError as error:
        raise JobError(str(error)) from error
    old = bundle.manifest
    if any(variant.passes_gate is None for variant in old.variants[1:]):
        raise JobError(
            f"{folder}: an older version of Convoy exported it and did not record which variants pass the "
            "accuracy gate; export the model again"
        )
    timings, roofline = _measured(bundle, progress)
    measured = [(variant, timings.get(variant.file, Timings())) for variant in old.variants]
    reference, *others = (
        replace(variant, latency=own.latency, other_latencies=own.other_latencies) for variant, own in measured
    )
    content = replace(
        old,
        variants=(reference, *map(_judged, others)),
        roofline=roofline,
        provenance=replace(old.provenance, remeasured_at=datetime.now(UTC).isoformat(timespec="microseconds")),
    )
    with progress.step("Publishing"):
        return publish_again(_store_of(folder, old.spec.name, store), bundle, content, signer)


def _measured(bundle: Bundle, progress: Progress) -> tuple[dict[str, Timings], Roofline | None]:
    """The timings by file, for those that this machine runs; and the machine's rates, if the bundle has a roofline."""
    spec, folder = bundle.manifest.spec, bundle.folder
    recipes = [recipe for recipe in map(_recipe, bundle.manifest.variants) if recipe.row is not None]
    try:
        with opened(spec, recipes, folder) as candidates, opened_elsewhere(spec, recipes, folder) as others:
            measured = measured_everywhere(candidates, others, progress)
            roofline = None
            if bundle.manifest.roofline is not None:
                with progress.step("Measuring this device"):
                    roofline = measure_roofline(candidates[0], cpu_budget())
    except EngineFailure as failure:
        raise JobError(f"the serving engine cannot run the network: {failure}") from failure
    except BundleError as error:
        raise JobError(str(error)) from error
    return {recipe.file: timings for recipe, timings in zip(recipes, measured, strict=True)}, roofline


def _recipe(variant: Variant) -> Recipe:
    known = {recipe.file: recipe for recipe in RECIPES}
    if variant.file not in known:
        raise JobError(f"{variant.file} was not made by `convoy export`, so its latency cannot be measured")
    return known[variant.file]


def _judged(variant: Variant) -> Variant:
    """As at export, with the new latency."""
    assert variant.passes_gate is not None, "older bundles were refused; this is a bug"
    judged = judged_by_speed(replace(variant, serve=variant.passes_gate, reason=variant.proof))
    return judged if variant.builder is None else judged_by_builder(judged, variant.builder)


def _store_of(folder: Path, name: str, otherwise: Path) -> Store:
    whole = folder.resolve()
    lies_in_store = is_version(whole.name) and whole.parent.name == name
    return Store(whole.parent.parent) if lies_in_store else Store(otherwise)
