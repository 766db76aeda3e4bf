"""Checkpoints as other people's trainers leave them: what is certain is undone, and all that was done is said."""

from __future__ import annotations

import argparse
import os
import re
from collections import OrderedDict
from pathlib import Path

import pytest

from convoy.models.errors import JobError
from convoy.models.weights.reading import fitted, read_weights

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.slow


def network():
    layers = [torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU(), torch.nn.Flatten()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(4, 3)).eval()


def trained():
    """The weights of a network that no other one has by chance."""
    torch.manual_seed(7)
    made = network()
    with torch.no_grad():
        for tensor in (*made.parameters(), made[1].running_mean):
            tensor.normal_()
    return made


def loaded(path: Path, make=network):
    """A fresh network with the file's weights, and what was said."""
    torch.manual_seed(1)
    fresh = make()
    weights = fitted(read_weights(path), fresh.state_dict())
    fresh.load_state_dict(weights.tensors)
    return fresh, weights.said


def check_alike(one, other) -> None:
    expected = other.state_dict()
    for name, tensor in one.state_dict().items():
        if not name.endswith("num_batches_tracked"):
            assert torch.equal(tensor, expected[name]), name


def prefixed(prefix: str, weights):
    return OrderedDict((f"{prefix}{name}", tensor) for name, tensor in weights.items())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "wild.pth"


@pytest.mark.parametrize(
    ("prefix", "said"),
    [
        ("", ""),
        ("module.", "the prefix 'module.' was taken off the names"),
        ("model.", "the prefix 'model.' was taken off the names"),
        ("backbone.encoder.", "the prefix 'backbone.encoder.' was taken off the names"),
        ("_orig_mod.", "'_orig_mod.' of torch.compile was taken off the names"),
        ("module._orig_mod.", "'_orig_mod.' of torch.compile .*; the prefix 'module.' was"),
    ],
)
def test_a_prefix_of_all_names_is_taken_off(path, prefix, said):
    torch.save(prefixed(prefix, trained().state_dict()), path)
    fresh, told = loaded(path)
    check_alike(fresh, trained())
    assert re.fullmatch(f"wild.pth; .*{said}.*" if prefix else "", told)


def test_what_is_there_twice_or_does_not_fit_is_named(path):
    weights = trained().state_dict()
    torch.save(prefixed("student.", weights) | prefixed("teacher.", network().state_dict()), path)
    with pytest.raises(JobError, match=r"more than once, under student\., teacher\.; save the state_dict of one"):
        loaded(path)
    torch.save(prefixed("model.", weights | {"4.weight": torch.ones(5, 4)}), path)
    with pytest.raises(JobError, match=r"do not fit the network: 4\.weight is \[5, 4\] instead of \[3, 4\]$"):
        loaded(path)


class Settings(dict):  # type: ignore[type-arg]
    """A class of the trainer's own, which is a kind of dict."""


class Bomb:
    """Runs code when it is read by pickle."""

    def __init__(self, function, *arguments: str) -> None:
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("zipped", [True, False])
def test_objects_beside_the_weights_are_named_and_never_made(path, zipped):
    content = {
        "model": prefixed("module.", trained().state_dict()),
        "args": argparse.Namespace(lr=0.1, out=Path("x")),
        "settings": Settings(depth=50),
        "type": argparse.ArgumentParser,
        "epoch": 3,
    }
    torch.save(content, path, _use_new_zipfile_serialization=zipped)
    fresh, said = loaded(path)
    check_alike(fresh, trained())
    assert said.startswith("'model' of wild.pth; objects of argparse.Namespace, pathlib.PosixPath")
    assert f"{__name__}.Settings" in said
    assert "argparse.ArgumentParser" in said
    assert said.endswith("in it were not read; the prefix 'module.' was taken off the names")


def test_code_in_the_file_is_not_run(path, tmp_path):
    mark = tmp_path / "run"
    safe = set(torch.serialization.get_safe_globals())
    torch.save({"model": trained().state_dict(), "args": Bomb(exec, f"open({str(mark)!r}, 'w')")}, path)
    fresh, said = loaded(path)
    check_alike(fresh, trained())
    assert said == "'model' of wild.pth; objects of builtins.exec in it were not read"
    # torch reads no file that names what is of the system itself.
    torch.save({"model": trained().state_dict(), "args": Bomb(os.mkdir, str(mark))}, path)
    with pytest.raises(JobError, match=r"wild\.pth does not hold plain tensors; save the network's state_dict"):
        loaded(path)
    assert not mark.exists()
    assert set(torch.serialization.get_safe_globals()) == safe


@pytest.mark.parametrize("content", [argparse.Namespace(lr=1), {"args": argparse.Namespace(lr=1)}, {"epoch": 3}, 5])
def test_a_file_without_weights_says_so(path, content):
    torch.save(content, path)
    with pytest.raises(JobError, match=r"wild\.pth holds no state_dict.*; save model\.state_dict\(\) as safetensors"):
        loaded(path)


@pytest.mark.parametrize("content", [b"", b"hello", b"PK\x03\x04 and so on"])
def test_what_is_no_file_of_torch_is_one_line(path, content):
    path.write_bytes(content)
    with pytest.raises(JobError, match=r"wild\.pth does not hold plain tensors"):
        loaded(path)


# --- parts that have versions


class Versioned(torch.nn.Module):
    """Reads its first form, of half the scale, and its second; refuses what says nothing of it, as MNASNet does."""

    _version = 2

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(3))

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, *others):
        version = local_metadata.get("version")
        if version not in (1, 2):
            raise ValueError(f"version should be 1 or 2 instead of {version}")
        if version == 1:
            state_dict[f"{prefix}weight"] = 2 * state_dict[f"{prefix}weight"]
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *others)


class WithVersions(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Sequential(Versioned(), torch.nn.BatchNorm1d(3))


def of_version(number: int):
    made = WithVersions()
    torch.nn.init.normal_(made.body[0].weight)
    state = made.state_dict()
    state._metadata["body.0"]["version"] = number
    return state


def wrapped(state, prefix: str):
    """As a wrapper's own state_dict has it: the parts' names have the prefix, too, and the wrapper has a version."""
    made = prefixed(prefix, state)
    made._metadata = {"": {"version": 1}}
    made._metadata |= {f"{prefix}{name}".removesuffix("."): said for name, said in state._metadata.items()}
    return made


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("prefix", ["", "module.", "model.", "_orig_mod.", "module._orig_mod.", "a.b."])
@pytest.mark.parametrize("entry", ["", "state_dict", "model", "model_ema"])
def test_versions_of_parts_are_kept_under_every_name(path, version, prefix, entry):
    state = of_version(version)
    saved = wrapped(state, prefix) if prefix else state
    torch.save({entry: saved, "epoch": 3} if entry else saved, path)
    fresh, _ = loaded(path, WithVersions)
    assert torch.equal(fresh.body[0].weight, state["body.0.weight"] * (2 if version == 1 else 1))


@pytest.mark.parametrize("form", ["safetensors", "dict", "whole"])
def test_a_file_without_versions_is_of_the_networks_own(tmp_path, form):
    from safetensors.torch import save_file

    made = WithVersions()
    torch.nn.init.normal_(made.body[0].weight)
    path = tmp_path / f"w.{'safetensors' if form == 'safetensors' else 'pth'}"
    if form == "safetensors":
        save_file(made.state_dict(), path)
    else:
        torch.save(made if form == "whole" else dict(made.state_dict()), path)
    fresh, _ = loaded(path, WithVersions)
    assert torch.equal(fresh.body[0].weight, made.body[0].weight)


@pytest.mark.parametrize("noise", [7, {"body.0": 7, 3: {}, "": None}, [("body.0", {"version": 1})]])
def test_versions_that_are_none_are_not_believed(path, noise):
    state = of_version(2)
    state._metadata = noise
    torch.save(state, path)
    fresh, _ = loaded(path, WithVersions)
    assert torch.equal(fresh.body[0].weight, state["body.0.weight"])
