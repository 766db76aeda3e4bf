"""What becomes of a `config.pbtxt`: every field of ModelConfig is honoured, harmless, or refused with a reason."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from convoy.app.loading.bare_model import BareModel, read_bare_model
from convoy.app.loading.config_fields import FIELDS, ROWS
from convoy.app.loading.triton_config import read_configuration
from convoy.models.errors import BundleError
from convoy.models.store import Store
from tests.support import onnx_models
from tests.support.stores import ROOT, StoreFolder

TENSORS = """
input [ { name: "INPUT0" data_type: TYPE_INT32 dims: [ 16 ] }, { name: "INPUT1" data_type: TYPE_INT32 dims: [ 16 ] } ]
output [ { name: "OUTPUT0" data_type: TYPE_INT32 dims: 16 }, { name: "OUTPUT1" data_type: TYPE_INT32 dims: 16 } ]
"""
PLAIN = f'name: "simple" platform: "onnxruntime_onnx" max_batch_size: 4 {TENSORS}'


@pytest.fixture
def store(tmp_path: Path) -> StoreFolder:
    folder = StoreFolder(tmp_path / "store")
    folder.add_add_sub()
    return folder


def read(store: StoreFolder, config: str, version: int = 1) -> BareModel:
    (store.root / "simple" / "config.pbtxt").write_text(config)
    return read_bare_model(Store.at(store.root).version("simple", version), threads=1)


def refusal(store: StoreFolder, config: str) -> str:
    with pytest.raises(BundleError) as refused:
        read(store, config)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def all_fields(descriptor: Any, inside: str = "") -> Iterator[tuple[str, Any]]:
    for field in descriptor.fields:
        path, message = f"{inside}{field.name}", field.message_type
        yield path, field
        if message is not None and message.GetOptions().map_entry:
            message = message.fields_by_name["value"].message_type
        if message is not None:
            yield from all_fields(message, f"{path}.")


def shown(paths: tuple[str, ...]) -> str:
    """A message by its name and `.*` where all that is in it is here, too, and else each field."""
    inside = {path for path in paths if any(path.startswith(f"{other}.") for other in paths)}
    outside = [path for path in paths if path not in inside]
    return ", ".join(
        f"`{path}.*`" if any(one.startswith(f"{path}.") for one in inside) else f"`{path}`" for path in outside
    )


def test_every_field_of_the_protobuf_is_in_the_table_and_the_table_in_the_documentation() -> None:
    paths = [path for path, _ in all_fields(model_config_pb2.ModelConfig.DESCRIPTOR)]
    assert set(paths) == FIELDS.keys()
    assert sum(len(row.paths) for row in ROWS) == len(FIELDS), "no field is there twice"
    page = (ROOT / "docs" / "bundles.md").read_text()
    rows = [f"| {shown(row.paths)} | {row.why} |" for row in ROWS if row.use == "honoured"]
    assert "\n".join(["| honoured | notes |", "|---|---|", *rows]) in page
    for use in ("harmless", "refused"):
        named = ", ".join(shown(row.paths) for row in ROWS if row.use == use)
        assert f"**{use.title()}**: {named}" in " ".join(page.split())


def set_somehow(message: Any, path: str) -> Any:
    """A message with this field set to something that is not its default, and what has to be there for that."""
    name, _, rest = path.partition(".")
    field = message.DESCRIPTOR.fields_by_name[name]
    kind = field.message_type
    if kind is not None and kind.GetOptions().map_entry:
        key = "k" if kind.fields_by_name["key"].type == field.TYPE_STRING else 1
        if kind.fields_by_name["value"].message_type is None:
            getattr(message, name)[key] = "v"
        else:
            inner = getattr(message, name)[key]
            set_somehow(inner, rest) if rest else inner.SetInParent()
        return message
    if kind is not None:
        inner = getattr(message, name).add() if field.is_repeated else getattr(message, name)
        set_somehow(inner, rest) if rest else inner.SetInParent()
        return message
    value = {field.TYPE_STRING: "x", field.TYPE_BOOL: True, field.TYPE_ENUM: 1}.get(field.type, 1)
    if field.is_repeated:
        getattr(message, name).append(value)
    else:
        setattr(message, name, value)
    return message


@pytest.mark.parametrize("use", ["harmless", "refused"])
def test_what_is_not_honoured_is_refused_by_its_name_or_said_in_the_debug_log(
    use: str, store: StoreFolder, caplog: pytest.LogCaptureFixture
) -> None:
    stored = Store.at(store.root).version("simple", 1)
    for path, row in FIELDS.items():
        if row.use != use:
            continue
        config = text_format.MessageToString(set_somehow(model_config_pb2.ModelConfig(), path))
        (store.root / "simple" / "config.pbtxt").write_text(config)
        caplog.clear()
        with caplog.at_level(logging.DEBUG, "convoy"):
            found = read_configuration(stored)
        outermost = next(one for one in _ways_to(path) if FIELDS[one].use == use)
        told = " ".join(found.mistakes) if use == "refused" else caplog.text
        assert f"{outermost}:" in told or f"{outermost} has no effect" in told, (path, found.mistakes)
        own = [one for one in found.mistakes if "has no name" not in one]
        assert use == "refused" or own == [], (path, found.mistakes)


def _ways_to(path: str) -> list[str]:
    parts = path.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts) + 1)]


def test_a_newer_protobufs_field_is_refused_until_somebody_has_looked_at_it(
    store: StoreFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(FIELDS, "metric_tags")
    assert "metric_tags: Convoy does not know" in refusal(store, PLAIN + 'metric_tags { key: "a" value: "b" }')


def test_defaults_that_are_written_out_are_no_mistake(store: StoreFolder) -> None:
    said = 'model_transaction_policy { decoupled: false } backend: "onnxruntime" default_model_filename: "model.onnx" '
    said += 'response_cache { enable: true } parameters { key: "intra_op_thread_count" value { string_value: "2" } }'
    assert read(store, PLAIN + said).spec.max_batch_size == 4
    reshaped = PLAIN.replace("dims: [ 16 ]", "dims: [ 16 ] reshape { shape: [ 16 ] }")
    assert read(store, reshaped).spec.inputs[0].shape == (16,)
    assert read(store, "max_batch_size: 4").spec.max_batch_size == 4


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (PLAIN.replace('"simple"', '"other"'), ["name is 'other'", "'simple'"]),
        (PLAIN.replace("onnxruntime_onnx", "tensorflow_savedmodel"), ["tensorflow_savedmodel", "tf2onnx"]),
        (PLAIN.replace('platform: "onnxruntime_onnx"', 'backend: "python"'), ["'python'", "does not run model code"]),
        ('platform: "ensemble" ensemble_scheduling { step { model_name: "a" } }', ["ensemble", "onnx.compose"]),
        ("ensemble_scheduling { step { model_name: 'a' } }", ["ensemble_scheduling", "onnx.compose"]),
        (PLAIN.replace("TYPE_INT32", "TYPE_FP32", 1), ["INPUT0", "FP32 in config.pbtxt but INT32 in the graph"]),
        (PLAIN.replace("INPUT1", "INPUT9"), ["'INPUT9' is not in the graph", "INPUT0, INPUT1"]),
        (PLAIN.replace("OUTPUT1", "OUTPUT0"), ["'OUTPUT0' is listed 2 times"]),
        (PLAIN.replace("[ 16 ]", "[ 17 ]", 1), ["dims [17], but the graph has [16]"]),
        (PLAIN.replace("[ 16 ]", "[ 0 ]", 1), ["dims [0]"]),
        (PLAIN.replace("max_batch_size: 4", "max_batch_size: -4"), ["max_batch_size is -4"]),
        (PLAIN + "version_policy { specific {} }", ["version_policy", "[]"]),
        (PLAIN + 'default_model_filename: "../2/model.onnx"', ["default_model_filename", "not the name of a file"]),
        (PLAIN + 'default_model_filename: "weights.onnx"', ["weights.onnx: no such file; found model.onnx"]),
        (
            PLAIN + 'cc_model_filenames { key: "7.5" value: "model.onnx" }',
            ["cc_model_filenames", "default_model_filename"],
        ),
        (PLAIN + 'parameters { key: "convoy_fast" value { string_value: "true" } }', ["'convoy_fast'"]),
        (PLAIN + 'parameters { key: "convoy_rows_are_independent" value { string_value: "yes" } }', ["'yes'"]),
        (PLAIN + 'model_repository_agents { agents { name: "unpack" } }', ["'unpack'", "checksum"]),
        (PLAIN + "\nmax_batchsize: 3", ["line 5", "max_batchsize", "did you mean max_batch_size?"]),
        (PLAIN + "\n\ninput { name: 'a' datatype: TYPE_FP32 }", ["line 6", "'datatype'", "data_type"]),
        (PLAIN.replace("TYPE_INT32", "TYPE_FLOAT", 1), ["line 2", "TYPE_FLOAT"]),
        (PLAIN + "\ninput {", ["line 5"]),
        (PLAIN + "\nfoo: [", ["line 5", "'foo'"]),
        ("input " + "{" * 100_000, ["config.pbtxt"]),
        ("\ufeff" + PLAIN.replace("TYPE_INT32", "TYPE_FP32", 1), ["INPUT0", "FP32 in config.pbtxt"]),
        (PLAIN.replace("\n", "\r\n") + "\r\nfoo: 1", ["line 5", "'foo'"]),
        (PLAIN.replace("onnxruntime_onnx", "onnx"), ["platform is 'onnx'", "(onnxruntime_onnx); use that"]),
    ],
)
def test_a_mistake_is_refused_with_what_would_be_right(config: str, words: list[str], store: StoreFolder) -> None:
    told = refusal(store, config)
    for word in ("config.pbtxt", *words):
        assert word in told, told
    assert len(told) < 1000, "never the file itself"


def test_all_mistakes_of_a_file_are_told_at_once(store: StoreFolder) -> None:
    wrong = PLAIN.replace('"simple"', '"other"').replace("TYPE_INT32", "TYPE_FP32", 1).replace("OUTPUT1", "OUTPUT7")
    told = refusal(
        store,
        wrong
        + "\nversion_policy { specific {} }\nmodel_operations {}\nmaxBatch: 3\nlabels: 'a' "
        + "dynamic_batching { priority_levels: 3 default_priority_level: 7 }",
    )
    for word in (
        "'other'",
        "FP32 in config.pbtxt",
        "'OUTPUT7'",
        "version_policy",
        "model_operations",
        "'maxBatch'",
        "'labels'",
    ):
        assert word in told, told
    assert "from 1 to the number of levels, 3; got 7" in told
    assert "8 mistakes: (1) " in told, told
    absent = refusal(store, 'name: "other" default_model_filename: "a.onnx"')
    assert "name is 'other'" in absent
    assert "a.onnx: no such file" in absent


def test_the_file_that_is_named_answers_and_no_other(store: StoreFolder) -> None:
    onnx_models.mean(store.root / "simple" / "1" / "weights.onnx")
    model = read(store, 'default_model_filename: "weights.onnx"')
    assert (model.path.name, model.spec.inputs[0].name) == ("weights.onnx", "x")
    (store.root / "simple" / "1" / "model.onnx").unlink()
    assert not Store.at(store.root).version("simple", 1).is_bundle
    assert read(store, 'default_model_filename: "weights.onnx"').spec.inputs[0].name == "x"


def test_each_output_has_its_own_labels(store: StoreFolder) -> None:
    (store.root / "simple" / "second.txt").write_text("a\nb\n")
    second = PLAIN.replace('"OUTPUT1"', '"OUTPUT1" label_filename: "second.txt"')
    spec = read(store, second).spec
    assert (spec.labels_of(0), spec.labels_of(1)) == ((), ("a", "b"))
    (store.root / "simple" / "first.txt").write_text("c\n")
    spec = read(store, second.replace('"OUTPUT0"', '"OUTPUT0" label_filename: "first.txt"')).spec
    assert (spec.labels, spec.labels_of(1)) == (("c",), ("a", "b"))
    assert "nowhere.txt" in refusal(store, second.replace("second.txt", "nowhere.txt"))
    assert "is outside" in refusal(store, second.replace("second.txt", "../digits.txt"))


def test_checksums_are_held_to_the_files_of_the_version_that_is_loaded(store: StoreFolder) -> None:
    store.add_add_sub(2)
    files = {name: (store.root / "simple" / name).read_bytes() for name in ("1/model.onnx", "2/model.onnx")}
    right = {name: hashlib.md5(data, usedforsecurity=False).hexdigest() for name, data in files.items()}

    def agent(digests: dict[str, str]) -> str:
        pairs = "".join(f'parameters {{ key: "{key}" value: "{digest}" }}' for key, digest in digests.items())
        return PLAIN + f'model_repository_agents {{ agents [ {{ name: "checksum" {pairs} }} ] }}'

    sound = {f"MD5:{name}": digest.upper() for name, digest in right.items()}
    assert read(store, agent(sound)).spec.max_batch_size == 4
    wrong = agent(sound | {"MD5:2/model.onnx": "0" * 32})
    assert read(store, wrong).spec.max_batch_size == 4
    with pytest.raises(BundleError, match=r"checksum of '2/model.onnx': its MD5 is"):
        read(store, wrong, version=2)
    assert "cannot read" in refusal(store, agent({"MD5:labels.txt": "0" * 32}))
    assert "is outside" in refusal(store, agent({"MD5:../x": "0" * 32}))
    assert "only MD5:FILE" in refusal(store, agent({"SHA256:1/model.onnx": "0" * 64}))
