"""An experiment's process: whatever it does, its parent has what it noted and goes on."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.proof import parts
from tests.gpu.proof.__main__ import main
from tests.gpu.proof.book import open_book
from tests.gpu.proof.children import ROOT, Children, is_running, wait_for
from tests.gpu.proof.experiment import Experiment, Judgement, Ran
from tests.support import proof_play


def asked(measure: Callable[..., None], **arguments: Any) -> Experiment:
    return Experiment(
        measure.__name__,
        1,
        "Well?",
        "well",
        measure,
        lambda ran: Judgement.of(True, "well"),
        about_s=1.0,
        limit_s=60.0,
        arguments=arguments,
    )


@pytest.fixture
def children(tmp_path: Path) -> Children:
    return Children(tmp_path, {"CARRIED": "along"})


def test_what_was_found_comes_back_with_what_was_carried(children: Children) -> None:
    ran = children.run(asked(proof_play.answer, value=1.5), 60.0)
    assert (ran.ended, ran.figures, ran.facts) == ("done", {"value": 1.5}, {"carried": "along"})


def test_an_exception_is_told_in_one_line(children: Children) -> None:
    ran = children.run(asked(proof_play.break_down), 60.0)
    assert (ran.ended, ran.how) == ("failed", "ValueError: no such thing")


def test_what_is_lacking_is_no_failure(children: Children) -> None:
    ran = children.run(asked(proof_play.lack), 60.0)
    assert (ran.ended, ran.not_measurable) == ("done", "there is no such library")


def test_a_crash_keeps_what_was_noted_before_it(children: Children) -> None:
    ran = children.run(asked(proof_play.die), 60.0)
    assert (ran.ended, ran.figures, ran.steps) == ("crashed", {"value": 1.0}, ("the deadly call",))
    assert ran.how.startswith("SIGABRT")
    assert "terminate called" in ran.how


def test_an_exit_in_silence_is_a_failure(children: Children) -> None:
    assert children.run(asked(proof_play.leave_without_a_word), 60.0).ended == "failed"


def test_a_hang_ends_at_its_limit_with_all_that_it_started(children: Children, monkeypatch: pytest.MonkeyPatch) -> None:
    def until_it_hangs(child: subprocess.Popen[bytes], limit_s: float) -> int | None:
        """The limit is over as soon as the child is where it never returns from, however slow this machine is."""
        assert isinstance(child.args, tuple)
        notes = Path(child.args[5])
        while not (notes.exists() and "never returns" in notes.read_text()):
            assert wait_for(child, 0.05) is None
        return wait_for(child, 0.05)

    monkeypatch.setattr("tests.gpu.proof.children.wait_for", until_it_hangs)
    ran = children.run(asked(proof_play.never_return), 60.0)
    assert (ran.ended, ran.steps) == ("hung", ("the call that never returns",))
    assert not is_running(int(ran.figures["helper"]))


def test_the_command_goes_on_after_a_crash_and_the_next_call_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = (asked(proof_play.die), asked(proof_play.lack), asked(proof_play.answer, value=2))
    monkeypatch.setattr(parts, "EXPERIMENTS", rows)
    real = Children.run

    def run(self: Children, experiment: Experiment, limit_s: float) -> Ran:
        return Ran("done", facts={"gpu": "A GPU"}) if experiment is parts.IDENTIFY else real(self, experiment, limit_s)

    monkeypatch.setattr(Children, "run", run)
    assert main(["--out", str(tmp_path)]) == 1
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("otherwise               die: crashed: SIGABRT")
    assert said[1] == "not measurable here     lack: there is no such library"
    assert said[2] == "as expected             answer: well"
    assert [one.experiment for one in open_book(tmp_path, "A GPU").outcomes] == ["die", "lack", "answer"]
    assert "crashed: SIGABRT" in (tmp_path / "gpu-proof.md").read_text()
    # Only what could not be asked is asked again.
    assert main(["--out", str(tmp_path), "--part", "1"]) == 0
    assert capsys.readouterr().out.splitlines() == ["not measurable here     lack: there is no such library"]
    assert main(["--out", str(tmp_path), "--only", "answer"]) == 0
    assert "answered before" in capsys.readouterr().out


FAKE_GPU = """
import convoy.app.engines.cuda.driver as driver
import tests.gpu.proof.experiments.cudart as cudart
from tests.support.fake_asked import Asked
from tests.support.fake_cuda import FakeGpu

fake = Asked(FakeGpu("Fake H200"))
cudart.load_module = driver.load_runtime = lambda: fake
"""


@pytest.mark.slow
def test_a_part_from_the_command_line_on_a_gpu_that_is_not_there(tmp_path: Path) -> None:
    """Every process is real, and finds a fake driver."""
    (tmp_path / "sitecustomize.py").write_text(FAKE_GPU)
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}

    def proof(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "tests.gpu.proof", "--out", str(tmp_path / "out"), *arguments]
        return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200)

    first = proof("--part", "0")
    assert first.returncode == 0, first.stderr
    assert "as expected             machine: Fake H200" in first.stdout
    # This onnxruntime is the one for CPUs.
    assert "not measurable here     provider-loads: " in first.stdout
    second = proof("--only", "bus-id")
    # The fake gives what older bindings give, a buffer that does not end with the id, and the experiment says so.
    assert second.stdout.startswith("otherwise               bus-id: bus id b'0000:00:00.0\\x00"), second.stderr
    # No time at all: everything is left, nothing is lost.
    third = proof("--part", "1", "--budget-s", "3")
    assert third.stdout.startswith("left for the next call: gpu-tests, capture-and-device-wait, ")
    book = open_book(tmp_path / "out", "Fake H200")
    assert [one.experiment for one in book.outcomes] == [
        *("machine", "provider-loads", "provider-architectures"),
        "bus-id",
    ]
    page = (tmp_path / "out" / "gpu-proof.md").read_text()
    assert "## Fake H200" in page
    assert "Not run: gpu-tests, " in page
