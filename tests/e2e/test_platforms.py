"""Export and the client where a system has less than Linux, and what `import convoy` finds, says and offers."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.stores import DEMO, ROOT

# What Windows or macOS lack. Python runs it in each process of an export.
LESS = """
import os, sys
for name in ("fcntl", "grp", "pwd", "resource", "termios"):
    sys.modules[name] = None
for name in ("eventfd", "memfd_create", "pidfd_open", "posix_fadvise", "sched_getaffinity", "sched_setaffinity"):
    if hasattr(os, name):
        delattr(os, name)
"""
FROM_PYTHON = """
import os, sys
import torch
import convoy
import tests.support.quick_convoy

assert sys.modules["fcntl"] is None and not hasattr(os, "memfd_create")
convoy.Client("localhost").close()
torch.manual_seed(0)
layers = torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten()
net = torch.nn.Sequential(*layers, torch.nn.Linear(4, 3)).eval()
convoy.export(net, name="net", input="3x16x16", preprocess="unit", precisions="fp32", force=True, store=sys.argv[1])
"""
COMMAND = "import sys; from tests.support.quick_convoy import main; main(sys.argv[2:] + ['--store', sys.argv[1]])"
ONNX = ("export", str(DEMO / "fp32.onnx"), "--name", "net", "--precisions", "fp32")


@pytest.mark.parametrize(
    ("script", "words"),
    [pytest.param(COMMAND, ONNX, id="onnx"), pytest.param(FROM_PYTHON, (), id="torch", marks=pytest.mark.slow)],
)
def test_export_works_without_what_only_linux_has(script: str, words: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(LESS)
    run = (sys.executable, "-c", script, str(tmp_path / "store"), *words)
    env = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(run, capture_output=True, text=True, cwd=ROOT, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "store" / "net" / "1" / "fp32.onnx").is_file()


def test_a_checkout_without_links_says_so(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "convoy", tmp_path / "convoy", symlinks=True)
    for link in (tmp_path / "convoy").iterdir():
        if link.is_symlink():
            target = str(link.readlink())
            link.unlink()
            link.write_text(target)  # as git does
    for module in ("convoy", "convoy.app.version", "convoy.command"):
        run = (sys.executable, "-c", f"import {module}")
        done = subprocess.run(run, capture_output=True, text=True, cwd=tmp_path)
        assert done.returncode == 1
        assert done.stderr.splitlines()[-1].startswith("ImportError: this checkout of Convoy has no symbolic links; ")


def test_a_users_folders_win_over_the_checkouts(tmp_path: Path) -> None:
    """`make` puts a folder with a link on the path, and the user may stand in the checkout."""
    (tmp_path / "convoy").symlink_to(ROOT / "convoy")
    (tmp_path / "project" / "models").mkdir(parents=True)
    (tmp_path / "project" / "models" / "mine.py").write_text("WIDTH = 4\n")
    (tmp_path / "project" / "net.py").write_text("from models import mine\nWIDTH = mine.WIDTH\n")
    (tmp_path / "load.py").write_text(
        "import sys\nfrom pathlib import Path\nfrom convoy.export.sources.user_code import load_module\n"
        "print(load_module(Path(sys.argv[1])).WIDTH)\n"
    )
    run = (sys.executable, str(tmp_path / "load.py"), str(tmp_path / "project" / "net.py"))
    done = subprocess.run(run, capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == "4\n", done.stderr


def test_completion_offers_the_public_names() -> None:
    script = (
        "import rlcompleter, convoy\nassert dir(convoy) == sorted(convoy.__all__)\n"
        "print(*rlcompleter.Completer({'convoy': convoy}).attr_matches('convoy.'))"
    )
    done = subprocess.run((sys.executable, "-c", script), capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    offered = {one.rstrip("()") for one in done.stdout.split()}
    assert {"convoy.Client", "convoy.Engine", "convoy.export", "convoy.Prediction"} <= offered
    assert not [one for one in offered if "_" in one]
