"""What lies in a store and is no model: it is told, with what would be right, and the same behind a URL."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from convoy.app.lifecycle.remote_store import RemoteStore
from convoy.app.lifecycle.store_watch import StoreLook, look_at_model, names_in
from convoy.models.store import Store

LONG = "n" * 129


def look(root: Path, where: str) -> StoreLook:
    store = Store.at(root, "only") if where == "here" else RemoteStore(f"file://{root}", "only", root.parent / "cache")
    names, misplaced = names_in(store)
    return StoreLook({name: look_at_model(store, name) for name in names}, misplaced)


def fill(root: Path, *files: str) -> Path:
    for file in files:
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).write_bytes(b"")
    return root


@pytest.mark.parametrize("where", ["here", "elsewhere"])
@pytest.mark.parametrize(
    ("file", "told"),
    [
        (
            "my model/1/model.onnx",
            "'my model' cannot be a model's name; rename the folder, such as my-model: up to 128",
        ),
        ("_old/1/model.onnx", "'_old' cannot be a model's name; rename the folder, such as old: up to"),
        ("\u00e9t\u00e9/1/manifest.json", "cannot be a model's name; rename the folder, such as t: up to"),
        (f"{LONG}/1/model.onnx", f"cannot be a model's name; rename the folder, such as {LONG[:128]}: up to"),
        ("my net/readme", "'my net' cannot be a model's name"),
        (
            "net/model.onnx",
            "net is not served: model.onnx is not in a version's folder; move it to .*net/1/model.onnx$",
        ),
        ("net/resnet18.onnx", "resnet18.onnx is not in a version's folder; move it to .*net/1/model.onnx$"),
        ("net/manifest.json", "a bundle must be in a version's folder; move its files to .*net/1$"),
        ("net.onnx", "net.onnx is not served: it is not in a model's folder; move it to .*/net/1/model.onnx$"),
        ("my net.onnx", "it is not in a model's folder; move it to .*/NAME/1/model.onnx$"),
        ("net/v1/model.onnx", "net/v1 is not served: a version's folder is named a number .*; rename it to 1$"),
        ("net/01/manifest.json", "net/01 is not served: .*; rename it to 1$"),
        ("net/0/model.onnx", "net/0 is not served: .* from 1 on .*; rename it$"),
        ("net/20261128093000/model.onnx", "net/20261128093000 is not served: .*up to nine digits.*; rename it$"),
        ("net/1.2/model.onnx", "net/1.2 is not served: .*; rename it$"),
        ("net/v2/saved_model.pb", "net/v2 is not served: .*; rename it to 2$"),
        ("net/notes/readme", "net is not served: it has no version; put the model into .*net/1, as manifest.json"),
        ("group/net/1/model.onnx", "group is not served: it is a folder of models; .* or serve --store .*group$"),
    ],
)
def test_what_is_no_model_is_told_once_with_what_would_be_right(
    tmp_path: Path, where: str, file: str, told: str
) -> None:
    found = look(fill(tmp_path / "store", file, "sound/1/model.onnx"), where)
    (sentence,) = found.all_misplaced()
    assert re.search(told, sentence), sentence
    assert list(found.models["sound"].versions) == [1]
    assert not any(one.versions for name, one in found.models.items() if name != "sound")


@pytest.mark.parametrize("where", ["here", "elsewhere"])
def test_what_nobody_meant_as_a_model_is_not_told(tmp_path: Path, where: str) -> None:
    root = fill(
        tmp_path / "store",
        *(
            "net/1/model.onnx",
            "net/2/model.onnx",
            "net/config.pbtxt",
            "net/assets/words.txt",
            "net/.writing-x/model.onnx",
        ),
        *("README.md", ".tmp/1/model.onnx", ".hidden.onnx", "lost+found/x", "sound/1/manifest.json"),
    )
    found = look(root, where)
    assert found.all_misplaced() == ()
    assert sorted(found.models) == ["net", "sound"]


@pytest.mark.parametrize("where", ["here", "elsewhere"])
def test_beside_versions_and_in_a_store_that_is_one_model_it_is_told_too(tmp_path: Path, where: str) -> None:
    root = fill(tmp_path / "store", "1/model.onnx", "v1/model.onnx", "02/model.onnx")
    second, first = look(root, where).all_misplaced()
    assert re.search("store/02 is not served: .*; rename it to 2$", second)
    assert re.search("store/v1 is not served: .*; rename it$", first), "1 is there"
    fill(root, "model.onnx")
    assert look(root, where).all_misplaced() == ()


def test_a_link_that_leads_nowhere_and_an_empty_folder_are_told(tmp_path: Path) -> None:
    fill(tmp_path, "sound/1/model.onnx")
    (tmp_path / "gone").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "empty").mkdir()
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "1").symlink_to(tmp_path / "elsewhere")
    told = look(tmp_path, "here").all_misplaced()
    assert [sentence.partition(" is not served")[0] for sentence in told] == [
        f"{tmp_path}/gone",
        f"{tmp_path}/empty",
        f"{tmp_path}/half/1",
    ]


def test_names_of_anybodys_stay_within_their_line(tmp_path: Path) -> None:
    fill(tmp_path, "sound/1/model.onnx", "a\nWARNING b/1/model.onnx", f"{'x ' * 120}/1/model.onnx")
    for sentence in look(tmp_path, "here").all_misplaced():
        assert "\n" not in sentence
        assert len(sentence) < 900
