"""What is done to the server: one row each, which begins it, undoes it, and waits until the server should be well."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from tritonclient.utils import InferenceServerException

from tests.campaign.field import FEW_DESCRIPTORS, READY_S, Field
from tests.campaign.plan import Fault

# What has piled up is worked off after the fault is gone.
AFTERMATH_S = 2.0
_Does = Callable[[Field, Fault], str]


@contextmanager
def _patiently(pids: list[int]) -> Iterator[None]:
    for pid in pids:
        with suppress(psutil.Error):
            psutil.Process(pid).send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            with suppress(psutil.Error):
                psutil.Process(pid).send_signal(signal.SIGCONT)


def _kill_core(field: Field, fault: Fault) -> str:
    if field.edges == 0 or fault.which % 3 == 0:
        field.kill()
        field.wait_for_nobody()
        field.start(field.setting)
        return "the process that was started killed, and started again"
    (pid,) = field.pids("core")
    psutil.Process(pid).kill()
    field.wait(lambda: field.pids("core") not in ([], [pid]) and field.is_ready(), "another core serves", READY_S)
    return f"core {pid} killed"


def _kill_edge(field: Field, fault: Fault) -> str:
    pids = field.pids("edge")
    pid = pids[fault.which % len(pids)]
    psutil.Process(pid).kill()
    field.wait(
        lambda: pid not in field.pids("edge") and len(field.pids("edge")) == field.edges and _answers(field),
        "every edge is there",
        READY_S,
    )
    return f"edge {pid} killed"


def _answers(field: Field) -> bool:
    """Whether each of the edges knows the core: some calls in a row, which go to whichever takes them."""
    return all(field.is_ready() for _ in range(4 * max(1, field.edges)))


def _pause(field: Field, fault: Fault) -> str:
    processes = field.processes()
    groups = [[one.pid for one in processes], *([one.pid] for one in processes if len(processes) > 1)]
    chosen = groups[fault.which % len(groups)]
    with _patiently(chosen):
        time.sleep(fault.lasts_s)
    roles = {one.pid: one.role for one in processes}
    return f"{' and '.join(roles[pid] for pid in chosen)} stopped for {fault.lasts_s:g} s"


def _restart(field: Field, fault: Fault) -> str:
    code = field.stop()
    assert code == 0, f"after SIGTERM the server ended with {code}"
    field.start(field.setting)
    return "drained, exit code 0, started again"


def _change_store(field: Field, fault: Fault) -> str:
    return field.change_store(fault.which)


def _load(field: Field, fault: Fault) -> str:
    """The repository extension over either wire. Raises AssertionError when an order is not obeyed."""
    steps = (
        ("unload", "shift", {}),
        ("load", "shift", {}),
        ("load", "shift", {"config": '{"max_batch_size": 4}'}),
        ("unload", "mean", {}),
        ("load", "mean", {}),
        ("load", "nowhere", {}),
    )
    order, model, options = steps[fault.which % len(steps)]
    wire = "gRPC" if fault.which % 2 else "HTTP"
    try:
        _tell(field, wire, order, model, options)
    except InferenceServerException as error:
        if model != "nowhere":
            raise AssertionError(f"{order} {model} over {wire} was refused: {error}") from error
    how = " with max_batch_size 4" if options else ""
    return f"{order} {model}{how} over {wire}"


def _tell(field: Field, wire: str, order: str, model: str, options: dict[str, str]) -> None:
    library, port = (triton_grpc, field.grpc_port) if wire == "gRPC" else (triton_http, field.http_port)
    with library.InferenceServerClient(f"127.0.0.1:{port}") as client:
        getattr(client, f"{order}_model")(model, **options)


def _hoard(field: Field, fault: Fault) -> str:
    held = []
    try:
        for _ in range(3 * FEW_DESCRIPTORS):
            one = socket.socket()
            one.settimeout(0.5)
            with suppress(OSError):
                one.connect(("127.0.0.1", field.http_port))
            held.append(one)
        time.sleep(fault.lasts_s)
    finally:
        for one in held:
            one.close()
    return f"{len(held)} idle connections for {fault.lasts_s:g} s, and {FEW_DESCRIPTORS} descriptors"


def _fill_disk(field: Field, fault: Fault) -> str:
    server = field.running()
    if not field.has_small_disk:
        return "the log may have 32 KiB, by RLIMIT_FSIZE: no disk could be mounted here"
    filler = field.on_small_disk(server.process.pid, field.folder / "disk" / "filler")
    with suppress(OSError), Path(filler).open("wb", buffering=0) as out:
        while True:
            out.write(b"x" * 512)
    time.sleep(fault.lasts_s)
    filler.unlink()
    return f"the disk full for {fault.lasts_s:g} s"


# `ready`: whether readiness and answers are promised while it goes on.
FAULTS: dict[str, tuple[_Does, bool]] = {
    "kill core": (_kill_core, False),
    "kill edge": (_kill_edge, False),
    "pause": (_pause, False),
    "restart": (_restart, False),
    "store": (_change_store, True),
    "load": (_load, True),
    "hoard": (_hoard, False),
    "fill disk": (_fill_disk, True),
}

# Those that go on for a while and then are undone; the others are done at once.
LASTING = frozenset({"pause", "hoard", "fill disk"})


def put_back(field: Field) -> str:
    """Everything as the next period expects it, and what the server then has to come to. Raises AssertionError."""
    field.tidy_store()
    if field.setting == "explicit":
        for model in ("shift", "mean"):
            _tell(field, "HTTP", "load", model, {})
    newest = max(field.shift_versions)
    if field.setting in ("poll", "explicit"):
        field.wait(lambda: field.shift_served() == newest, f"shift {newest}, the newest that is sound, serves", 15.0)
    return f"shift {newest} serves"
