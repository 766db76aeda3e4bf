"""The command as a shell sees it: versions, help, completion, and where errors go."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import convoy.command as convoy
from convoy.app.version import VERSION
from tests.support.onnx_models import lookup
from tests.support.servers import check_ended, run_convoy


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return run_convoy(*arguments, env={"COLUMNS": "80", **variables})


def test_the_version_comes_with_those_of_what_computes() -> None:
    done = run("--version")
    assert done.returncode == 0
    assert re.fullmatch(rf"convoy {re.escape(VERSION)} \(Python 3[.\d]+, onnxruntime\S* [.\d]+.*\)\n", done.stdout)


def test_the_version_loads_no_library_of_the_work() -> None:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "convoy", "--version"], capture_output=True, text=True, check=True
    )
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "convoy.app.version" in imported
    assert not imported & {"numpy", "torch", "onnxruntime", "fastapi", "convoy.app.config.settings"}


@pytest.mark.parametrize(
    ("shell", "words"), [("bash", "complete -o default -F"), ("zsh", "#compdef convoy"), ("fish", "complete --command")]
)
def test_a_shell_is_given_its_script(shell: str, words: str) -> None:
    check_ended(run("--show-completion", shell), 0, words, "_CONVOY_COMPLETE")


@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("convoy lo", ["loadtest"]),
        ("convoy loadtest --arr", ["--arrivals"]),
        ("convoy loadtest --arrivals p", ["poisson"]),
        ("convoy loadtest comp", ["compare"]),
        ("convoy serve --log-l", ["--log-level"]),
        ("convoy serve --log-level w", ["warning"]),
        ("convoy export --front ", ["uint8", "none"]),
        ("convoy config sh", ["show"]),
        ("convoy config show --log-l", ["--log-level"]),
    ],
)
def test_a_shell_is_told_how_a_word_may_go_on(typed: str, completed: list[str]) -> None:
    at = len(typed.split(" ")) - 1
    done = run(_CONVOY_COMPLETE="complete_bash", COMP_WORDS=typed, COMP_CWORD=str(at))
    assert done.stdout.split() == completed


def test_a_shell_is_told_every_command() -> None:
    done = run(_CONVOY_COMPLETE="complete_bash", COMP_WORDS="convoy ", COMP_CWORD="1")
    assert {"train", "export", "serve", "config", "loadtest", "predict"} < set(done.stdout.split())


def leaves(command: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    if words and command.params:
        yield words, command
    for name, inner in getattr(command, "commands", {}).items():
        yield from leaves(inner, (*words, name))


COMMANDS = dict(leaves(convoy._command([])))


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_help_breaks_no_name_at_80_columns(words: tuple[str, ...]) -> None:
    done = run(*words, "--help-all")
    assert done.returncode == 0
    assert max(map(len, done.stdout.splitlines())) <= 80
    said = set(re.split(r"[\s;\]]+", done.stdout))
    for parameter in COMMANDS[words].params:
        if parameter.param_type_name == "option":
            assert set(parameter.opts) <= said
            usual = f"CONVOY_{parameter.opts[0].removeprefix('--').replace('-', '_').upper()}"
            assert parameter.envvar in {None, usual, *said}
            assert parameter.envvar is None or "CONVOY_SOME_OPTION," in said


def test_help_shows_what_can_be_chosen() -> None:
    assert "--arrivals [poisson|constant|bursts]" in run("loadtest", "--help-all").stdout
    assert "--log-level [debug|info|warning|error]" in run("serve", "--help-all").stdout
    assert "--optimizer [adamw|sgd]" in run("train", "--help-all").stdout


@pytest.mark.parametrize("command", ["export", "serve", "train", "loadtest"])
def test_help_fits_one_screen_and_says_how_to_see_the_rest(command: str) -> None:
    shown = run(command, "--help").stdout
    assert len(shown.splitlines()) <= 30
    assert f"Example: convoy {command} " in shown
    assert "Basics:" in shown
    count = re.search(rf"`convoy {command} --help-all` shows all (\d+) options", shown)
    assert count is not None
    assert len(re.findall(r"^  --", run(command, "--help-all").stdout, re.MULTILINE)) == int(count[1])


def test_help_names_no_default_that_is_empty() -> None:
    shown = " ".join(run("serve", "--help-all").stdout.split())
    assert "(default: )" not in shown
    assert "(default: 8000)" in shown


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ("nonsense", 2, "No such command 'nonsense'"),
        ("loadtest --nope", 2, "see `convoy loadtest --help`"),
        ("loadtest --concurrency many", 2, "--concurrency"),
        ("loadtest --arrivals weekly", 2, "must be poisson, constant or bursts"),
        ("loadtest --url http://127.0.0.1:9", 1, "start the server with `convoy serve`"),
        ("loadtest --rate 5 compare a.json b.json", 2, "--rate before compare has no effect"),
        ("loadtest compare nowhere.json b.json", 2, "nowhere.json"),
        ("loadtest --processes many", 2, "--processes"),
        ("loadtest --steps 1,two", 2, "--steps"),
        ("loadtest --find-capacity", 2, "--find-capacity"),
        ("loadtest --rate 1 --steps 2,3", 2, "--steps"),
        ("predict digits", 2, "Missing argument 'images"),
        ("inspect --store nowhere", 2, "nowhere"),
        ("serve --log-level loud", 2, "--log-level"),
        ("serve --store nowhere --port 0", 2, "nowhere"),
        ("config show --engine steam", 2, "--engine"),
        ("train digits --out here.txt", 2, "safetensors"),
        ("train digits --out here.safetensors --device tpu", 2, "--device tpu"),
        (
            "train digits --out here.safetensors --compare cpu:int8",
            2,
            "fp32|bf16|fp16, contiguous|channels_last, eager|",
        ),
        ("train digits --out here.safetensors --compare cpu,,cuda", 2, "use cpu or cuda, and after colons fp32|"),
        ("export zoo:nope", 2, "the zoo has no network"),
        ("build nothing --store nowhere", 2, "nowhere"),
        ("batch digits nowhere.png --out out", 2, "nowhere.png"),
    ],
)
def test_what_goes_wrong_is_one_line_on_stderr(arguments: str, code: int, words: str, tmp_path: Any) -> None:
    done = run(*arguments.replace("--out out", f"--out {tmp_path}/out").split())
    assert (done.returncode, done.stdout) == (code, "")
    assert words in done.stderr
    assert done.stderr.startswith("convoy: ")
    assert done.stderr.count("\n") == 1


def test_what_onnx_runtime_logs_is_shown_only_with_verbose(tmp_path: Path) -> None:
    call = "export", str(lookup(tmp_path / "lookup.onnx")), "--store", str(tmp_path / "store")
    usual, verbose = run(*call), run(*call, "--verbose")
    assert (usual.returncode, verbose.returncode) == (0, 0)
    assert "onnxruntime:" not in usual.stderr + usual.stdout  # it does not run on numbers beyond the table
    assert "E:onnxruntime:" in verbose.stderr
