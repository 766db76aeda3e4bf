"""What training promises: the same result for the same seed, a telling header, one line when it cannot."""

from __future__ import annotations

import io
import multiprocessing
import statistics
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from training_fixtures import options, write_coloured

from convoy.models import train_command, zoo
from convoy.models.augment import distort
from convoy.models.checkpoint import convoy_version, read_checkpoint_header
from convoy.models.errors import JobError, UsageError
from convoy.models.images import preprocess
from convoy.models.samples import PARTS, encode_png
from convoy.models.train import TrainProgress, compare, train
from convoy.models.train_options import TrainOptions

torch = pytest.importorskip("torch")
DATA = Path(__file__).parents[1] / "data"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two classes that anything tells apart: mostly red and mostly blue."""
    return write_coloured(tmp_path / "images", {"red": 40, "blue": 40})


# --- wrong calls; no torch needed


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"arch": "resnet9000"}, "no network 'resnet9000'; choose one of: simple_cnn"),
        ({"out": Path("d.pth")}, "--out d.pth: checkpoints are always safetensors; use --out d.safetensors$"),
        ({"out": Path("/tmp")}, "--out /tmp: .*; use --out /tmp/simple_cnn.safetensors$"),
        ({"device": "tpu"}, "--device tpu is not known; use one of: auto, cpu, cuda"),
        ({"precision": "int8"}, "--precision int8 is not known; use one of: fp32, bf16, fp16"),
        ({"precision": "bf16", "amp": True}, "--precision bf16 and --amp exclude each other; remove one"),
        ({"optimizer": "lion"}, "--optimizer lion is not known; use one of: adamw, sgd"),
        ({"learning_rate": 0.0}, "--lr must be above 0"),
        ({"learning_rate": float("nan")}, "--lr must be above 0"),
        ({"batch_size": 0}, "at least 1"),
        ({"epochs": 0}, "at least 1"),
        ({"seed": -1}, "--seed must be from 0"),
        ({"loader_workers": -1}, "--loader-workers must be from 0"),
        ({"arch": "resnet50"}, r"for torchvision use torchvision:NAME"),
        ({"image_size": 64}, "--image-size 64 is only for torchvision:NAME"),
        ({"weights": "imagenet"}, "--weights imagenet is only for torchvision:NAME"),
        ({"freeze": True}, "pass --weights, or remove --freeze"),
        ({"weights_key": "model_ema"}, "--weights-key selects an entry of"),
        ({"weights_key": "model_ema", "weights": "w.safetensors"}, "--weights-key selects an entry of"),
        ({"schedule": "linear"}, "--schedule linear is not known; use one of: one_cycle, cosine, step"),
        ({"class_weights": "all"}, "--class-weights all is not known"),
        ({"warm_up": 1.0}, "--lr-warm-up must be at least 0 and below 1"),
        ({"label_smoothing": -0.1}, "--label-smoothing must be at least 0 and below 1"),
        ({"weight_decay": float("nan")}, "--weight-decay must be 0 or above"),
        ({"ema": 1.0}, "--ema is a decay between 0 and 1"),
    ],
)
def test_a_wrong_option_is_named_with_what_is_right(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        options(Path("digits"), **changes)


def test_names_and_options_need_no_torch() -> None:
    program = "import sys, convoy.models.train; from convoy.models import zoo; zoo.entry('simple_cnn'); "
    program += "assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(__file__).parents[2])


def test_the_zoo_names_what_it_has() -> None:
    assert zoo.names() == (
        *("simple_cnn", "resnet18", "mobilenet_v2", "mobilenet_v3"),
        *("efficientnet_b0", "regnet", "convnext", "densenet"),
        *("repvgg", "ghostnet", "wide_range_silu", "wide_range_hardswish"),
        *("shapes_detector", "shapes_unet"),
    )
    with pytest.raises(UsageError, match="at least 2 classes, got 1"):
        zoo.create("simple_cnn", 1)


# --- training


@pytest.mark.slow
def test_an_image_folder_is_learned_and_the_header_tells_all(folder: Path) -> None:
    seen: list[TrainProgress] = []
    result = train(options(folder, seed=5), seen.append)
    header = read_checkpoint_header(result.out)
    assert header == result.header
    assert header.labels == ("blue", "red")
    assert header.test_accuracy == 1.0
    assert (header.architecture, header.seed, header.convoy_version) == ("simple_cnn", 5, convoy_version())
    assert sum(header.split[part].images for part in PARTS) == 80
    assert all(len(header.split[part].sha256) == 64 for part in PARTS)
    assert header.image.mean[0] == pytest.approx(124.5 / 255, abs=0.05)  # half of the images are red by 150
    assert (result.device, result.precision, result.skipped) == ("cpu", "fp32", ())
    assert [p.done for p in seen if p.stage == "training"] == [0, 1, 2, 3, 4]
    assert seen[-1].loss is not None
    assert seen[-1].total == 4


@pytest.mark.slow
def test_the_seed_decides_everything_on_a_cpu(folder: Path) -> None:
    state = torch.random.get_rng_state()
    contents = [train(options(folder, seed=seed)).out.read_bytes() for seed in (1, 1, 2)]
    assert contents[0] == contents[1]
    assert contents[0] != contents[2]
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.slow
def test_a_few_broken_images_are_skipped_and_named(folder: Path) -> None:
    for index in range(1000, 1160):
        (folder / "red" / f"{index}.png").write_bytes(encode_png(np.full((8, 8, 3), index % 250, np.uint8)))
    (folder / "red" / "broken.png").write_bytes(b"broken 1")  # by its hash in the train part
    assert train(options(folder, epochs=1)).skipped == ("red/broken.png",)


@pytest.mark.slow
def test_a_job_that_fails_says_why_and_leaves_no_file(folder: Path) -> None:
    def interrupt(progress: TrainProgress) -> None:
        if progress.stage == "training":
            raise KeyboardInterrupt

    with pytest.raises(JobError, match="create it first"):  # before an image is read
        train(options(folder, out=folder / "gone" / "cnn.safetensors"), pytest.fail)
    with pytest.raises(JobError, match=r"diverged in epoch \d+; lower --lr 1e\+20"):
        train(options(folder, optimizer="sgd", learning_rate=1e20))
    with pytest.raises(KeyboardInterrupt):
        train(options(folder), interrupt)
    for index in range(20):
        (folder / "red" / f"{index}.png").write_bytes(b"broken %d" % index)
    with pytest.raises(JobError, match="images cannot be read: red/"):
        train(options(folder))
    assert [path.name for path in folder.parent.iterdir()] == ["images"]


@pytest.mark.slow
def test_a_gpu_that_is_not_there_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(JobError, match="torch finds no usable GPU; train with --device cpu"):
        train(options(folder, device="cuda"))
    cpu, cuda = compare(options(folder, epochs=1), ["cpu", "cuda"])
    assert cpu.result is not None
    assert (cuda.result, cuda.unavailable) == (None, "torch finds no usable GPU; train with --device cpu")
    with pytest.raises(JobError, match="none of cuda can train here"):
        compare(options(folder), ["cuda"])
    assert str(cuda.variant) == "cuda"


@pytest.mark.slow
def test_distortion_keeps_shape_range_and_seed() -> None:
    images = torch.rand(6, 3, 9, 7)
    one, two = (distort(images, torch.Generator().manual_seed(1), mirror=True) for _ in range(2))
    assert torch.equal(one, two)
    assert one.shape == images.shape
    assert not torch.equal(one, images)
    assert 0 <= one.min() <= one.max() <= 1


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_digits_are_learned_to_98_5_percent_over_five_seeds(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    plain = TrainOptions(dataset="digits", out=tmp_path / "cnn.safetensors", device="cpu")
    jobs = [replace(plain, out=tmp_path / f"{seed}.safetensors", seed=seed) for seed in range(5)]
    # Each trains on one thread, and nobody should wait for five on one core.
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        results = list(pool.map(train, jobs))
    for result in results:
        network = zoo.create("simple_cnn", 10)
        network.load_state_dict(load_file(result.out))
        for label, word in enumerate(["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]):
            image = replace(result.header.image, front="float32_nchw")
            sample = torch.from_numpy(preprocess((DATA / f"{word}.png").read_bytes(), image).copy())
            assert network(sample[None]).argmax().item() == label
    assert statistics.median(result.header.test_accuracy for result in results) >= 0.985


@pytest.mark.parametrize("variants", [None, ("cpu",)])
def test_an_interrupt_is_one_line_and_a_pipe_gets_no_bars(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variants: tuple[str, ...] | None
) -> None:
    def interrupted(options: TrainOptions, *rest: Any) -> None:
        rest[-1](TrainProgress("training", 1, 4))
        raise KeyboardInterrupt

    monkeypatch.setattr(train_command, "train", interrupted)
    monkeypatch.setattr(train_command, "compare", interrupted)
    shown = io.StringIO()
    with pytest.raises(
        JobError, match=r"^interrupted; nothing was written to .*cnn\.safetensors; run the command again$"
    ):
        train_command.run(options(tmp_path / "colours"), variants, Console(file=shown))
    assert shown.getvalue() == ""
