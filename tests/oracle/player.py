"""Plays a corpus into a build: some servers at a time, and at each one ask when the one before has its answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from tests.oracle.build import Build, Running, options_of, stop
from tests.oracle.grpc_player import GrpcPlayer
from tests.oracle.records import (
    FOLDER,
    Answer,
    Answers,
    Ask,
    CommandAsk,
    CrowdAsk,
    GrpcAsk,
    HttpAsk,
    Part,
    RegionAsk,
    Setup,
)
from tests.oracle.wire_player import WirePlayer

_SHARED_MEMORY = Path("/dev/shm")
_AT_ONCE = 2
Progress = Callable[[str], None]


def play(build: Build, setups: tuple[Setup, ...], folder: Path, progress: Progress = lambda _: None) -> Answers:
    """Every ask's answer, in the corpus' order. Raises BuildFailure when the build does not start."""

    def one(setup: Setup) -> Answers:
        started_s = time.monotonic()
        answers = {f"{setup.name}/{name}": answer for name, answer in _play(build, setup, folder)}
        progress(f"{setup.name}: {len(setup.asks)} asked in {time.monotonic() - started_s:.1f} s")
        return answers

    # Much of the time is waiting: for a server to start, or for a client's silence to be long enough.
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return {name: answer for answers in pool.map(one, setups) for name, answer in answers.items()}


def _play(build: Build, setup: Setup, folder: Path) -> Iterator[tuple[str, Answer]]:
    if not setup.has_server:
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            ended = pool.map(lambda ask: _command(build, ask, folder), setup.asks)
            yield from zip((ask.name for ask in setup.asks), ended, strict=True)
        return
    place = () if setup.store is None else ("--store", f"{FOLDER}/{setup.store}")
    options = options_of((*place, *setup.options), folder, FOLDER)
    with _regions(setup), build.serve(*options) as running:
        session = _Session(running)
        for ask in setup.asks:
            yield ask.name, session.play(ask)
        session.close()
        yield "the end", (Part(f"exit code {stop(running.process)}"),)


class _Session:
    """The clients of one server."""

    def __init__(self, running: Running) -> None:
        self._wire = WirePlayer(running.port)
        self._grpc = None if running.grpc_port is None else GrpcPlayer(running.grpc_port)

    def play(self, ask: Ask) -> Answer:
        match ask:
            case HttpAsk():
                time.sleep(ask.after_s)
                return self._wire.play(ask)
            case GrpcAsk():
                time.sleep(ask.after_s)
                return (Part("there is no gRPC port"),) if self._grpc is None else self._grpc.play(ask)
            case RegionAsk():
                return (Part(f"region {ask.region}", (_SHARED_MEMORY / ask.region).read_bytes()),)
            case CrowdAsk():
                self._wire.hold(ask.connections)
                return (Part(f"{ask.connections} connections are held"),)
        raise AssertionError(f"{ask.name}: a command needs no server")

    def close(self) -> None:
        self._wire.close()
        if self._grpc is not None:
            self._grpc.close()


def _command(build: Build, ask: Ask, folder: Path) -> Answer:
    assert isinstance(ask, CommandAsk), f"{ask.name}: there is no server to ask"
    ended = build.run(*options_of(ask.arguments, folder, FOLDER))
    return Part(f"exit code {ended.returncode}"), Part("stdout", ended.stdout), Part("stderr", ended.stderr)


@contextmanager
def _regions(setup: Setup) -> Iterator[None]:
    try:
        for name, contents in setup.regions:
            (_SHARED_MEMORY / name).write_bytes(contents)
        yield
    finally:
        for name, _ in setup.regions:
            (_SHARED_MEMORY / name).unlink(missing_ok=True)
