"""What `convoy inspect` says about a store, and that it fits a terminal."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
from report_fixtures import DEVICE, full_manifest
from rich.console import Console

from convoy.app.commands.inspect import run, variants_table
from convoy.export.terminal import summary
from convoy.models.bundle import FileRecord, Interval, Manifest, Variant, seal, sha256_file
from convoy.models.errors import UsageError


def write(root: Path, manifest: Manifest) -> Path:
    """A bundle of empty files."""
    folder = root / "resnet" / "1"
    folder.mkdir(parents=True)
    for name in manifest.files:
        (folder / name).write_bytes(b"")
    empty = FileRecord(sha256_file(folder / "fp32.onnx"), 0)
    (folder / "manifest.json").write_bytes(seal(replace(manifest, files=dict.fromkeys(manifest.files, empty))))
    return folder


def inspected(root: Path | None, name: str | None = None) -> tuple[int, str]:
    console = Console(file=io.StringIO(), width=80)
    code = run(None if root is None else str(root), name, console)
    return code, console.file.getvalue()  # type: ignore[attr-defined]


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
    console = Console(file=io.StringIO(), width=80)
    console.print(table(manifest))
    shown = console.file.getvalue().splitlines()
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
