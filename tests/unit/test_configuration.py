"""The file of `--config`, the environment and the command line: which wins, what is refused, and what is told of it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import jsonschema
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from convoy.app.commands.config import schema, show
from convoy.app.config.settings import ModelSettings, Settings, read_settings
from convoy.app.core import Core
from convoy.models.errors import UsageError
from tests.support import option_reference
from tests.support.stores import ROOT

DOCS = ROOT / "docs"
Written = Callable[[Any], Path]


def example() -> str:
    """The file in the page."""
    text = (DOCS / "configuration.md").read_text().partition("$schema=")[2].partition("\n")[2]
    return text.partition("```")[0]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    path = tmp_path_factory.mktemp("config") / "convoy.yaml"

    def write(document: Any) -> Path:
        path.write_text(document if isinstance(document, str) else yaml.safe_dump(document))
        return path

    return write


def read(path: Path, **command_line: Any) -> Settings:
    return read_settings({"config": path, **command_line})


# Of each kind of value one option, and as the three places may have it.
VALUES = {
    "port": st.integers(0, 65535),
    "max_queue": st.integers(1, 9),
    "default_timeout_ms": st.integers(0, 9).map(float),
    "log_level": st.sampled_from(["debug", "info", "warning", "error"]),
    "allow_shared_memory": st.booleans(),
    "server_name": st.sampled_from(["triton", "0", "off"]),
    "version_policy": st.sampled_from(["latest", "all", "1,3", "7"]),
}
SAID = st.fixed_dictionaries({}, optional=VALUES)
OF_MODELS = st.dictionaries(
    st.sampled_from(["a", "b"]),
    st.fixed_dictionaries({}, optional={"max_batch": st.integers(1, 9), "max_queue": st.integers(1, 9)}),
)


@given(SAID, SAID, SAID, OF_MODELS, OF_MODELS)
def test_the_command_line_wins_over_the_environment_and_that_over_the_file(
    written: Written,
    command_line: dict[str, Any],
    environment: dict[str, Any],
    file: dict[str, Any],
    models_there: dict[str, Any],
    models_here: dict[str, Any],
) -> None:
    path = written({**file, "models": models_here})
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(f"CONVOY_{name.upper()}", str(value))
        patch.setenv("CONVOY_MODELS", json.dumps(models_there))
        settings = read(path, **command_line)
    for name in VALUES:
        places = [
            ("command line", command_line),
            (f"environment CONVOY_{name.upper()}", environment),
            (f"file {path}", file),
            ("default", {name: Settings.model_fields[name].default}),
        ]
        whence, said = next((whence, said) for whence, said in places if name in said)
        assert (settings.sources.source_of(name), getattr(settings, name)) == (whence, said[name])
    assert settings.models.keys() == models_there.keys() | models_here.keys()
    for model, own in settings.models.items():
        expected = {**models_here.get(model, {}), **models_there.get(model, {})}
        assert own.model_dump(exclude_unset=True) == expected
        for option in expected:
            is_there = option in models_there.get(model, {})
            of = "environment CONVOY_MODELS" if is_there else f"file {path}"
            assert settings.sources.source_of("models", model, option) == of


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("prot: 1", "prot: unknown option; did you mean port?"),
        ("max-queue: 1", "max-queue: unknown option; did you mean max_queue?"),
        ("config: other.yaml", "config: a file cannot name another file"),
        ("port: abc", "port: Input should be a valid integer.*HTTP port"),
        ("access_log: nothing", "access_log: Input should be 'all', 'errors' or 'off'"),
        ("port: 1\nhost: ::1\nport: 2", "port is set in line 1 and again in line 3"),
        ("models: {a: {max_quue: 1}}", "models.a.max_quue: unknown option; did you mean max_queue?"),
        ("models: {a: {max_batch: 0}}", "models.a.max_batch: .*greater than or equal to 1.*Largest batch"),
        ("models: {a: {priority_levels: 2, default_priority: 3}}", "models.a: default_priority must be from 1 to"),
        ("models: {a: 3}", "models.a: must be a mapping of names to values"),
        ("models: {../a: {}}", "models: .*cannot be a model's name"),
        ("max_inflight_mb: 1", "max_inflight_mb must be at least max_body_mb"),
        ("cors_origins: a.example", "cors_origins must be origins such as https://a.example"),
        ("cors_origins: https://a.example/path", "cors_origins must be origins"),
        ("keys: {admin: key}", "keys: 'admin' cannot be a key's name"),
        ("keys: {two words: key}", "keys: 'two words' cannot be a key's name"),
        ("keys: key", "keys: must be a mapping of names to values"),
        ("- port", "must be a mapping of options to values"),
        ("port: [", "is not YAML"),
        ("port: !!python/object:os.system x", "is not YAML"),
    ],
)
def test_what_is_wrong_is_told_with_the_file_the_key_and_what_to_write(written: Written, text: str, told: str) -> None:
    path = written(text)
    with pytest.raises(UsageError, match=told) as refused:
        read(path)
    assert str(path) in str(refused.value)


def test_every_mistake_of_a_file_is_told_at_once_with_its_line(written: Written) -> None:
    path = written("port: many\nmax_que: 5\nmodels:\n  a:\n    max_queue: none\n    maxbatch: 3\nlog_level: loud\n")
    with pytest.raises(UsageError) as refused:
        read(path)
    lines = str(refused.value).splitlines()
    told = ["1: port: ", "2: max_que: ", "5: models.a.max_queue: ", "6: models.a.maxbatch: ", "7: log_level: "]
    assert [line.startswith(f"{path}, line {begin}") for line, begin in zip(lines, told, strict=True)] == [True] * 5
    assert "got 'many'" in lines[0]
    assert "did you mean max_queue?" in lines[1]


def test_what_is_wrong_elsewhere_is_told_by_the_name_that_it_has_there(
    written: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written({"port": 1})
    with pytest.raises(UsageError, match="--max-queue: Input"):
        read(path, max_queue=0)
    monkeypatch.setenv("CONVOY_MODELS", '{"a": {"max_batch": 0}}')
    with pytest.raises(UsageError, match=r"CONVOY_MODELS\.a\.max_batch: Input"):
        read(path)
    monkeypatch.setenv("CONVOY_MODELS", "{")
    with pytest.raises(UsageError, match="write the value as JSON"):
        read(path)
    with pytest.raises(UsageError, match="cannot read"):
        read(Path("nowhere.yaml"))


def test_words_are_words_and_lists_are_lists(written: Written) -> None:
    explicit = "model_control: explicit\nload_model: [a, b]\n"
    settings = read(written(f"access_log: off\nmodel_name: 2\nversion_policy: [1, 3]\n{explicit}models: {{7: {{}}}}"))
    assert (settings.access_log, settings.model_name, settings.versions(), settings.load_model) == (
        "off",
        "2",
        (1, 3),
        "a,b",
    )
    assert settings.models == {"7": ModelSettings()}
    assert read(written("")).port == 8000


def test_the_reference_and_the_schema_in_docs_are_those_of_the_options() -> None:
    page = option_reference.PAGE.read_text()
    assert page == option_reference.renewed(page), "docs/configuration.md is stale; run: make reference"
    assert (DOCS / "config.schema.json").read_text() == schema(), (
        "docs/config.schema.json is stale; run: make reference"
    )
    options = {f"`{name}`" for name in Settings.model_fields} | {
        f"`models.NAME.{name}`" for name in ModelSettings.model_fields
    }
    assert [name for name in options - {"`config`"} if name not in page] == []


def test_the_example_fits_the_schema(written: Written) -> None:
    said = yaml.safe_load(example())
    read(written(example()))
    rules = json.loads(schema())
    jsonschema.Draft202012Validator.check_schema(rules)
    jsonschema.validate(said, rules)


@pytest.mark.parametrize("wrong", [{"prot": 1}, {"port": "x"}, {"models": {"a": {"max_que": 1}}}, {"engine": "gpu"}])
def test_the_schema_refuses_what_is_refused(written: Written, wrong: dict[str, Any]) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(wrong, json.loads(schema()))
    with pytest.raises(UsageError):
        read(written(wrong))


def test_what_holds_is_shown_with_its_source_and_read_again_with_the_same_command_line(
    written: Written, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CONVOY_MAX_QUEUE", "7")
    path = written({"port": 1, "models": {"a": {"max_queue": 2}}})
    settings = read(path, host="::1")
    show(settings, as_json=True)
    rows = {row.pop("option"): row for row in json.loads(capsys.readouterr().out)}
    assert rows["host"] == {"value": "::1", "source": "command line", "changes_on_sighup": False}
    assert rows["max_queue"] == {"value": 7, "source": "environment CONVOY_MAX_QUEUE", "changes_on_sighup": False}
    assert rows["models.a.max_queue"] == {"value": 2, "source": f"file {path}", "changes_on_sighup": True}
    assert rows["grpc_port"]["source"] == "default"
    written({"port": 4, "max_queue": 5})
    again = settings.read_again()
    assert (again.port, again.host, again.max_queue, again.models) == (4, "::1", 7, {})
    show(settings, as_json=False)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"file: {path}"
    assert ["port", "file", "1"] in [line.split() for line in lines]
    assert ["host", "command", "line", "::1"] in [line.split() for line in lines]
    assert ["max_queue", "environment", "7"] in [line.split() for line in lines]
    assert ["allow_shared_memory", "default", "false"] in [line.split() for line in lines]


@pytest.mark.parametrize("as_json", [False, True])
def test_credentials_in_a_url_are_masked(capsys: pytest.CaptureFixture[str], as_json: bool) -> None:
    show(read_settings({"store": "s3://me:secret@bucket/models"}), as_json)
    shown = capsys.readouterr().out
    assert "s3://***@bucket/models" in shown
    assert "secret" not in shown


def test_variables_of_a_kubernetes_service_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    address = "tcp://10.0.0.1:8000"
    monkeypatch.setenv("CONVOY_PORT", address)
    monkeypatch.setenv("CONVOY_GRPC_PORT", address)
    monkeypatch.setenv("CONVOY_PORT_8000_TCP", address)
    monkeypatch.setenv("CONVOY_SERVICE_HOST", "10.0.0.1")
    settings = read_settings({})
    assert (settings.port, settings.grpc_port) == (8000, 8001)
    assert settings.sources.source_of("port") == "default"
    names = ("CONVOY_GRPC_PORT", "CONVOY_PORT", "CONVOY_PORT_8000_TCP", "CONVOY_SERVICE_HOST")
    assert settings.sources.ignored == names


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("XDG_CACHE_HOME", "CONVOY_PLAN_CACHE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user that is a mere number, as in a container: no HOME, no line in the list of users."""
    monkeypatch.delenv("HOME", raising=False)

    def unknown(uid: int) -> object:
        raise KeyError(f"uid not found: {uid}")

    monkeypatch.setattr("pwd.getpwuid", unknown)


def test_plans_are_kept_in_the_users_cache_folder_or_where_they_should_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value, folder in (
        ("HOME", "/somewhere", "/somewhere/.cache/convoy"),
        ("XDG_CACHE_HOME", "/elsewhere", "/elsewhere/convoy"),
        ("CONVOY_PLAN_CACHE", "/cache", "/cache"),
    ):
        monkeypatch.setenv(name, value)
        assert read_settings({}).plan_folder() == Path(folder)


@pytest.mark.usefixtures("nobody")
def test_a_user_without_a_home_has_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert read_settings({}).plan_folder() == tmp_path / f"convoy-cache-{os.geteuid()}"
    with pytest.raises(UsageError, match="use an absolute path"):
        read_settings({"plan_cache": Path("~/plans")}).plan_folder()


@pytest.mark.parametrize("engine", ["cpu", "openvino"])
def test_who_asks_for_a_cpus_engine_touches_no_gpu(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def ask() -> NoReturn:
        raise AssertionError("the GPUs were asked")

    monkeypatch.setattr("convoy.app.config.settings.find_machine", ask)
    settings = read_settings({"engine": engine})
    assert not settings.core_options().load.machine.gpus


@pytest.mark.parametrize("given", ["-1", "two", "1.5", "", "65"])
def test_what_never_was_a_number_of_edge_processes_is_refused_as_before(given: str) -> None:
    with pytest.raises(UsageError, match="edges must be auto or a number"):
        read_settings({"edges": given})


def test_memory_that_cannot_be_had_is_a_wrong_call() -> None:
    with pytest.raises(UsageError, match="lower --max-inflight-mb"):
        Core(read_settings({"engine": "cpu", "max_inflight_mb": 1 << 40}).core_options())
