"""The command line: one variable of the environment is one option, whichever command reads it."""

from __future__ import annotations

import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

import convoy.command as convoy
import convoy.export.options as export_options
from convoy.app.batch import command as batch_command
from convoy.app.batch.job import BatchOptions
from convoy.export.plan import MethodChoice
from convoy.export.sources.preprocess import parse_front
from convoy.models import checkout
from convoy.models.spec import Activation, Interpolation

# Options that are the same thing to every command that has them.
SHARED = {"CONVOY_STORE", "CONVOY_URL", "CONVOY_API_KEY_FILE", "CONVOY_PLAN_CACHE", "CONVOY_DATA_ROOT"}
SHARED |= {
    "CONVOY_ENGINE",
    "CONVOY_MAX_PIXELS",
    "CONVOY_PRECISION",
    "CONVOY_PRECISIONS",
    "CONVOY_THRESHOLD",
    "CONVOY_TOP_K",
}
SHARED |= {"CONVOY_CA_FILE", "CONVOY_CLIENT_CERT_FILE", "CONVOY_CLIENT_KEY_FILE"}


@pytest.fixture(scope="module")
def readers() -> dict[str, set[str]]:
    """Variable -> the commands that read it."""
    found: dict[str, set[str]] = defaultdict(set)
    command: Any = convoy._command([])  # with every subcommand, as `convoy --help` has it
    for name, subcommand in command.commands.items():
        for parameter in subcommand.params:
            if parameter.envvar:
                found[parameter.envvar].add(name)
    return found


def test_no_variable_is_read_differently_by_two_commands(readers: dict[str, set[str]]) -> None:
    assert {variable for variable, commands in readers.items() if len(commands) > 1} <= SHARED


def test_only_variables_that_nobody_reads_are_unknown(readers: dict[str, set[str]]) -> None:
    known = dict.fromkeys([*readers, "CONVOY_MODELS", "CONVOY_KEYS", "convoy_max_queue"], "1")
    of_kubernetes = {"CONVOY_SERVICE_HOST": "10.0.0.1", "CONVOY_SERVICE_PORT_HTTP": "80"}
    of_kubernetes |= {"CONVOY_CANARY_PORT": "tcp://10.0.0.1:80", "CONVOY_PORT_80_TCP_ADDR": "10.0.0.1"}
    assert convoy._unknown_variables({**known, **of_kubernetes, "PATH": "/bin", "_CONVOY_COMPLETE": "bash"}) == []
    wrong = {"CONVOY_MAX_QEUE": "3", "CONVOY_COMPLETELY_ELSE": "x"}
    told = ["CONVOY_COMPLETELY_ELSE", "CONVOY_MAX_QEUE (did you mean CONVOY_MAX_QUEUE?)"]
    assert convoy._unknown_variables({**known, **wrong}) == told


def test_what_means_something_else_has_the_commands_name(readers: dict[str, set[str]]) -> None:
    assert readers["CONVOY_MAX_BATCH"] == {"serve"}
    assert readers["CONVOY_EXPORT_MAX_BATCH"] == {"export"}
    assert readers["CONVOY_TRAIN_PRECISION"] == {"train"}
    assert "train" not in readers["CONVOY_PRECISION"]
    assert readers["CONVOY_DOCTOR_JSON"] == {"doctor"}
    assert readers["CONVOY_LOADTEST_JSON"] == {"loadtest"}
    assert "CONVOY_JSON" not in readers


@pytest.mark.parametrize(
    ("is_checkout", "told"),
    [(True, ".venv/bin/pip install -e '.[gpu]'"), (False, "pip install 'convoy-serve[gpu]'")],
)
def test_a_hint_to_install_fits_a_checkout_and_a_package(
    monkeypatch: pytest.MonkeyPatch, is_checkout: bool, told: str
) -> None:
    monkeypatch.setattr(checkout, "CHECKOUT", Path("/src/convoy") if is_checkout else None)
    assert checkout.pip_install("gpu") == told


def test_every_option_has_a_twin(readers: dict[str, set[str]]) -> None:
    command: Any = convoy._command([])
    options = [
        parameter
        for subcommand in command.commands.values()
        for parameter in subcommand.params
        if parameter.param_type_name == "option" and parameter.name != "help"
    ]
    assert len(options) > 60
    assert all(option.envvar for option in options)


@pytest.mark.parametrize("command", ["train", "export", "build", "loadtest"])
def test_who_asks_for_help_waits_for_no_library_of_the_work(command: str) -> None:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "convoy", command, "--help"],
        capture_output=True,
        text=True,
        check=True,
    )
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "typer" in imported
    assert not imported & {"numpy", "torch", "onnx", "fastapi", "convoy.app"}


@pytest.mark.parametrize(
    ("given", "ray"),
    [
        (["--out", "o", "--ray"], "auto"),
        (["--ray", "--out", "o"], "auto"),
        (["--out", "o", "--ray", "10.0.0.1:6379"], "10.0.0.1:6379"),
        (["--ray", "local", "--out", "o"], "local"),
        (["--out", "o"], None),
    ],
)
def test_a_cluster_is_looked_for_where_batch_is_given_no_address(
    monkeypatch: pytest.MonkeyPatch, given: list[str], ray: str | None
) -> None:
    heard: list[BatchOptions] = []
    monkeypatch.setattr(batch_command, "run", lambda options, _: heard.append(options) or 0)
    with pytest.raises(SystemExit):
        convoy.main(["batch", "digits", "photos/", *given])
    assert [(one.ray, one.inputs, one.out) for one in heard] == [(ray, ["photos/"], Path("o"))]


def test_the_words_that_help_shows_are_those_that_export_takes() -> None:
    hints = get_type_hints(export_options.ExportOptions, include_extras=True)

    def shown(field: str) -> tuple[str, ...]:
        words: tuple[str, ...] = hints[field].__metadata__[0].words
        return words

    assert shown("interpolation") == get_args(Interpolation)
    assert shown("calibration_method") == get_args(MethodChoice)
    assert shown("activation") == ("auto", *get_args(Activation))
    assert [parse_front(word) for word in shown("front")] == ["uint8_nhwc", "float32_nchw"]
