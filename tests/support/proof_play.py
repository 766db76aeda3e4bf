"""What experiments' processes may do to their parent, each as an experiment of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from tests.gpu.proof.experiment import Bench, NotMeasurable


def answer(bench: Bench, value: float) -> None:
    bench.step("looking")
    bench.figure("value", value)
    bench.fact("carried", os.environ.get("CARRIED", "nothing"))


def break_down(bench: Bench) -> None:
    raise ValueError("no such\n thing")


def lack(bench: Bench) -> None:
    raise NotMeasurable("there is no such library")


def die(bench: Bench) -> None:
    """As a library does that calls std::terminate."""
    bench.figure("value", 1)
    bench.step("the deadly call")
    print("terminate called", file=sys.stderr, flush=True)
    os.abort()


def never_return(bench: Bench) -> None:
    """With a helper in a session of its own, which would hold the GPU."""
    helper = subprocess.Popen(
        [sys.executable, "-c", "import signal; print('up', flush=True); signal.pause()"],
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert helper.stdout is not None
    helper.stdout.readline()
    bench.figure("helper", helper.pid)
    bench.step("the call that never returns")
    signal.pause()


def leave_without_a_word(bench: Bench) -> None:
    os._exit(0)
