"""Tables of commands on a narrow terminal: no name and no figure is broken or cut; and what `convoy inspect` says."""

from __future__ import annotations

import io
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from convoy.app.commands.inspect import run, variants_table
from convoy.app.commands.predict import predict
from convoy.export.terminal import summary
from convoy.models.answers import Classification, Prediction
from convoy.models.bundle import BUSY_MARK, FileRecord, Interval, Manifest, Variant, read_manifest, seal, sha256_file
from convoy.models.errors import UsageError
from convoy.models.train import Compared
from convoy.models.train_command import comparison_table
from convoy.models.training.epochs import EpochRecord
from convoy.models.training.variants import parse_variants
from tests.unit.report_fixtures import DEVICE, full_manifest

TIMES = "median_ms", "p10_ms", "p90_ms"


def narrow() -> Console:
    return Console(file=io.StringIO(), width=80)


def text_of(console: Console) -> str:
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def asked(names: list[str], label: str = "seven") -> str:
    """What `convoy predict` prints for these names of images."""
    answer = Classification("digits", 1, (Prediction(7, label, 0.9876), Prediction(1, "one", 0.01)))
    client: Any = SimpleNamespace(look=lambda model, image, top_k, threshold, iou: answer, at_once=2)
    console = narrow()
    assert predict(client, "digits", names, None, console=console) == 0
    return text_of(console)


def test_short_names_of_images_share_a_table_and_a_long_one_has_a_line_of_its_own() -> None:
    shown = asked(["a.png", "b.png"])
    assert shown.count("image") == 1
    assert "\u2502 a.png \u2502" in shown
    long = "photographs/2026-11-25/the-third-camera/IMG_20261125_134502_HDR-copy.jpg"
    shown = asked(["a.png", long], label="black-and-tan coonhound")
    assert {"a.png", long} < set(shown.splitlines())
    assert shown.count("0.9876") == 2
    assert max(map(len, shown.splitlines())) <= 80


def trained(variant: str, epoch_s: float, energy_j: float | None) -> Compared:
    (asked,) = parse_variants([variant])
    epoch = EpochRecord(1, 0.1, 0.5, None, None, epoch_s, 48_000 / epoch_s, 12_345 << 20, energy_j)
    result: Any = SimpleNamespace(
        header=SimpleNamespace(test_accuracy=1.0),
        epochs=[epoch],
        epoch_s=epoch_s,
        device=asked.device,
        precision=asked.precision,
        layout=asked.layout,
        is_compiled=asked.run == "compiled",
    )
    return Compared(asked, result, None)


def test_a_comparison_has_all_figures_and_says_why_one_could_not_be_trained() -> None:
    console = narrow()
    why = "no usable NVIDIA driver: cudaGetDeviceCount: CUDA driver version is insufficient for CUDA runtime version"
    rows = [
        trained("cpu:fp32:contiguous:eager", 1234.5, None),
        trained("cuda:fp16:channels_last:compiled", 1.234, 98_765.0),
        *(Compared(variant, None, why) for variant in parse_variants(["cuda", "cuda:fp16:channels_last:compiled"])),
    ]
    console.print(comparison_table(tuple(rows)))
    shown = text_of(console)
    assert max(map(len, shown.splitlines())) <= 80
    figures = [line.split() for line in shown.splitlines() if line.startswith(("cpu ", "cuda "))]
    assert figures == [
        ["cpu", "fp32", "contiguous", "no", *["100.00", "%", "1,234", "38.9", "12,345", "not", "known", "1x"]],
        ["cuda", "fp16", "channels_last", "yes", *["100.00", "%", "1.23", "38,898", "12,345", "98,765", "1,000x"]],
        ["cuda", *"-" * 9],
        ["cuda", "fp16", "channels_last", "yes", *"-" * 6],
    ]
    assert f"cuda: {why}" in " ".join(shown.split())
    assert f"cuda:fp16:channels_last:compiled: {why}" in " ".join(shown.split())
    assert "\u2026" not in shown


def test_a_long_value_of_an_option_is_last_on_its_line() -> None:
    store = "/" + "a-rather-long-name-of-a-folder/" * 2
    command = [sys.executable, "-m", "convoy", "config", "show", "--store", store]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    (line,) = [line for line in shown if line.startswith("store ")]
    assert line.split() == ["store", "command", "line", store]
    assert max(len(other) for other in shown if other != line) <= 80


@pytest.mark.parametrize(
    ("times_slower", "interval"), [(1, (2.35, 2.31, 2.41)), (0.01, (12.34, 11.9, 12.8)), (3000, None)]
)
def test_what_is_in_a_store_keeps_its_marks_of_a_busy_machine(tmp_path, times_slower, interval):
    def busy(variant: Variant, file: str) -> Variant:
        latency = variant.latency
        if latency is None:
            return variant
        scaled = [
            replace(point, others_share=0.4, **{name: getattr(point, name) * times_slower for name in TIMES})
            for point in latency.points
        ]
        gain = None if interval is None or latency.speedup is None else Interval(*interval)
        return replace(variant, file=file, latency=replace(latency, points=tuple(scaled), speedup=gain))

    plain = full_manifest()
    fp32, int8, fp16 = plain.variants
    variants = busy(fp32, fp32.file), busy(int8, int8.file), busy(int8, "int8-openvino.onnx"), fp16
    manifest = replace(plain, variants=variants, objections=("it is random",))
    write(tmp_path, replace(manifest, files={variant.file: FileRecord("", 0) for variant in variants}))
    code, shown = inspected(tmp_path, "resnet")
    assert code == 0
    lines = [line.rstrip() for line in shown.splitlines()]
    tables = [line for line in lines if line.startswith((" variant", "variant", "fp32.onnx ", "int8-", " ", "batch"))]
    assert "\u2026" not in "".join(lines)
    assert "times fp32" in next(line for line in lines if "best/s" in line)
    row = next(line for line in lines if line.startswith("fp32.onnx "))
    assert row.endswith(" -")  # there is no ratio that could carry a mark
    assert row.count(BUSY_MARK) == 1
    marks = 1 if interval is None else 2
    for name in ("int8-cpu.onnx", "int8-openvino.onnx"):
        assert next(line for line in lines if line.startswith(f"{name} ")).count(BUSY_MARK) == marks
    assert max(map(len, tables)) <= 80


def write(root: Path, manifest: Manifest) -> Path:
    """A bundle of empty files."""
    folder = root / "resnet" / "1"
    folder.mkdir(parents=True)
    for name in manifest.files:
        (folder / name).write_bytes(b"")
    empty = FileRecord(sha256_file(folder / "fp32.onnx"), 0)
    (folder / "manifest.json").write_bytes(seal(replace(manifest, files=dict.fromkeys(manifest.files, empty))))
    return folder


def inspected(root: Path | None, name: str | None = None, *, has_hashes: bool = False) -> tuple[int, str]:
    console = narrow()
    return run(None if root is None else str(root), name, console, has_hashes=has_hashes), text_of(console)


def test_the_essence_of_a_bundle_in_80_columns(tmp_path):
    write(tmp_path, full_manifest())
    code, shown = inspected(tmp_path, "resnet")
    assert code == 0
    for words in (
        "resnet version 1: torchvision:resnet18, exported 2026-11-21 01:37 UTC",
        "accuracy on 1,200 samples of photos",
        "92.81 %",
        "0.59 (<0.97)",
        "2.35 (2.25-2.44)",
        "int8-cpu.onnx: because",
        f"measured on {DEVICE}",
        "attains 509 GFLOP/s, 1,998 in 8 bits, and 96 GB/s",
        "int8-cpu.onnx: operators 48 in int8, 12 in fp32; kept higher: first.layer",
        "int8-cpu.onnx: 23 % of the limit at batch 32",
        "fp32.onnx: about 0.2 ms + 17.4 ms per sample",
    ):
        assert words in shown, words
    for lines in (shown.splitlines(), inspected(tmp_path)[1].splitlines()):
        assert max(len(line.rstrip()) for line in lines) <= 80
        # Nothing of the first table was cut or folded.
        assert any(line.startswith("int8-cpu.onnx ") and line.rstrip().endswith("2.44)") for line in lines)


def test_hashes_are_shown_only_where_they_are_asked_for(tmp_path):
    write(tmp_path, full_manifest())
    hashes = [record.sha256 for record in read_manifest(tmp_path / "resnet" / "1").files.values()]
    assert hashes
    assert not any(one in inspected(tmp_path, "resnet")[1] for one in hashes)
    shown = inspected(tmp_path, "resnet", has_hashes=True)[1]
    assert all(one in shown for one in hashes)
    assert max(len(line.rstrip()) for line in shown.splitlines()) <= 80


def slow(variant: Variant) -> Variant:
    """The variant with figures as long as they get: whole seconds, all right, and many times as fast."""
    latency, accuracy = variant.latency, variant.accuracy
    if latency is not None:
        points = tuple(replace(point, median_ms=2000 * point.median_ms) for point in latency.points)
        latency = replace(latency, points=points, speedup=latency.speedup and Interval(12.345, 12.31, 13.4))
    return replace(variant, latency=latency, accuracy=accuracy and replace(accuracy, top1=1.0))


@pytest.mark.parametrize("table", [variants_table, summary])
def test_names_of_files_stay_whole_beside_long_figures(table):
    plain = full_manifest()
    manifest = replace(plain, variants=tuple(map(slow, plain.variants)), objections=("it is random",))
    console = narrow()
    console.print(table(manifest))
    shown = text_of(console).splitlines()
    for variant in manifest.variants:
        (row,) = [line for line in shown if line.startswith(f"{variant.file} ")]
        assert "\u2026" not in row
        assert len(row.rstrip()) <= 80


def test_words_in_brackets_are_words_and_the_bundled_demo_is_sound(tmp_path):
    write(tmp_path, full_manifest(source="net.py[/bold]:make", reason="[red]not fast"))
    shown = inspected(tmp_path)[1]
    assert "net.py[/bold]:make" in shown
    assert "[red]not fast" in shown
    code, shown = inspected(None)
    assert code == 0
    assert "digits version 1" in shown


def test_one_changed_byte_is_one_line_and_exit_code_1_and_another_name_a_wrong_call(tmp_path):
    folder = write(tmp_path, full_manifest())
    (folder / "fp16.onnx").write_bytes(b"\0")
    code, shown = inspected(tmp_path)
    assert code == 1
    assert "fp16.onnx" in shown
    assert "1 of 1 versions are broken" in shown
    with pytest.raises(UsageError, match="there is no model 'nothing'"):
        inspected(tmp_path, "nothing")
