"""Which plan may be used: finds it, verifies every byte, and says why where there is none.

A plan is executable code, so nothing is handed out unless three things hold: the record is for the very key
that was asked for, the bytes have the record's sha256, and plan, record and folder belong to us (or to root)
and nobody else may write them. The hash alone would prove nothing against someone who can write both files;
the ownership is what makes a plan ours. Folders further up are not judged: whoever can write those can move
our files about, but cannot make files that belong to us. Hence a shared volume may hold the cache.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from models.bundle import FileRecord
from models.errors import UsageError
from models.plans import SCHEMA_VERSION, NoPlan, Plan, PlanKey, PlanPaths, PlanRecord
from models.records import from_jsonable


class NotTrusted(Exception):
    """The file or folder is not ours alone; the message says why and what to do."""


def find_plan(cache: Path, key: PlanKey) -> Plan | NoPlan:
    """The plan for `key`, its every byte verified, or the reason why there is none. Never raises OSError."""
    paths = PlanPaths.of(cache, key)
    try:
        _check_trust(paths.folder, paths.folder.lstat())
        record = _read_record(paths, key)
        if isinstance(record, NoPlan):
            return record
        data = read_trusted(paths.plan)
    except FileNotFoundError:
        return NoPlan(_absence(cache, key))
    except NotTrusted as error:
        return NoPlan(str(error))
    except OSError as error:
        return NoPlan(f"{error.filename or paths.folder}: {error.strerror}")
    if FileRecord(hashlib.sha256(data).hexdigest(), len(data)) != record.plan:
        return NoPlan(f"{paths.plan}: does not match the sha256 in its record")
    return Plan(paths.plan, record, data)


def read_trusted(path: Path) -> bytes:
    """The bytes of a file that is ours alone. Raises NotTrusted and OSError.

    What is judged is what is read: the open file, not its name. A link is not followed.
    """
    try:
        # O_NONBLOCK: a pipe in a file's place must not stop the server.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise NotTrusted(f"{path}: is a link; plans are kept as files of their own") from error
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


def _check_trust(path: Path, status: os.stat_result) -> None:
    # Root can run code as us anyway, and a cache baked into an image belongs to root.
    if status.st_uid not in (os.geteuid(), 0):
        raise NotTrusted(f"{path}: belongs to user {status.st_uid}; a plan is code, so only our own or root's is run")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise NotTrusted(f"{path}: other users may write it, and a plan is code; run chmod go-w on it")


def records_in(cache: Path) -> Iterator[PlanRecord | NoPlan]:
    """Every plan's record in the cache, whatever it is for, or why it cannot be read. The plans are not looked at."""
    for path in sorted(cache.glob("*/trt*.json")):
        try:
            yield _read_any_record(path)
        except NotTrusted as error:
            yield NoPlan(str(error))
        except OSError as error:
            yield NoPlan(f"{path}: {error.strerror}")


def _read_record(paths: PlanPaths, key: PlanKey) -> PlanRecord | NoPlan:
    record = _read_any_record(paths.record)
    if isinstance(record, PlanRecord) and record.key != key:
        return NoPlan(f"{paths.record}: was written for {record.key.target}, not for {key.target}")
    return record


def _read_any_record(path: Path) -> PlanRecord | NoPlan:
    raw = read_trusted(path)
    try:
        record = from_jsonable(PlanRecord, json.loads(raw), path.name)
    except (ValueError, UsageError) as error:
        return NoPlan(f"{path}: cannot be read ({error})")
    if record.schema_version != SCHEMA_VERSION:
        return NoPlan(f"{path}: has schema version {record.schema_version}, this version reads {SCHEMA_VERSION}")
    return record


def _absence(cache: Path, key: PlanKey) -> str:
    """Why there is nothing: the targets that this model does have plans for are most of the answer."""
    found = sorted(path.name for path in (cache / key.onnx_sha256).glob("trt*.plan"))
    if not found:
        return f"no plan for {key.target}"
    if any(name.startswith(f"trt{key.tensorrt}-sm{key.compute_capability}-") for name in found):
        return f"no plan with these build options for {key.target}"
    others = ", ".join(sorted({name.rpartition("-")[0] for name in found}))
    return f"no plan for {key.target}; those in the cache are for {others}"
