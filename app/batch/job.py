"""The checked options of a run, and the bundle that labels."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, get_args

from convoy.app.config.settings import Settings, read_settings
from convoy.app.engines.cpu import cpu_budget
from convoy.app.engines.memory import available_bytes
from convoy.app.engines.select import PrecisionChoice
from convoy.app.engines.table import AUTO, CHOICES
from convoy.models.bundle import MANIFEST, Bundle, open_bundle, sha256_file
from convoy.models.errors import BundleError, JobError, UsageError
from convoy.models.images import DEFAULT_MAX_PIXELS
from convoy.models.option import Option
from convoy.models.spec import ModelSpec
from convoy.models.store import DEMO_STORE, Store


@dataclass(frozen=True, slots=True)
class BatchOptions:
    """Arguments and options of the command. With 0 for `workers` and `batch_size`, they are chosen here.

    `model_version` None means the newest valid one. `ray` None means processes on this machine; otherwise it is the
    cluster's address, `auto` for the one that Ray finds.
    """

    name: Annotated[str, Option("The model.", is_argument=True)]
    inputs: Annotated[
        list[str], Option("Images, folders, patterns, lists (.txt), parquet files, tars.", is_argument=True)
    ]
    out: Annotated[Path, Option("Folder for part-*.parquet and errors.parquet.")]
    store: Annotated[Path | None, Option("Folder of models; default: the demo.")] = None
    model_version: Annotated[int | None, Option("Version of the model; default: the newest.")] = None
    top_k: Annotated[
        int | None, Option("Classes or objects per image; default: 5 classes, or the model's most objects.")
    ] = None
    threshold: Annotated[float | None, Option("Least score of objects; default: the model's.")] = None
    embeddings: Annotated[str | None, Option("Output to store as a column of lists.")] = None
    column: Annotated[str | None, Option("Parquet column with paths or images.")] = None
    batch_size: Annotated[int, Option("Images per batch; 0: the model's own.")] = 0
    workers: Annotated[int, Option("Processes or Ray actors; 0: by devices and cores.")] = 0
    engine: Annotated[str, Option("Engine to use.", words=CHOICES)] = AUTO
    precision: Annotated[str, Option("Variant of the model to use.", words=get_args(PrecisionChoice))] = "auto"
    max_pixels: Annotated[int, Option("Most pixels per image; larger images are skipped.")] = DEFAULT_MAX_PIXELS
    ray: Annotated[str | None, Option("Run on a Ray cluster: its address, local, or auto (default).")] = None

    def checked(self) -> Settings:
        """Check the options. Returns the server's settings of the same names. Raises UsageError."""
        if not self.inputs:
            raise UsageError("pass at least one input: an image, a folder, a list, a parquet file or a tar")
        for name, value, least in (
            ("--top-k", 1 if self.top_k is None else self.top_k, 1),
            ("--batch-size", self.batch_size, 0),
            ("--workers", self.workers, 0),
        ):
            if value < least:
                raise UsageError(f"{name} must be at least {least}, got {value}")
        if self.threshold is not None and not 0 <= self.threshold <= 1:
            raise UsageError(f"--threshold must be from 0 to 1, got {self.threshold:g}")
        given = {"engine": self.engine, "precision": self.precision, "max_pixels": self.max_pixels}
        return read_settings({"store": self.store, **given})


@dataclass(frozen=True, slots=True)
class BatchModel:
    """The bundle that labels. `passed_over` says why newer versions do not."""

    bundle: Bundle
    version: int
    sha256: str
    passed_over: tuple[str, ...]


def find_model(options: BatchOptions) -> BatchModel:
    """The requested version, or the newest valid one. Raises UsageError or JobError."""
    store = Store.at(options.store or DEMO_STORE)
    versions = store.versions(options.name)
    if not versions:
        have = ", ".join(store.names()) or "none"
        raise UsageError(f"there is no model {options.name!r} in {store.root} (available: {have})")
    if options.model_version is not None:
        wanted = [one for one in versions if one.version == options.model_version]
        if not wanted:
            have = ", ".join(str(one.version) for one in versions)
            raise UsageError(f"{options.name!r} has no version {options.model_version} (available: {have})")
        versions = wanted
    passed_over: list[str] = []
    for stored in versions:
        if not stored.is_bundle:
            raise JobError(
                f"{stored.folder} is a bare model without image preprocessing; make a bundle of it "
                "with convoy export --preprocess"
            )
        try:
            bundle = open_bundle(stored.folder)
            sha256 = sha256_file(stored.folder / MANIFEST)
        except (BundleError, OSError) as error:
            passed_over.append(f"version {stored.version}: {error}")
            continue
        _check_spec(bundle.manifest.spec, options)
        return BatchModel(bundle, stored.version, sha256, tuple(passed_over))
    raise JobError(f"no version of {options.name!r} can be used ({'; '.join(passed_over)})")


def output_index(spec: ModelSpec, name: str) -> int:
    """The index of a named output. Raises UsageError."""
    names = [output.name for output in spec.outputs]
    if name not in names:
        raise UsageError(f"the model has no output {name!r} for --embeddings; it has {', '.join(names)}")
    return names.index(name)


def workers_for(gpus: int) -> int:
    """How many workers to start here: one per GPU, or without GPUs one per core with enough memory.

    Threads of one Python process take turns at everything except computing and decoding; processes do not.
    """
    if gpus:
        return gpus
    # More than 16 start slowly and do not help. Libraries, a network and its batches take about 2 GiB.
    free = available_bytes()
    workers = min(cpu_budget(), 16)
    return max(1, workers if free is None else min(workers, free // (2 << 30)))


def share_of_cpus(workers: int) -> int:
    """Threads per worker, from the shared CPU budget."""
    return max(1, cpu_budget() // workers)


def _check_spec(spec: ModelSpec, options: BatchOptions) -> None:
    if spec.image is None:
        raise JobError(
            f"{options.name!r} has no image preprocessing, so it cannot take images; export it with --preprocess"
        )
    if not spec.gives_classes and spec.detection is None:
        raise JobError(
            f"{options.name!r} has the task {spec.task!r}, but convoy batch only classifies and detects; "
            f"send the images to a server, or tensors to its /v2/models/{options.name}/infer"
        )
    if spec.detection is None and options.threshold is not None:
        raise UsageError(f"--threshold is for detectors, but {options.name!r} is none; leave it out")
    if spec.gives_classes and (spec.outputs[0].is_strings or spec.outputs[0].numpy_dtype.kind not in "fiu"):
        raise JobError(f"{options.name!r} returns no scores, so there are no labels to write")
    if options.batch_size > max(1, spec.max_batch_size):
        raise UsageError(
            f"--batch-size {options.batch_size} is above the model's own limit, {max(1, spec.max_batch_size)}"
        )
    if options.embeddings is not None:
        index = output_index(spec, options.embeddings)
        if spec.outputs[index].numpy_dtype.kind not in "fiub":
            raise UsageError(f"output {options.embeddings!r} is {spec.outputs[index].dtype}, which is not numeric")
