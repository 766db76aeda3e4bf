"""Exports that would answer wrongly without a word: second softmaxes, other labels, untrained weights, other entries.

From the outside: the command, its exit code and words, and what the server then answers.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from convoy.models.bundle import open_bundle
from tests.support.pictures import saved
from tests.support.quick_exports import write_digits_checkpoint
from tests.support.servers import run_convoy, start_server
from tests.support.stores import DEMO
from tests.support.wire import check_refused

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SIZE_PX = 16
# Weights that no seed changes, as a factory's are that loads its own.
HEADS = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, head, classes=3):
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.conv, self.fc, self.head = nn.Conv2d(3, 8, 3), nn.Linear(8, classes), head
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
    def forward(self, x):
        return self.head(self.fc(torch.relu(self.conv(x)).mean((2, 3))) / 8)

class Shares(nn.Module):
    def forward(self, x):
        powers = torch.exp(x)
        return powers / powers.sum(1, keepdim=True)

def softmax(): return Net(nn.Sequential(nn.Softmax(1), nn.Identity()))
def shares(): return Net(Shares())
def logsoftmax(): return Net(nn.LogSoftmax(1))
def sigmoid(): return Net(nn.Sigmoid())
def logits(): return Net(nn.Identity())
def one(): return Net(nn.Identity(), 1)
"""


@pytest.fixture
def heads(tmp_path: Path) -> Path:
    path = tmp_path / "heads.py"
    path.write_text(HEADS)
    return path


def export_head(heads: Path, factory: str, *options: str) -> str:
    """The command's words, whatever came of it."""
    given = ("--name", factory, "--input", f"3x{SIZE_PX}x{SIZE_PX}", "--preprocess", "unit", "--max-batch", "2")
    return export(f"{heads}:{factory}", heads.parent / "store", *given, *options)


def export(source: str, store: Path, *options: str) -> str:
    done = run_convoy("export", source, "--store", str(store), *options, timeout_s=240.0)
    assert "Traceback" not in done.stderr
    assert (done.returncode == 0) == ("published " in done.stdout), done.stderr
    return done.stdout + done.stderr


def picture() -> tuple[bytes, np.ndarray]:
    """A PNG, and the network's input for it: float32 [1, 3, 16, 16]."""
    pixels = np.random.default_rng(5).integers(0, 256, (SIZE_PX, SIZE_PX, 3), dtype=np.uint8)
    return saved(Image.fromarray(pixels)), (pixels.astype(np.float32) / 255).transpose(2, 0, 1)[None]


def scores_of_torch(values: np.ndarray, turn: str, classes: int = 3) -> np.ndarray:
    """What torch says of the same image, with softmax or sigmoid at the very end."""
    import torch

    scope: dict[str, object] = {}
    exec(HEADS, scope)
    with torch.inference_mode():
        logits = scope["Net"](torch.nn.Identity(), classes)(torch.from_numpy(values))[0]  # type: ignore[operator]
    result: np.ndarray = (torch.softmax(logits, 0) if turn == "softmax" else torch.sigmoid(logits)).numpy()
    return result


@pytest.mark.long
def test_scores_are_torchs_own_whatever_the_network_ends_in(heads):
    turns = dict.fromkeys(("softmax", "shares", "logsoftmax", "logits"), "softmax") | {"sigmoid": "sigmoid"}
    for factory in turns:
        assert "scores: " in export_head(heads, factory)
    png, values = picture()
    with start_server(store=heads.parent / "store") as server:
        for factory, turn in turns.items():
            answer = server.post(f"/predictions/{factory}?top_k=3", content=png).json()["predictions"]
            found = [one["score"] for one in sorted(answer, key=lambda one: one["class_id"])]
            np.testing.assert_allclose(found, scores_of_torch(values, turn), rtol=1e-4, err_msg=factory)


def test_one_logit_is_scored_and_a_threshold_decides(heads):
    (heads.parent / "labels.txt").write_text("cat\ndog\n")
    assert "one logit, whose sigmoid is the probability" in export_head(
        heads, "one", "--labels", str(heads.parent / "labels.txt")
    )
    png, values = picture()
    (score,) = scores_of_torch(values, "sigmoid", classes=1)
    assert 0.01 < score < 0.99
    with start_server(store=heads.parent / "store") as server:
        answer = server.post("/predictions/one", content=png).json()["predictions"]
        by_label = {one["label"]: one["score"] for one in answer}
        assert by_label == {"dog": pytest.approx(score, rel=1e-4), "cat": pytest.approx(1 - score, rel=1e-4)}
        best, other = sorted((score, 1 - score), reverse=True)
        for threshold, count in ((best + 0.005, 0), ((best + other) / 2, 1), (0, 2)):
            found = server.post(f"/predictions/one?threshold={threshold}", content=png).json()["predictions"]
            assert len(found) == count
        for wrong in ("1.5", "-0.1", "nan", "much"):
            refused = server.post(f"/predictions/one?threshold={wrong}", content=png)
            check_refused(refused, 400, "threshold must be a score from 0 to 1")


@pytest.mark.long
def test_images_of_more_classes_than_the_networks_still_calibrate(heads):
    assert "published" in export_head(heads, "logits", "--calibrate", "digits", "--activation", "softmax")


@pytest.fixture
def digits(tmp_path: Path) -> Path:
    return write_digits_checkpoint(tmp_path / "digits.safetensors")


def export_digits(weights: Path, *options: str) -> str:
    given = ("--name", "digits", "--evaluate", "digits", "--precisions", "fp32", "--max-batch", "2")
    return export("zoo:simple_cnn", weights.parent / "store", *given, "--weights", str(weights), *options)


@pytest.mark.long
def test_shifted_labels_are_named_and_force_is_seen_wherever_the_model_is(digits):
    labels = digits.parent / "labels.txt"
    labels.write_text("\n".join("1234567890") + "\n")
    refused = export_digits(digits, "--labels", str(labels))
    assert "0.00 % of 390 images are right; the labels are shifted by 1: images of '1' are answered as '2'" in refused
    assert "pass --force to publish it anyway" in refused
    assert not (digits.parent / "store").exists()
    export_digits(digits, "--labels", str(labels), "--force")
    store = digits.parent / "store"
    assert (
        "published with --force despite: 0.00 % of 390 images"
        in run_convoy("inspect", "digits", "--store", str(store)).stdout
    )
    with start_server(store=store) as server:
        assert "digits version 1 was published with --force despite: 0.00 % of 390 images are right" in server.log
        (model,) = server.stats()["models"]
        assert "the labels are shifted by 1" in model["published_although"][0]
        # The page shows what `/stats` says.
        assert "model?.published_although" in server.get("/").text


@pytest.mark.long
def test_the_checkpoints_own_accuracy_catches_another_preprocessing(digits):
    image = open_bundle(DEMO).manifest.spec.image
    assert image is not None
    recipe_fields = dataclasses.asdict(image)
    del recipe_fields["front"]
    wrong = digits.parent / "wrong.json"
    wrong.write_text(json.dumps(recipe_fields | {"mean": [-4.0] * 3, "std": [0.05] * 3}))
    refused = export_digits(digits, "--preprocess", str(wrong))
    assert "the checkpoint's header says 99.49 %, on the same images; 11.03 % of 390 images are right" in refused
    assert "not significantly better than chance" in refused
    assert "checked: the checkpoint's header says 99.49 %, on the same images; 99.49 %" in export_digits(digits)
