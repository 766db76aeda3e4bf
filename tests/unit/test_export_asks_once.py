"""What an export asks for and what it finds out: missing options, names, labels from folders, the file of options."""

from __future__ import annotations

import shlex
from pathlib import Path

import numpy as np
import pytest
from export_fixtures import options
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from convoy.export.command import export_bundle
from convoy.export.config_file import as_command, as_yaml, read_options
from convoy.export.options import ExportOptions
from convoy.export.plan import make_plan
from convoy.export.sources.origin import default_name, parse_source
from convoy.export.sources.torch_job import Description
from convoy.export.sources.user_code import parse_call
from convoy.models.errors import UsageError
from tests.support.quick_exports import write_digits_checkpoint


def folders(root: Path, *classes: str) -> Path:
    for label in classes:
        (root / label).mkdir(parents=True)
        Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(root / label / "one.png")
    return root


def test_all_missing_options_are_named_at_once_with_the_command(monkeypatch):
    monkeypatch.setattr("convoy.export.sources.origin.ask", lambda inquiry: Description(why_no_image="nothing known"))
    call = ExportOptions(source="torchvision:resnet18", name="net", max_batch=0)
    with pytest.raises(UsageError) as refused:
        make_plan(call)
    lines = str(refused.value).splitlines()
    assert lines[0] == "3 mistakes:"
    for words in ("--max-batch must be from 1", "pass --weights", "pass --preprocess"):
        assert sum(words in line for line in lines[1:-1]) == 1
    command = shlex.split(lines[-1].removeprefix("for example: "))
    assert command[:3] == ["convoy", "export", "torchvision:resnet18"]
    assert command[-4:] == ["--weights", "default", "--preprocess", "imagenet"]


@pytest.mark.parametrize(
    ("call", "weights", "told"),
    [
        ("Net", None, "write 'nets.py:Net(classes=...)' with values for classes"),
        ("Net(classes=3)", None, "the weights that nets.py:Net(classes=3) gives are random; pass --weights FILE"),
        ("Net(classes=3)", "gone.pth", "there is no checkpoint at gone.pth"),
        ("trained", None, None),
    ],
)
def test_mistakes_in_a_factory_are_named_with_the_others(tmp_path, forks_torch, call, weights, told):
    (tmp_path / "nets.py").write_text(
        "import torch\n"
        "class Net(torch.nn.Linear):\n"
        "    def __init__(self, classes):\n"
        "        super().__init__(4, classes)\n"
        "def trained():\n"
        "    net = Net(3)\n"
        "    torch.nn.init.ones_(net.weight)\n"
        "    torch.nn.init.zeros_(net.bias)\n"
        "    return net\n"
    )
    given = ExportOptions(source=f"{tmp_path}/nets.py:{call}", name="net", weights=weights and Path(weights))
    with pytest.raises(UsageError) as refused:
        make_plan(given)
    text = str(refused.value)
    assert "preprocessing unknown" in text
    assert text.startswith("2 mistakes:") == (told is not None), text
    assert (told or "") in text


def test_a_wrong_source_is_refused_before_anything_else(tmp_path):
    with pytest.raises(UsageError, match="not understood; use zoo:NAME"):
        export_bundle(options(tmp_path, source="resnet50", name=""))


@pytest.mark.parametrize(
    ("file", "advice"),
    [
        ("best.pt", r"pass file.py:factory --weights best.pt.*return YOLO\('best.pt'\).*yolo export model=best.pt"),
        ("net.safetensors", r"pass file.py:factory --weights net.safetensors, where factory is a function"),
    ],
)
def test_a_checkpoint_is_no_source(file, advice):
    with pytest.raises(UsageError, match=f"is a checkpoint without its network; {advice}"):
        parse_source(file)


def test_a_checkpoint_of_the_zoo_names_its_network(tmp_path):
    file = write_digits_checkpoint(tmp_path / "net.safetensors")
    with pytest.raises(UsageError, match=f"pass zoo:simple_cnn --weights {file}"):
        parse_source(str(file))


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("torchvision:resnet18", "resnet18"),
        ("zoo:simple_cnn", "simple_cnn"),
        ("{tmp}/nets.py:flowers", "flowers"),
        ("{tmp}/nets.py:build_model", "nets"),
        ("{tmp}/nets.py:Net(num_classes=5, name='a:b')", "nets"),
        ("{tmp}/nets.py:FlowerNet(5)", "FlowerNet"),
        ("{tmp}/my flowers (2).onnx", "my-flowers-2"),
    ],
)
def test_the_name_comes_from_the_source(tmp_path, source, name):
    for file in ("nets.py", "my flowers (2).onnx"):
        (tmp_path / file).touch()
    assert default_name(parse_source(source.format(tmp=tmp_path))) == name


def test_a_factory_is_called_with_literals():
    call = parse_call("Net(3, sizes=[1, 2], name='x')")
    assert (call.name, call.arguments, dict(call.options)) == ("Net", (3,), {"sizes": [1, 2], "name": "x"})
    for wrong in ("Net(", "a.b", "Net(open('x'))", "1 + 1", ""):
        with pytest.raises(ValueError, match=r"is not|has arguments"):
            parse_call(wrong)


def test_labels_are_the_folders_of_the_data(tmp_path):
    data = folders(tmp_path / "data", "tulip", "rose")
    plan = make_plan(options(tmp_path, labels=None, evaluate=str(data)))
    assert plan.labels == ("rose", "tulip")
    assert plan.labels_from == str(data)
    assert make_plan(options(tmp_path, evaluate=str(data))).labels_from == ""
    assert make_plan(options(tmp_path, labels=None, calibrate=str(data))).labels == ()


def test_folders_that_are_some_of_the_published_classes_keep_the_published_labels(tmp_path, monkeypatch):
    monkeypatch.setattr("convoy.export.sources.origin.ask", lambda inquiry: Description(labels=("a", "b", "c")))
    weights = tmp_path / "w.pth"
    weights.touch()
    call = {"source": "torchvision:resnet18", "weights": weights, "labels": None, "input": "3x32x32"}
    some = make_plan(options(tmp_path, **call, evaluate=str(folders(tmp_path / "some", "a", "c"))))
    assert some.labels == ("a", "b", "c")
    others = make_plan(options(tmp_path, **call, evaluate=str(folders(tmp_path / "others", "a", "z"))))
    assert others.labels == ("a", "z")


def test_a_file_of_options_names_every_mistake_with_its_line(tmp_path):
    file = tmp_path / "export.yaml"
    file.write_text("source: zoo:simple_cnn\nmax-batch: many\nmaen: [0.5]\ntask: paint\ncrop: 224\nmean: [0.5, 1]\n")
    with pytest.raises(UsageError) as refused:
        read_options(file)
    lines = str(refused.value).splitlines()
    assert len(lines) == 3
    for line, words in zip(lines, ("line 2: max-batch: 'many'", "line 3: maen", "line 4: task: 'paint'"), strict=True):
        assert words in line
    assert "maen: unknown option; did you mean mean?" in lines[1]
    file.write_text("crop: 0224\nmean: [0.5, 1]\naccuracy_budget: 2\nstore: models\n")
    assert read_options(file) == {
        "crop": "0224",
        "mean": "0.5,1",
        "accuracy_budget_points": 2.0,
        "store": Path("models"),
    }


VALUES = {
    "name": st.text("abcö ", min_size=1, max_size=5),
    "weights": st.builds(Path, st.sampled_from(["a.pth", "with space/b.safetensors"])),
    "mean": st.sampled_from(["0.5,0.5,0.5", "0.1"]),
    "max_batch": st.integers(1, 9),
    "accuracy_budget_points": st.sampled_from([0.5, 2.0]),
    "force": st.booleans(),
    "task": st.sampled_from(["classify", None]),
    "crop": st.sampled_from(["224", "12x13"]),
}


@given(st.fixed_dictionaries({}, optional=VALUES))
def test_options_survive_their_file(tmp_path_factory, changes):
    asked = ExportOptions(source="x.onnx", **changes)
    file = tmp_path_factory.mktemp("options") / "export.yaml"
    file.write_text(as_yaml(asked), encoding="utf-8")
    assert ExportOptions(**read_options(file)) == asked


def test_the_command_says_what_was_asked_and_what_is_missing():
    asked = ExportOptions(source="x.onnx", max_batch=8, force=True, labels=Path("my labels.txt"))
    command = as_command(asked, {"--preprocess": "imagenet"})
    assert command == "convoy export x.onnx --labels 'my labels.txt' --max-batch 8 --force --preprocess imagenet"
