"""Files of arrays, `.npz`: a network's inputs by name, a row per sample, and optionally the expected output.

Reads no pickle: an array of objects is refused.
"""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import numpy as np

from convoy.export.progress import Step
from convoy.export.rows import Chunk, Rows, bytes_of, count_of, picked
from convoy.models.bundle import DatasetRecord
from convoy.models.errors import JobError, UsageError
from convoy.models.samples import Part, split_by_hash
from convoy.models.spec import OIP_NAMES, TensorSpec

# Arrays with one of these names are the expected output, and not an input.
TARGETS = ("targets", "labels")


@dataclass(frozen=True, slots=True)
class ArraySet:
    """Rows of a file of arrays; `source` is the file's name. There are no `labels`, because it has numbers and no class
    names.
    """

    source: str
    inputs: Rows
    targets: np.ndarray | None
    labels: tuple[str, ...] = ()
    kind: ClassVar[str] = "rows"

    @property
    def count(self) -> int:
        return count_of(self.inputs)

    @property
    def names(self) -> Sequence[str]:
        return [f"row {row}" for row in range(self.count)]

    @property
    def hashes(self) -> Sequence[str]:
        """The sha256 of each row's inputs."""
        names = sorted(self.inputs)
        return [
            hashlib.sha256(b"".join(np.ascontiguousarray(self.inputs[name][row]).data for name in names)).hexdigest()
            for row in range(self.count)
        ]

    @property
    def has_targets(self) -> bool:
        return self.targets is not None

    @property
    def record(self) -> DatasetRecord:
        hashes = sorted(self.hashes)
        return DatasetRecord(self.source, len(hashes), hashlib.sha256("".join(hashes).encode()).hexdigest())

    @property
    def key(self) -> str:
        """A hash over all values in order, and the names."""
        arrays = {**self.inputs, **({} if self.targets is None else {"targets": self.targets})}
        digest = hashlib.sha256()
        for name in sorted(arrays):
            digest.update(f"{name}{arrays[name].dtype}{arrays[name].shape}".encode())
            digest.update(np.ascontiguousarray(arrays[name]).data)
        return digest.hexdigest()

    def chunks(self, step: Step, limit: int) -> Iterator[Chunk]:
        """All rows in order, at most `limit` and about 16 MB at a time."""
        size = max(1, min(limit, (16 << 20) * self.count // max(1, bytes_of(self.inputs))))
        for start in range(0, self.count, size):
            rows = slice(start, start + size)
            targets = None if self.targets is None else self.targets[rows]
            inputs = picked(self.inputs, rows)
            step.advance(count_of(inputs))
            yield Chunk(inputs, targets, np.arange(start, start + count_of(inputs)))

    def thinned(self, most: int) -> ArraySet:
        """At most `most` of the rows, evenly spaced."""
        if self.count <= most:
            return self
        return self._of(np.linspace(0, self.count - 1, most).astype(int))

    def part(self, part: Part) -> ArraySet:
        """The rows of this part, chosen by content as for images. Raises JobError if there are none."""
        index = split_by_hash(self.hashes)[part]
        if not index or len(index) == self.count:
            raise JobError(f"{self.count} rows of {self.source} are too few to split; pass two files, or more rows")
        return self._of(np.array(index))

    def without(self, part: Part) -> ArraySet:
        """All other rows."""
        left = set(range(self.count)) - set(split_by_hash(self.hashes)[part])
        return self._of(np.array(sorted(left), np.int64))

    def _of(self, index: np.ndarray) -> ArraySet:
        targets = None if self.targets is None else self.targets[index]
        return replace(self, inputs=picked(self.inputs, index), targets=targets)


@dataclass(frozen=True, slots=True)
class ArrayFile:
    """What a file declares: shape and dtype of each input, without the first dimension; `targets` names the expected
    output.
    """

    path: Path
    rows: int
    inputs: Mapping[str, tuple[tuple[int, ...], np.dtype[np.generic]]]
    targets: str | None

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        """The inputs as a network takes them: doubles become FP32, because hardly any network takes them. Raises
        JobError.
        """
        return tuple(TensorSpec(name, self._dtype(name, dtype), shape) for name, (shape, dtype) in self.inputs.items())

    def _dtype(self, name: str, dtype: np.dtype[np.generic]) -> str:
        if dtype == np.float64:
            return "FP32"
        known = OIP_NAMES.get(dtype.newbyteorder("<") if dtype.itemsize > 1 else dtype)
        if known is None:
            raise JobError(f"{self.path.name}: {name!r} is of {dtype}, which no network takes; save numbers")
        return known


def is_array_file(source: str) -> bool:
    """Whether a data set's name is that of a file of arrays."""
    return source.endswith(".npz")


def read_array_file(path: Path) -> ArrayFile:
    """Read only the declarations. Raises UsageError if there is no such file, JobError for unsupported contents."""
    if not path.is_file():
        raise UsageError(f"there is no file {path}; check the path, or name a data set or a folder")
    headers: dict[str, tuple[tuple[int, ...], np.dtype[np.generic]]] = {}
    try:
        with zipfile.ZipFile(path) as archive:
            for member in archive.namelist():
                with archive.open(member) as stream:
                    version = np.lib.format.read_magic(stream)
                    first, later = np.lib.format.read_array_header_1_0, np.lib.format.read_array_header_2_0
                    shape, _, dtype = first(stream) if version == (1, 0) else later(stream)
                    headers[member.removesuffix(".npy")] = (shape, dtype)
    except (zipfile.BadZipFile, ValueError, OSError, EOFError) as error:
        raise JobError(f"{path.name} cannot be read as .npz ({error}); write it with numpy.savez") from error
    objects = [name for name, (_, dtype) in headers.items() if dtype.hasobject]
    if objects:
        raise JobError(f"{path.name}: {objects[0]!r} holds Python objects, which are not read; save plain numbers")
    lengths = {name: shape[0] if shape else 0 for name, (shape, _) in headers.items()}
    if not lengths or len(set(lengths.values())) != 1 or 0 in lengths.values():
        told = ", ".join(f"{name} {length}" for name, length in lengths.items()) or "no array"
        raise JobError(
            f"{path.name}: every array needs one row per sample, but the file has {told}; make the lengths equal"
        )
    targets = [name for name in TARGETS if name in headers]
    if len(targets) > 1 or len(targets) == len(headers):
        what = "both targets and labels" if len(targets) > 1 else "only targets"
        raise JobError(f"{path.name} has {what}; it needs one array per input, by name, and at most one of targets")
    inputs = {name: (shape[1:], dtype) for name, (shape, dtype) in headers.items() if name not in targets}
    return ArrayFile(path, next(iter(lengths.values())), inputs, targets[0] if targets else None)


def load_arrays(path: Path, specs: tuple[TensorSpec, ...]) -> ArraySet:
    """The file's rows as the inputs of `specs`. Raises UsageError, and JobError if they do not fit."""
    file = read_array_file(path)
    named = _matched(file, specs)
    inputs: dict[str, np.ndarray] = {}
    with np.load(path, allow_pickle=False) as arrays:
        for spec in specs:
            shape, dtype = file.inputs[named[spec.name]]
            if not np.can_cast(dtype, spec.numpy_dtype, casting="same_kind") or shape != spec.drawn_shape:
                raise JobError(
                    f"{path.name}: {named[spec.name]!r} is {dtype} {list(shape)} per row, but the network takes "
                    f"{spec.dtype} {list(spec.drawn_shape)}; convert it"
                )
            inputs[spec.name] = np.ascontiguousarray(arrays[named[spec.name]].astype(spec.numpy_dtype))
        targets = None if file.targets is None else arrays[file.targets]
    broken = [name for name, array in inputs.items() if array.dtype.kind == "f" and not np.isfinite(array).all()]
    if broken:
        raise JobError(f"{path.name}: {broken[0]!r} contains NaN or infinity; remove those rows")
    return ArraySet(path.name, inputs, targets)


def _matched(file: ArrayFile, specs: tuple[TensorSpec, ...]) -> dict[str, str]:
    """The array of each input: by name, or the only one."""
    if len(specs) == len(file.inputs) == 1:
        return {specs[0].name: next(iter(file.inputs))}
    if {spec.name for spec in specs} != set(file.inputs):
        wanted, found = (", ".join(names) for names in ([spec.name for spec in specs], file.inputs))
        raise JobError(f"{file.path.name} has {found}, the network takes {wanted}; rename the arrays")
    return {name: name for name in file.inputs}
