"""Networks whose files leave height and width free: at what they run, and what is kept free of them."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import onnx
import pytest
from export_fixtures import make_quick
from hypothesis import given
from hypothesis import strategies as st

from convoy.app.engines.base import Signature, run_arrays
from convoy.app.engines.batch import EngineFailure, FailureScope
from convoy.app.engines.dimensions import Size, sizes_that_run, with_examples
from convoy.app.engines.memory import FreeRuns, input_bytes
from convoy.app.engines.onnx_session import new_session
from convoy.app.engines.onnxruntime import OnnxRuntimeCpuEngine, open_session, read_signature
from convoy.app.engines.parts import Part
from convoy.export.command import export_bundle
from convoy.export.options import ExportOptions
from convoy.export.sources.preprocess import parse_input
from convoy.models.bundle import Bundle, open_bundle
from convoy.models.errors import BundleError, JobError, UsageError
from convoy.models.spec import TensorSpec
from tests.support.onnx_models import convolutions, identity

SIZES = ((40, 40), (64, 33), (17, 96))


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    make_quick(monkeypatch)
    monkeypatch.setattr("convoy.export.sources.onnx_plain.accepted", lambda variants, *_: tuple(variants))


def found(path: Path, wanted: Size | None = None) -> Signature:
    return with_examples(path, read_signature(open_session(path, 1), path), 1, wanted)


def pictures(height: int, width: int, rows: int = 3) -> np.ndarray:
    return np.random.default_rng(height).standard_normal((rows, 3, height, width)).astype(np.float32)


def answers_of(path: Path, rows: np.ndarray) -> np.ndarray:
    return np.asarray(new_session(path).run(None, {"x": rows})[0])


def export(original: Path, **options: object) -> Bundle:
    store = original.parent / "store"
    given = {"name": "net", "max_batch": 4, "store": store, "plan_cache": original.parent / "plans"}
    return open_bundle(export_bundle(ExportOptions(str(original), **(given | options))))  # type: ignore[arg-type]


def engine_of(bundle: Bundle, file: str = "fp32.onnx") -> OnnxRuntimeCpuEngine:
    spec = bundle.manifest.spec
    sides = {"inputs": spec.inputs, "outputs": spec.outputs, "max_batch_size": spec.max_batch_size}
    return OnnxRuntimeCpuEngine(bundle.path(file), **sides, precision="fp32", threads=1)  # type: ignore[arg-type]


def test_an_example_fits_its_shape():
    spec = TensorSpec("x", "FP32", (3, -1, -1), (3, 32, 40))
    assert spec.drawn_shape == (3, 32, 40)
    assert TensorSpec("x", "FP32", (3, -1, -1)).drawn_shape == (3, 1, 1)
    assert TensorSpec("x", "FP32", (-1, 3, -1), (1, 3, 9)).without_batch() == TensorSpec("x", "FP32", (3, -1), (3, 9))
    for wrong in ((3, 32), (4, 32, 40), (3, -1, 40)):
        with pytest.raises(BundleError, match="does not fit"):
            TensorSpec("x", "FP32", (3, -1, -1), wrong)


@pytest.mark.parametrize(
    ("end", "first"), [("scores", 32), ("maps", 32), ("valid", 32), ("squares", 32), ("one_size", 64)]
)
def test_the_first_size_at_which_a_network_runs_is_taken(tmp_path, end, first, capfd):
    signature = found(convolutions(tmp_path / "net.onnx", end))
    assert signature.inputs[0].example == (1, 3, first, first)
    assert capfd.readouterr() == ("", "")  # failed attempts are not logged


def test_a_file_with_fixed_sizes_is_left_alone_and_what_is_no_image_is_drawn_as_ones(tmp_path):
    path = convolutions(tmp_path / "net.onnx", dims=("batch", 3, 48, 40))
    assert found(path).inputs[0].example == ()
    assert sizes_that_run(path, found(path), 1) == ()
    assert found(identity(tmp_path / "a" / "b" / "rows.onnx")).inputs[0].drawn_shape == (1, 1)


@pytest.mark.parametrize("end", ["scores", "maps", "valid", "squares"])
def test_an_exported_file_stays_free_and_is_proved_at_three_sizes(tmp_path, end):
    original = convolutions(tmp_path / "net.onnx", end)
    bundle = export(original)
    manifest = bundle.manifest
    assert manifest.spec.inputs[0].shape == (3, -1, -1)
    assert manifest.spec.inputs[0].example == (3, 32, 32)
    assert len(set(manifest.provenance.free_sizes)) == 3
    assert all(size in manifest.variants[0].reason for size in manifest.provenance.free_sizes)
    assert bundle.canary().inputs["x"].shape == (8, 3, 32, 32)
    engine = engine_of(bundle)
    for height, width in SIZES if end != "squares" else ((40, 40), (64, 64), (17, 17)):
        rows = pictures(height, width)
        assert np.allclose(run_arrays(engine, {"x": rows})["y"], answers_of(original, rows), atol=1e-5)
    engine.close()


def test_a_network_that_runs_at_one_size_is_fixed_there_and_says_so(tmp_path):
    bundle = export(convolutions(tmp_path / "net.onnx", "one_size"))
    assert bundle.manifest.spec.inputs[0].shape == (3, 64, 64)
    assert bundle.manifest.provenance.free_sizes == ()
    assert "height and width are fixed at 64x64: the file leaves them free" in bundle.manifest.variants[0].reason


def test_input_fixes_sizes_or_says_where_to_prove_free_ones(tmp_path):
    original = convolutions(tmp_path / "net.onnx", "maps")
    fixed = export(original, input="3x48x40").manifest.spec
    assert (fixed.inputs[0].shape, fixed.outputs[0].shape) == ((3, 48, 40), (4, 48, 40))
    free = export(original, input="3x48?x40?").manifest
    assert (free.spec.inputs[0].shape, free.spec.inputs[0].example) == ((3, -1, -1), (3, 48, 40))
    assert free.provenance.free_sizes == ("48x40", "80x40", "48x104")
    assert export(original, input="3x?x?").manifest.spec.inputs[0].example == (3, 32, 32)


def test_an_input_that_does_not_fit_is_refused_with_what_to_do(tmp_path):
    original = convolutions(tmp_path / "net.onnx", "valid")
    with pytest.raises(JobError, match=r"runs at none of 4x4; pass a size that it takes, such as --input"):
        export(original, input="3x4x4")
    with pytest.raises(UsageError, match=r"--input has 1 channels, and net.onnx takes x \[-1, 3, -1, -1\]"):
        export(original, input="1x32x32")
    with pytest.raises(UsageError, match=r"net.onnx has fixed sizes .* leave it out, or pass --preprocess"):
        export(convolutions(tmp_path / "net.onnx", dims=("batch", 3, 48, 40)), input="3x48x40")
    with pytest.raises(UsageError, match="--preprocess unit needs the size of the input"):
        of_pictures(convolutions(tmp_path / "net.onnx"), input="3x?x?")


@pytest.mark.parametrize("text", ["3x?x32", "3x32?x32", "3x0x4", "?x32x32", "2x?x?", "3x", "3x32x32x3"])
def test_what_input_does_not_mean_is_refused(text):
    with pytest.raises(UsageError, match=r"write 3x224x224, .* or 3x224\?x224\? where other heights"):
        parse_input(text)


def of_pictures(original: Path, **options: object) -> Bundle:
    return export(original, preprocess="unit", **({"precisions": "fp32"} | options))


def original_of_bytes(original: Path, images: np.ndarray) -> np.ndarray:
    return answers_of(original, (images.astype(np.float32) / 255).transpose(0, 3, 1, 2))


def bytes_of(height: int, width: int) -> np.ndarray:
    return np.random.default_rng(height).integers(0, 256, (3, height, width, 3), dtype=np.uint8)


def test_a_model_of_images_takes_other_sizes_where_that_is_asked_for(tmp_path):
    original = convolutions(tmp_path / "net.onnx")
    bundle = of_pictures(original, input="3x40?x32?")
    manifest = bundle.manifest
    assert (manifest.spec.inputs[0].shape, manifest.spec.inputs[0].example) == ((-1, -1, 3), (40, 32, 3))
    assert manifest.provenance.free_sizes == ("40x32", "72x32", "40x96")
    assert "height and width are free, proved at 40x32, 72x32 and 40x96" in manifest.variants[0].reason
    assert "proved at" in (bundle.folder / "report.html").read_text()
    engine = engine_of(bundle)
    for size in SIZES:
        answers = run_arrays(engine, {"images": bytes_of(*size)})["y"]
        assert np.allclose(answers, original_of_bytes(original, bytes_of(*size)), atol=1e-5)
    engine.close()


def test_a_model_of_images_is_fixed_where_nobody_asked_and_says_how_to_free_it(tmp_path):
    bundle = of_pictures(convolutions(tmp_path / "net.onnx"), input="3x40x32")
    assert onnx.load(str(bundle.path("fp32.onnx"))).graph.node[0].op_type == "Cast", "as TensorRT wants bytes"
    manifest = bundle.manifest
    assert manifest.spec.inputs[0].shape == (40, 32, 3)
    assert "fixed at 40x32; --input 3x40?x32? leaves them free, as the file does" in manifest.variants[0].reason
    manifest = of_pictures(convolutions(tmp_path / "net.onnx", "one_size"), input="3x64?x64?").manifest
    assert manifest.spec.inputs[0].shape == (64, 64, 3)
    assert "fixed at 64x64: the file runs hardly at any other size" in manifest.variants[0].reason
    fixed = convolutions(tmp_path / "net.onnx", dims=("batch", 3, 48, 40))
    assert "the file fixes them" in of_pictures(fixed, input="3x48?x40?").manifest.variants[0].reason
    with pytest.raises(JobError, match=r"net.onnx does not run at 40x40"):
        of_pictures(convolutions(tmp_path / "net.onnx", "one_size"), input="3x40x40")


def test_int8_of_free_sizes_is_calibrated_at_the_size_of_pictures_and_what_no_engine_runs_is_left_out(tmp_path):
    original = convolutions(tmp_path / "net.onnx")
    bundle = of_pictures(original, input="3x32?x32?", precisions=None, allow_random_calibration=True)
    assert [variant.file for variant in bundle.manifest.variants] == ["fp32.onnx", "int8-cpu.onnx"]
    left = "fp16.onnx, int8-trt.onnx, fp8.onnx: the engines that run it take no free height and width"
    assert left in bundle.manifest.variants[0].reason
    engine = engine_of(bundle, "int8-cpu.onnx")
    for size in SIZES:
        answers = run_arrays(engine, {"images": bytes_of(*size)})["y"]
        want = original_of_bytes(original, bytes_of(*size))
        assert np.linalg.norm(answers - want) < 0.1 * np.linalg.norm(want)
    engine.close()


def with_metadata(original: Path, **said: str) -> Path:
    model = onnx.load(str(original))
    onnx.helper.set_model_props(model, said)
    onnx.save(model, str(original))
    return original


@pytest.mark.parametrize(
    ("said", "size"),
    [("[48, 80]", (48, 80)), ("40", (40, 40)), ("[33.5, 2]", (32, 32)), ("[0, 9]", (32, 32)), ("soup", (32, 32))],
)
def test_the_size_that_a_files_metadata_name_comes_first(tmp_path, said, size):
    bundle = export(with_metadata(convolutions(tmp_path / "net.onnx"), imgsz=said))
    assert f"at heights and widths of {size[0]}x{size[1]}, " in bundle.manifest.variants[0].reason


def part_of(nbytes: int) -> Part:
    return Part(1, ((1, nbytes),), (memoryview(bytes(nbytes)),), (0,), (None,))


MIB = 1 << 20


def runs(grown: int = 0, free: int | None = None, each: int = MIB, largest: int = 4) -> FreeRuns:
    """Of 4 MiB usually, unless told otherwise. All three samples that are more than one take `grown`."""
    resident = iter([1 << 30, (1 << 30) + (8 << 20) + grown])
    bound = FreeRuns(
        (TensorSpec("x", "UINT8", (-1,), (each,)),), largest, available=lambda: free, resident=lambda: next(resident)
    )
    bound.ran_one()
    bound.ran_largest()
    return bound


@given(sizes=st.lists(st.integers(0, 10), min_size=1, max_size=20))
def test_parts_run_together_up_to_what_is_usual_and_none_is_lost(sizes):
    parts = [part_of(size * MIB) for size in sizes]
    groups = list(runs().groups(parts))
    assert [part for group in groups for part in group] == parts
    for group, following in pairwise([*groups, [part_of(100 * MIB)]]):
        total = sum(map(input_bytes, group))
        assert total <= 4 * MIB or len(group) == 1
        assert total + input_bytes(following[0]) > 4 * MIB


def test_only_what_is_larger_than_usual_is_held_against_the_memory_that_there_is():
    bound = runs(grown=30 * MIB, free=160 * MIB)  # ten bytes for each
    assert not bound.is_large([part_of(4 * MIB)])
    assert bound.is_large([part_of(12 * MIB)])
    with pytest.raises(EngineFailure, match="send fewer or smaller samples") as failure:
        bound.is_large([part_of(13 * MIB)])
    assert failure.value.scope is FailureScope.MEMORY
    assert runs(grown=30 * MIB).is_large([part_of(100 * MIB)])  # where what is free is not known
