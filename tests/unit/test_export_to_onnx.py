"""The parent's side of the torch child, with small scripts in the child's place."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from export_fixtures import options

from convoy.export.plan import make_plan
from convoy.export.sources import to_onnx, torch_process
from convoy.models.errors import JobError
from convoy.models.weights.reading import misfit

SAMPLES = np.zeros((2, 8, 8, 3), np.uint8)


def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str):
    """Run the export with `script` as the child; `folder` is the folder of the exchange there."""
    monkeypatch.setattr(
        torch_process, "_CHILD", ("-c", f"import os, sys, pathlib\nfolder = pathlib.Path(sys.argv[1])\n{script}")
    )
    exchange = tmp_path / "exchange"
    exchange.mkdir()
    return to_onnx.to_onnx(make_plan(options(tmp_path)), {"images": SAMPLES}, exchange)


def test_the_childs_refusal_becomes_ours(tmp_path, monkeypatch):
    outcome = '{"error": "no luck", "outputs": [], "torch_version": ""}'
    with pytest.raises(JobError, match=r"^no luck$"):
        run(tmp_path, monkeypatch, f"(folder / 'outcome.json').write_text('''{outcome}''')")


def test_a_child_killed_for_memory_is_said_to_be(tmp_path, monkeypatch):
    with pytest.raises(JobError, match="killed, most likely for want of memory"):
        run(tmp_path, monkeypatch, "os.kill(os.getpid(), 9)")


def test_a_child_that_dies_leaves_its_last_words(tmp_path, monkeypatch, capfd):
    with pytest.raises(JobError, match="died with exit code 3: last words"):
        run(tmp_path, monkeypatch, "print('first')\nprint('last words', flush=True)\nos._exit(3)")
    assert capfd.readouterr() == ("", "")


def test_an_interrupt_ends_the_child(tmp_path, monkeypatch):
    interrupt = "(folder / 'pid').write_text(str(os.getpid()))\nos.kill(os.getppid(), 2)\nimport signal; signal.pause()"
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, monkeypatch, interrupt)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "exchange" / "pid").read_text()), 0)


def test_the_child_gets_its_end_of_our_pipe(tmp_path, monkeypatch):
    script = "import stat\nassert not stat.S_ISFIFO(os.fstat(0).st_mode), 'it is a pipe'"
    with pytest.raises(JobError, match="it is a pipe"):
        run(tmp_path, monkeypatch, script)


def test_weights_that_do_not_fit_are_listed():
    expected = {"conv.weight": (16, 3, 3, 3), "conv.bias": (16,), "fc.bias": (10,)}
    assert misfit(expected, expected) is None
    assert misfit({"conv.weight": (16, 1, 3, 3), "head.bias": (10,), "fc.bias": (10,)}, expected) == (
        "missing conv.bias; unknown head.bias; conv.weight is [16, 1, 3, 3] instead of [16, 3, 3, 3]"
    )
    many = {f"layer{index}": (1,) for index in range(9)}
    assert misfit({}, many) == "missing layer0, layer1, layer2, layer3, layer4 and 4 more"
