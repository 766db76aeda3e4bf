"""From a version in the store to proved engines.

Blocking work, done in threads: check the hashes, open the engines, warm them up, run the canary, and choose which
variant serves on which device. A version that fails on every engine is refused with the reasons and changes nothing
else.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from convoy.app.engines.base import Engine, nth_of_cpu
from convoy.app.engines.batch import EngineFailure
from convoy.app.engines.cuda.device import UnusableGpu
from convoy.app.engines.jobs import Job, NotProved, Place, PlanRequest, TuningCandidate, refusal
from convoy.app.engines.machine import CPU_ONLY, Machine
from convoy.app.engines.memory import available_bytes, check_batch, resident_bytes
from convoy.app.engines.select import (
    Choice,
    PrecisionChoice,
    choose_on_cpu,
    choose_on_gpu,
    fastest_measured,
    measured_here,
)
from convoy.app.engines.table import AUTO, REFERENCE, Row, row_named, rows_for
from convoy.app.loading.bare_model import read_bare_model
from convoy.app.loading.proving import (
    NOTHING_SERVES,
    CanaryCheck,
    Candidate,
    ProvedEngine,
    choose,
    open_and_prove,
    prove,
    prove_by_itself,
)
from convoy.app.loading.signed import SignedCopy, SignedOnly
from convoy.models.bundle import MANIFEST, REPORT, Bundle, Variant, open_bundle
from convoy.models.errors import BundleError, JobError
from convoy.models.files import check_only_files
from convoy.models.onnx_digest import check_onnx_files
from convoy.models.spec import ModelSpec
from convoy.models.store import BARE_MODEL, StoredVersion

_log = logging.getLogger("convoy")
# Reading 10 GB from a slow disk twice, or tuning a large network on a GPU, takes less.
DEFAULT_LIMIT_S: float = 300


class ServedBefore(NamedTuple):
    """Which engine has served on a device, and with which of the version's files."""

    device: str
    engine: str
    file: str

    @staticmethod
    def of(proved: ProvedEngine) -> ServedBefore:
        return ServedBefore(proved.info.device, proved.info.engine, proved.file)


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """The operator's choices of engines, and the machine. `max_batch` None means the model's own.

    `configured_batch` overrides the model's configuration; None means that configuration. `plan_cache` None means that
    no plan is kept or searched for. A load that takes longer than `limit_s` is given up. `before` serves again, unless
    it cannot any more or something that takes precedence exists now. Each batch size is run `warm_up_runs` times before
    the version serves. On the CPU there are `instances` engines of `threads` each, which compute at the same time.
    `signed` None means that no signature is required.
    """

    precision: PrecisionChoice
    threads: int
    max_batch: int | None
    configured_batch: int | None = None
    engine: str = AUTO
    machine: Machine = CPU_ONLY
    plan_cache: Path | None = None
    limit_s: float = DEFAULT_LIMIT_S
    before: tuple[ServedBefore, ...] = ()
    warm_up_runs: int = 1
    instances: int = 1
    signed: SignedOnly | None = None


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """One version and the engines that serve it, one per device, at least one; each further instance on the CPU counts
    as a device.

    `spec` has the served batch size, which the operator may have lowered. `skipped` says why other engines and variants
    do not serve. `wishes` are plans that would serve better once built, and `untried` is what may be faster than what
    serves. `objections` are those of the export. `report` is the bundle's report, or None. `copy` is where the files
    are, if not at `stored`.
    """

    stored: StoredVersion
    spec: ModelSpec
    engines: tuple[ProvedEngine, ...]
    skipped: tuple[str, ...]
    load_s: float
    wishes: tuple[PlanRequest, ...] = ()
    untried: tuple[TuningCandidate, ...] = ()
    objections: tuple[str, ...] = ()
    report: Path | None = None
    copy: SignedCopy | None = None


def load(stored: StoredVersion, options: LoadOptions) -> LoadedModel:
    """Load one version and prove it. Raises BundleError, whose message says what to do, and JobError for this disk."""
    if options.signed is None:
        return _load(stored, options)
    with options.signed.copied(stored) as copy:
        return replace(_load(copy.stored, options), stored=stored, copy=copy)


def _load(stored: StoredVersion, options: LoadOptions) -> LoadedModel:
    started = time.monotonic()
    try:
        check_only_files(stored.folder)
    except OSError as error:
        raise BundleError(f"{stored.folder}: cannot be read ({error}); fix or remove it") from error
    if stored.is_bundle and not os.path.lexists(stored.folder / MANIFEST):
        raise BundleError(_no_model(stored.folder))
    walk = (_walk_for_bundle if stored.is_bundle else _walk_for_bare)(stored, options)
    try:
        walk.everything()
        return LoadedModel(
            stored=stored,
            spec=replace(walk.job.spec, max_batch_size=walk.job.max_batch_size),
            engines=tuple(walk.engines),
            skipped=tuple(dict.fromkeys(walk.skipped)),
            load_s=time.monotonic() - started,
            wishes=tuple(one for one in walk.later if isinstance(one, PlanRequest)) if options.engine == AUTO else (),
            untried=tuple(one for one in walk.later if isinstance(one, TuningCandidate)),
            objections=walk.objections,
            report=walk.report,
        )
    except BaseException:
        walk.close()
        raise


def _no_model(folder: Path) -> str:
    others = ", ".join(sorted(one.name for one in folder.iterdir())[:3]) if folder.is_dir() else ""
    there = f"it only has {others}" if others else "it is empty"
    return (
        f"{folder}: not a model, {there}; put a bundle of `convoy export` there, which has a {MANIFEST}, or an ONNX "
        f"file named {BARE_MODEL}"
    )


def _walk_for_bundle(stored: StoredVersion, options: LoadOptions) -> _Walk:
    bundle = open_bundle(stored.folder)
    spec = bundle.manifest.spec
    asked = options.configured_batch
    # Its engines are proved up to its own limit, and only with their batch dimension.
    if asked is not None and not min(1, spec.max_batch_size) <= asked <= spec.max_batch_size:
        raise BundleError(f"max_batch_size {asked} does not fit this bundle, which has {spec.max_batch_size}")
    _check_external_data(bundle)
    limit = _limit(spec, options)
    rows, skipped = rows_for(options.machine, options.engine)
    job = Job.of_bundle(
        *(bundle, limit, options.precision, options.machine, options.plan_cache),
        # If one engine was requested by name, nothing else may serve meanwhile.
        may_wait=options.engine != AUTO,
        threads=options.threads,
        warm_up_runs=options.warm_up_runs,
    )
    report = bundle.path(REPORT) if REPORT in bundle.manifest.files else None
    return _Walk(
        *(options, job, rows, bundle.folder, list(skipped)), objections=bundle.manifest.objections, report=report
    )


def _walk_for_bare(stored: StoredVersion, options: LoadOptions) -> _Walk:
    bare = read_bare_model(stored, options.threads, options.configured_batch, options.max_batch)
    limit = _limit(bare.spec, options)
    rows, skipped = rows_for(options.machine, options.engine)
    why_none = "a bare model has no canary to verify a plan with; export it as a bundle"
    skipped += tuple(f"{row.name}: {why_none}" for row in rows if row.holds_to_canary)
    _log.info("%s version %d is a bare model, %s", stored.name, stored.version, bare.batch_reason)
    variants = (Variant(bare.path.name, "fp32", "cpu", True, "", 0.0, None, None),)
    job = Job(
        *(bare.path.parent, bare.spec, variants, None, limit, "auto", options.machine, options.plan_cache),
        threads=options.threads,
        warm_up_runs=options.warm_up_runs,
    )
    others = tuple(row for row in rows if not row.holds_to_canary)
    return _Walk(options, job, others, bare.path, list(skipped), why_bare=f"bare model: {bare.batch_reason}")


_RowChoice = tuple[Row, Choice]


@dataclass(slots=True)
class _Walk:
    """Tries rows, devices and variants: what serves, why nothing else does, and what may serve later.

    `model` is its name in errors.
    """

    options: LoadOptions
    job: Job
    rows: tuple[Row, ...]
    model: Path
    skipped: list[str]
    objections: tuple[str, ...] = ()
    report: Path | None = None
    why_bare: str = ""
    engines: list[ProvedEngine] = field(default_factory=list)
    later: list[PlanRequest | TuningCandidate] = field(default_factory=list)
    _opened: list[Engine] = field(default_factory=list)  # including those that were closed since
    _first_bytes: int = 0  # what the first engine on the CPU took
    _reference: CanaryCheck | EngineFailure | None = None

    def everything(self) -> None:
        """Every GPU, or the CPU if none serves. Raises BundleError if nothing serves."""
        on_gpus = [row for row in self.rows if row.is_on_gpus]
        on_cpu = [row for row in self.rows if not row.is_on_gpus]
        if on_gpus:
            self._serve_from_gpus(on_gpus)
        if self.engines:
            return
        if not on_cpu:
            advice = "; --engine auto serves while it builds the plan" if self.later else ""
            told = "; ".join(dict.fromkeys(self.skipped))
            raise BundleError(f"{self.model}: --engine {self.options.engine} cannot serve it ({told}){advice}")
        of_gpus = len(self.skipped)
        if not self._serve_from(Place(), on_cpu):
            why = "; ".join(dict.fromkeys((*self.skipped[of_gpus:], *self.skipped[:of_gpus])))
            raise BundleError(f"{self.model}: no engine can serve it on the CPU ({why})")
        for number in range(1, self.options.instances):
            if not self._add_instance(self.engines[0], number):
                break

    def close(self) -> None:
        """Close everything that is open; nothing of it serves."""
        for engine in self._opened:
            engine.close()

    def _serve_from_gpus(self, rows: Sequence[Row]) -> None:
        for gpu in self.job.machine.unusable:
            self._leave_out(gpu, rows)
        for device in self.job.machine.gpus:
            try:
                device.ensure_works()
            except EngineFailure as failure:
                if device.lost and device.has_served:
                    told = f"{device.name} can no longer be used by this process ({failure}); restart the server"
                    raise BundleError(told) from failure
                self._leave_out(UnusableGpu(device.name, str(failure)), rows)
            else:
                self._serve_from(Place(device), rows)

    def _leave_out(self, gpu: UnusableGpu, rows: Sequence[Row]) -> None:
        """Other devices serve; the log and `/stats` say why this one does not."""
        _log.warning("%s is not used for %s: %s", gpu.device, self.model, gpu.reason)
        self.skipped += [refusal(row.name, gpu.device, f"the GPU cannot be used: {gpu.reason}") for row in rows]

    def _serve_from(self, place: Place, rows: Sequence[Row]) -> bool:
        """Let the rows of the lowest rank that can serve do so, and leave those above for later. Returns whether any
        serves.
        """
        serves = False
        for _, of_rank in groupby(rows, key=lambda row: row.rank):
            choices = [(row, self._choose(row, place)) for row in of_rank]
            if serves:
                self._leave_for_later(place, choices, None)
            else:
                serves = self._serve_of_one_rank(place, choices)
                place = replace(place, is_hurried=any(one.device is place.gpu for one in self.later))
        return serves

    def _serve_of_one_rank(self, place: Place, choices: Sequence[_RowChoice]) -> bool:
        """Prove what the rows can open, and let the fastest serve."""
        candidates = (
            self._as_before(place, choices) or self._as_measured(place, choices) or self._all_proved(place, choices)
        )
        self._leave_for_later(place, choices, candidates)
        # The most exact first, of whichever engine: a faster one must be significantly faster.
        candidates.sort(key=lambda one: self.job.variants.index(one.variant))
        if not candidates:
            return False
        try:
            self.engines.append(choose(candidates, self.skipped))
        except NotProved as failure:
            self.skipped.append(refusal(candidates[0].engine.info.engine, place.name, failure))
            return False
        return True

    def _as_before(self, place: Place, choices: Sequence[_RowChoice]) -> list[Candidate]:
        """Only what served there before, so that the others are not tried again; empty if it cannot serve now."""
        chosen = [(row, variant, choice.reason) for row, choice in choices for variant in choice.variants]
        served = (one for one in chosen if ServedBefore(place.name, one[0].name, one[1].file) in self.options.before)
        same = next(served, None)
        if same is None:
            return []
        try:
            found = self._candidate(place, *same)
        except NotProved as failure:
            _log.warning("%s on %s served before but fails now: %s", same[0].name, place.name, failure)
            return []
        self.skipped += [why for _, choice in choices if choice.variants for why in choice.skipped]
        why = f"{same[0].name} served before"
        self.skipped += [
            refusal(row.name, place.name, f"{variant.file}: {why}")
            for row, variant, _ in chosen
            if (row, variant) != same[:2]
        ]
        return [found]

    def _as_measured(self, place: Place, choices: Sequence[_RowChoice]) -> list[Candidate]:
        """The fastest alone, if export measured everything that may serve on this very CPU, in each of its engines.

        Empty if something was not measured here, or if none of it can serve.
        """
        if place.gpu is not None or self.job.precision != "auto" or self.job.canary is None:
            return []
        tried = [(row, variant) for row, choice in choices for variant in choice.variants]
        tables = [measured_here(variant, self._fingerprint(row)) for row, variant in tried]
        measured = [(*one, table) for one, table in zip(tried, tables, strict=True) if table is not None]
        if len(measured) < len(tried):
            return []
        # The most exact first: a faster one must be significantly faster.
        measured.sort(key=lambda one: self.job.variants.index(one[1]))
        skipped = [why for _, choice in choices for why in choice.skipped]
        while measured:
            row, variant, _ = measured.pop(fastest_measured([table for _, _, table in measured]))
            why = f"fastest on this device at export, in {row.name}: {variant.reason}"
            try:
                found = self._candidate(place, row, variant, why)
            except NotProved as failure:
                skipped.append(refusal(row.name, place.name, failure))
                continue
            slower = f"was not faster than {row.name} in {variant.precision} on this device at export"
            skipped += [refusal(one.name, place.name, f"{other.file}: {slower}") for one, other, _ in measured]
            self.skipped += skipped
            return [replace(found, code="fastest_at_export") if len(tried) > 1 else found]
        return []

    def _all_proved(self, place: Place, choices: Sequence[_RowChoice]) -> list[Candidate]:
        """Everything that proves itself."""
        found: list[Candidate] = []
        for row, choice in choices:
            before_this_row = len(found)
            self.skipped += choice.skipped
            for variant in choice.variants:
                before = resident_bytes()
                try:
                    self._check_room(place, variant)
                    found.append(self._candidate(place, row, variant, choice.reason))
                except NotProved as failure:
                    self.skipped.append(refusal(row.name, place.name, failure))
                else:
                    if place.gpu is None:
                        self._first_bytes = self._first_bytes or max(0, resident_bytes() - before)
            if choice.reason and len(found) == before_this_row:
                self.skipped.append(refusal(row.name, place.name, NOTHING_SERVES))
        return found

    def _add_instance(self, first: ProvedEngine, number: int) -> bool:
        """Add one more engine like the first on the CPU, proved in the same way; False if there is no room for it."""
        variant = next(one for one in self.job.variants if one.file == first.file)
        try:
            # The memory of running engines only shows when they run together.
            self._check_room(Place(), variant, engines=number)
            added = self._candidate(Place(), row_named(first.info.engine), variant, first.reason)
        except NotProved as failure:
            told = refusal(first.info.engine, nth_of_cpu(number), failure)
            _log.warning("%s has only %d instances: %s", self.model, number, told)
            self.skipped.append(told)
            return False
        added.engine.rest()
        added.engine.info = replace(added.engine.info, device=nth_of_cpu(number))
        self.engines.append(replace(first, engine=added.engine, canary=added.canary))
        return True

    def _check_room(self, place: Place, variant: Variant, engines: int = 1) -> None:
        """All stay open until one is chosen. Raises NotProved if so many would barely fit into memory."""
        free = available_bytes()
        if place.gpu is None and free is not None and free < engines * self._first_bytes:
            took, left = self._first_bytes >> 20, free >> 20
            raise NotProved(f"{variant.file}: the first engine took {took} MiB of memory, and {left} MiB are available")

    def _candidate(self, place: Place, row: Row, variant: Variant, why: str) -> Candidate:
        """The first way to open it that proves itself. Raises NotProved if none does."""
        prove_engine = partial(self._prove, row, variant, why)
        try:
            sooner = row.sooner(self.job, variant, place) if row.sooner is not None else ()
        except (JobError, OSError, EngineFailure) as failure:
            raise NotProved(f"{variant.file}: {failure}") from failure
        for open_engine in sooner:
            try:
                return open_and_prove(variant, open_engine, prove_engine)
            except NotProved as failure:
                _log.info("%s on %s: trying another way to open it: %s", row.name, place.name, failure)
        return open_and_prove(variant, partial(row.open, self.job, variant, place), prove_engine)

    def _prove(self, row: Row, variant: Variant, why: str, engine: Engine) -> Candidate:
        self._opened.append(engine)
        runs = self.job.warm_up_runs
        if self.job.canary is not None:
            return prove(variant, self.job.canary, f"{variant.file}: {why}", engine, runs)
        reference = None if row is REFERENCE else self._answer_of_cpu(row, variant)
        return prove_by_itself(variant, reference, self.why_bare, engine, runs)

    def _answer_of_cpu(self, row: Row, variant: Variant) -> CanaryCheck | None:
        """The reference for the row's answers; None if only a GPU runs the model.

        Raises NotProved if nothing can tell whether they are right, and BundleError.
        """
        if self._reference is None:
            job = replace(self.job, max_batch_size=min(1, self.job.max_batch_size))
            with closing(REFERENCE.open(job, variant, Place())) as engine:
                try:
                    engine.warm_up()
                    self._reference = CanaryCheck.of_another_device(engine)
                except EngineFailure as failure:
                    self._reference = failure
        if isinstance(self._reference, CanaryCheck):
            return self._reference
        why_none = f"its output cannot be verified, because {REFERENCE.name} cannot run it ({self._reference})"
        if not row.is_on_gpus:
            raise NotProved(f"{variant.file}: {why_none}")
        # A model may need something that only a GPU has.
        _log.warning("%s on %s: %s", self.job.path(variant), row.name, why_none)
        return None

    def _choose(self, row: Row, place: Place) -> Choice:
        """What the row may try; without a reason if it supports none."""
        variants = [variant for variant in self.job.variants if row.takes(variant)]
        if row.is_on_gpus:
            return choose_on_gpu(variants, self.job.precision, row.runner)
        try:
            return choose_on_cpu(variants, self.job.precision, self._fingerprint(row))
        except BundleError as error:
            return Choice((), "", (refusal(row.name, place.name, error),))

    def _fingerprint(self, row: Row) -> str:
        return row.fingerprint(self.job.machine, self.job.threads)

    def _leave_for_later(
        self, place: Place, choices: Sequence[_RowChoice], candidates: Sequence[Candidate] | None
    ) -> None:
        """What would serve better on the device once it is built or tuned. `candidates` None means that nothing was
        tried.
        """
        for row, choice in choices:
            if row.after_load is None:
                continue
            proved = [one.variant for one in candidates or () if one.engine.info.engine == row.name]
            for variant in choice.variants:
                try:
                    is_open = None if candidates is None else variant in proved
                    later = row.after_load(self.job, variant, place, is_open)
                except EngineFailure as failure:  # the device does not even identify itself; what is open may serve
                    self.skipped.append(refusal(row.name, place.name, f"{variant.file}: {failure}"))
                else:
                    self.later += [later] if later is not None else []


def _limit(spec: ModelSpec, options: LoadOptions) -> int:
    """The model's own limit, lowered by its configuration and the operator's; 0 stays 0. Raises BundleError."""
    limits = (spec.max_batch_size, options.max_batch, options.configured_batch)
    limit = min(limit for limit in limits if limit is not None)
    check_batch(spec.inputs, spec.outputs, limit)
    return limit


def _check_external_data(bundle: Bundle) -> None:
    """Check that every byte a library will read for a bundle was verified. Raises BundleError."""
    for variant in bundle.manifest.variants:
        unknown = set(check_onnx_files(bundle.path(variant.file))) - set(bundle.manifest.files)
        if unknown:
            raise BundleError(
                f"{bundle.folder}: {variant.file} stores tensors in {sorted(unknown)[0]!r}, for which the manifest has "
                "no digest; export the model again"
            )
