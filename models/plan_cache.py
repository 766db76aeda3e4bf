"""Find a plan that may be used and verify every byte of it, or say why there is none; and write its files.

A plan is executable code, so it is used only if three things hold: its record is for the requested key, its bytes have
the record's sha256, and plan, record and folder belong to this user (or root) and are writable by no one else. The hash
alone proves nothing against someone who can write both files; ownership does. Parent folders are not checked: whoever
can write those can move our files, but cannot create files that belong to us. So a shared volume can hold the cache.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import stat
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from convoy.models.bundle import FileRecord
from convoy.models.errors import UsageError
from convoy.models.files import replace_file
from convoy.models.plans import (
    SCHEMA_VERSION,
    BuildOptions,
    Gpu,
    LibraryName,
    NoPlan,
    Plan,
    PlanKey,
    PlanPaths,
    PlanRecord,
    PlanTarget,
    is_record,
    plan_key,
)
from convoy.models.records import from_jsonable

_log = logging.getLogger("convoy")
PARTIAL_PREFIX = ".writing-"


@dataclass(frozen=True, slots=True)
class PlanQuery:
    """A server's search: a plan of this file that this version of a library can run on `gpu`."""

    onnx_sha256: str
    library: LibraryName
    version: str
    gpu: Gpu
    options: BuildOptions


class NotTrusted(Exception):
    """The file or folder does not belong to us alone; the message says why and what to do."""


def default_plan_cache() -> Path:
    """The default place for plans, which can all be built again."""
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "convoy"
    try:
        return Path.home() / ".cache" / "convoy"
    except RuntimeError:  # a container's user may be a number without a name
        return Path(tempfile.gettempdir()) / f"convoy-cache-{os.geteuid()}"


def plan_folder(given: Path | None) -> Path:
    """The given folder, or the default. Raises UsageError if it begins with an unknown ~user."""
    try:
        return (given or default_plan_cache()).expanduser()
    except RuntimeError as error:
        raise UsageError(f"--plan-cache {given}: {error}; use an absolute path") from error


def find_plan(cache: Path, key: PlanKey) -> Plan | NoPlan:
    """The plan for `key`, with every byte verified, or the reason why there is none. Never raises OSError."""
    paths = PlanPaths.of(cache, key)
    try:
        _check_trust(paths.folder, paths.folder.lstat())
        record = _read_record(paths, key)
        if isinstance(record, NoPlan):
            return record
        data = read_trusted(paths.plan)
    except FileNotFoundError:
        is_lost = paths.record.is_file()
        return NoPlan(f"no plan for {key.target}: {paths.plan} is missing" if is_lost else _absence(cache, key))
    except NotTrusted as error:
        return NoPlan(str(error))
    except OSError as error:
        return NoPlan(f"{error.filename or paths.folder}: {error.strerror}")
    if FileRecord(hashlib.sha256(data).hexdigest(), len(data)) != record.plan:
        return NoPlan(f"{paths.plan}: does not match the sha256 in its record")
    return Plan(paths.plan, record, data)


def search_plan(cache: Path, query: PlanQuery) -> Plan | NoPlan:
    """The plan for `query` with the fewest targets and the smallest sufficient batches. Never raises OSError."""
    folder = cache / query.onnx_sha256
    records = list(_read_all(folder))
    refused = [found.reason for path, found in records if isinstance(found, NoPlan) and is_record(path, query.library)]
    readable = [found for _, found in records if isinstance(found, PlanRecord)]
    for record in sorted((one for one in readable if _answers(one, query)), key=_breadth):
        plan = find_plan(cache, record.key)
        if isinstance(plan, Plan):
            if refused:
                _log.warning("ignored plans: %s", "; ".join(refused))
            return plan
        refused.append(plan.reason)
    return NoPlan("; ".join((_nothing_for(query, readable), *refused)))


def _answers(record: PlanRecord, query: PlanQuery) -> bool:
    target = record.key.target
    is_same = (record.key.onnx_sha256, target.library, target.version) == (
        query.onnx_sha256,
        query.library,
        query.version,
    )
    return is_same and _is_current(record) and target.covers(query.gpu) and record.options.serves(query.options)


def _is_current(record: PlanRecord) -> bool:
    """Plans of another version of the builder have another key, even with the same options."""
    return record.key == plan_key(record.key.onnx_sha256, record.key.target, record.options)


def _breadth(record: PlanRecord) -> tuple[bool, int, int]:
    """Sort order: plans for few devices and sizes first, which are at least as good."""
    capabilities = record.key.target.capabilities
    return not capabilities, len(capabilities), record.options.batch_sizes[-1]


def _nothing_for(query: PlanQuery, records: Iterable[PlanRecord]) -> str:
    target = PlanTarget(query.library, query.version, (query.gpu.compute_capability,), query.gpu.name)
    wanted = f"no plan for {target} in {query.options}"
    old = " by another version of the builder"
    others = sorted({f"{one.options} for {one.key.target}{'' if _is_current(one) else old}" for one in records})
    return f"{wanted}; those in the cache are {', '.join(others)}" if others else wanted


def _read_all(folder: Path) -> Iterator[tuple[Path, PlanRecord | NoPlan]]:
    """Every record of a folder, or why it cannot be read."""
    for path in sorted(filter(is_record, folder.glob("*.json"))):
        try:
            yield path, _read_any_record(path)
        except NotTrusted as error:
            yield path, NoPlan(str(error))
        except OSError as error:
            yield path, NoPlan(f"{path}: {error.strerror}")


def read_trusted(path: Path) -> bytes:
    """The bytes of a file that belongs to us alone. Raises NotTrusted and OSError.

    The open file is checked, not its name. Links are not followed.
    """
    try:
        # O_NONBLOCK: a pipe with the file's name must not block the server.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise NotTrusted(f"{path}: is a link; plans must be regular files") from error
        raise
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise NotTrusted(f"{path}: is not a file")
        _check_trust(path, status)
        with os.fdopen(descriptor, "rb", closefd=False) as handle:
            return handle.read()
    finally:
        os.close(descriptor)


def is_trusted(path: Path) -> bool:
    """Whether `read_trusted` would read the file now."""
    try:
        status = path.lstat()
        _check_trust(path, status)
    except (NotTrusted, OSError):
        return False
    return stat.S_ISREG(status.st_mode)


def write_trusted(path: Path, data: bytes, stem: str) -> None:
    """Write aside, sync, rename, so that readers see the old bytes or the new ones and `read_trusted` accepts them.

    `stem` is the plan's, by which leftovers of dead writers are recognised. Raises OSError.
    """
    replace_file(path, data, prefix=f"{PARTIAL_PREFIX}{stem}-", mode=0o644)


def _check_trust(path: Path, status: os.stat_result) -> None:
    # Root can run code as this user anyway, and a cache in an image belongs to root.
    if status.st_uid not in (os.geteuid(), 0):
        raise NotTrusted(
            f"{path}: belongs to user {status.st_uid}; a plan is code and must belong to this user or root"
        )
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise NotTrusted(f"{path}: other users can write to it, but a plan is code; run chmod go-w on it")


def records_in(cache: Path) -> Iterator[PlanRecord | NoPlan]:
    """Every plan's record in the cache, or why it cannot be read. The plans are not checked."""
    for folder in sorted(path for path in cache.glob("*") if path.is_dir()):
        for _, found in _read_all(folder):
            yield found


def read_record(plan: Path) -> PlanRecord | NoPlan:
    """The record of the plan in this file. Raises NotTrusted and OSError."""
    return _read_any_record(plan.with_name(f"{plan.name.removesuffix('.plan')}.json"))


def _read_record(paths: PlanPaths, key: PlanKey) -> PlanRecord | NoPlan:
    record = _read_any_record(paths.record)
    if isinstance(record, PlanRecord) and record.key != key:
        return NoPlan(f"{paths.record}: was written for {record.key.target}, not for {key.target}")
    return record


def _read_any_record(path: Path) -> PlanRecord | NoPlan:
    raw = read_trusted(path)
    try:
        body = json.loads(raw)
        was = body.get("schema_version") if isinstance(body, dict) else None
        if isinstance(was, int) and was != SCHEMA_VERSION:
            return NoPlan(f"{path}: has schema version {was}, this version reads {SCHEMA_VERSION}; remove it")
        return from_jsonable(PlanRecord, body, path.name)
    except (ValueError, UsageError) as error:
        return NoPlan(f"{path}: cannot be read ({error})")


def _absence(cache: Path, key: PlanKey) -> str:
    """Why there is none: the targets of the model's existing plans explain most cases."""
    found = sorted(path.name for path in (cache / key.onnx_sha256).glob("*.plan"))
    if not found:
        return f"no plan for {key.target}"
    if any(name.startswith(f"{key.target.stem}-") for name in found):
        return f"no plan with these build options for {key.target}"
    others = ", ".join(sorted({name.rpartition("-")[0] for name in found}))
    return f"no plan for {key.target}; those in the cache are for {others}"
