"""Training on a GPU: mixed precision is on, and as accurate as the CPU's recipe."""

from __future__ import annotations

from pathlib import Path

import pytest

from convoy.models.train import compare
from convoy.models.train_options import TrainOptions

pytestmark = pytest.mark.gpu


def test_the_digits_are_learned_on_both_devices_and_compared(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("finds no usable GPU")
    options = TrainOptions(dataset="digits", out=tmp_path / "cnn.safetensors")
    cpu, cuda = compare(options, ["cpu", "cuda"])
    assert cpu.result is not None
    assert cuda.result is not None
    assert cpu.result.precision == "fp32"
    assert cuda.result.precision in ("bf16", "fp16")
    assert cuda.result.layout == "channels_last"
    assert cuda.result.header.test_accuracy >= 0.98


def test_every_form_of_training_on_a_gpu_learns_the_digits(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("finds no usable GPU")
    options = TrainOptions(dataset="digits", out=tmp_path / "cnn.safetensors", epochs=10)
    for row in compare(options, ["cuda:all"]):
        assert row.result is not None, f"{row.variant}: {row.unavailable}"
        assert row.result.header.test_accuracy >= 0.9, row.variant
