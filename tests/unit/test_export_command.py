"""The pipeline from options to bundle, with a hand-made graph in the place of torch's."""

from __future__ import annotations

import errno
import io
import re
from dataclasses import replace
from itertools import cycle
from unittest.mock import Mock

import numpy as np
import pytest
from export_fixtures import make_quick, options, write_images
from rich.console import Console

from convoy.app.engines.batch import EngineFailure
from convoy.app.engines.table import REFERENCE as REFERENCE_ROW
from convoy.app.engines.table import ROWS
from convoy.export import command
from convoy.export.command import export_bundle, run
from convoy.export.profiling import profile
from convoy.export.proof import proving as proof
from convoy.export.variants import variant as variants_file
from convoy.export.variants.precision import RECIPES
from convoy.models.bundle import Interval, Manifest, open_bundle
from convoy.models.errors import BundleError, JobError, UsageError


@pytest.fixture(autouse=True)
def quick_and_tidy(monkeypatch, tmp_path):
    make_quick(monkeypatch, tmp_path / "cache")
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    yield
    assert list(temporary.iterdir()) == []


@pytest.fixture
def data(tmp_path):
    return str(write_images(tmp_path / "colour-photos"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of a bundle of every precision, from images of two colours."""
    folder = tmp_path_factory.mktemp("whole")
    images = str(write_images(folder / "colour-photos"))
    with pytest.MonkeyPatch.context() as patch:
        make_quick(patch, folder / "cache")
        return export_bundle(options(folder, calibrate=images, evaluate=images))


def quiet() -> Console:
    return Console(file=io.StringIO(), width=400)


def verdicts(manifest: Manifest) -> dict[str, tuple[bool, str]]:
    return {variant.file: (variant.serve, variant.reason) for variant in manifest.variants}


def left_behind(tmp_path) -> list[str]:
    return [str(path) for path in (tmp_path / "store").rglob("*") if path.is_file()]


def test_a_bundle_has_all_that_serving_needs(whole):
    assert whole.parts[-3:] == ("store", "colours", "1")
    bundle = open_bundle(whole)
    variants = ["fp16.onnx", "fp32.onnx", "fp8.onnx", "int8-cpu.onnx", "int8-trt.onnx"]
    assert sorted(bundle.manifest.files) == sorted(
        ["canary.safetensors", "export.yaml", *variants, "labels.txt", "report.html"]
    )
    assert (whole / "labels.txt").read_text() == "red\nblue\n"
    spec = bundle.manifest.spec
    assert (spec.name, spec.max_batch_size, spec.labels) == ("colours", 4, ("red", "blue"))
    assert [(t.name, t.dtype, t.shape) for t in spec.inputs] == [("images", "UINT8", (8, 8, 3))]
    assert [(t.name, t.dtype, t.shape) for t in spec.outputs] == [("logits", "FP32", (2,))]
    for variant in bundle.manifest.variants:
        assert variant.accuracy.top1 == 1.0
        assert [(one.label, one.images, one.recall) for one in variant.accuracy.per_class] == [
            ("red", 12, 1.0),
            ("blue", 12, 1.0),
        ]
        # Only what runs on this device was timed on it.
        assert (variant.latency is not None) == (variant.target == "cpu")
    canary = bundle.canary()
    assert 8 <= canary.samples <= 32
    means = canary.inputs["images"].reshape(canary.samples, -1, 3).mean(axis=1)[:, [0, 2]] / 255
    np.testing.assert_allclose(canary.outputs["logits"], means, rtol=1e-5)


def test_provenance_names_sources_and_hashes_but_no_folder_of_this_machine(whole):
    origin = open_bundle(whole).manifest.provenance
    assert origin.source == "net.py:make"
    assert origin.preprocessing == "--preprocess unit (the user's)"
    assert (origin.calibration.source, origin.calibration.images) == ("colour-photos", 24)
    assert origin.calibration.sha256 != origin.evaluation.sha256
    assert {"convoy", "python", "torch", "onnx", "onnxruntime", "int8 weights"} <= set(origin.tools)
    assert not re.search(rb"/(tmp|home|root|usr)/", (whole / "manifest.json").read_bytes())


def test_a_precision_asked_for_by_name_and_refused_is_a_failed_job(tmp_path, data, monkeypatch):
    """Every variant but fp32 loses 1.2 points, whatever it answers."""
    real = proof.measure_accuracy

    def measured_with_loss(*arguments, **options):
        exact, *scores = real(*arguments, **options)
        return exact, *(replace(score, accuracy=replace(score.accuracy, loss_points=1.2)) for score in scores)

    monkeypatch.setattr(proof, "measure_accuracy", measured_with_loss)
    console = quiet()
    call = options(tmp_path, calibrate=data, evaluate=data, precisions="int8")
    with pytest.raises(JobError, match=r"published without what --precisions asked for: int8-cpu.onnx loses 1.20"):
        run(call, console)
    assert "published" in console.file.getvalue()
    assert not open_bundle(tmp_path / "store" / "colours" / "1").manifest.variant("int8-cpu.onnx").serve
    run(replace(call, precisions=None), console)


def test_a_strict_gate_wants_proof(tmp_path, data, monkeypatch):
    real = profile.measure_latencies

    def measured(candidates, progress):
        reference, *others = real(candidates, progress)
        return reference, *(table and replace(table, speedup=Interval(3.0, 2.9, 3.1)) for table in others)

    monkeypatch.setattr(profile, "measure_latencies", measured)
    call = options(tmp_path, calibrate=data, evaluate=data, strict_gate=True, precisions="int8")
    with pytest.raises(JobError, match="not proved with 24 images, and --strict-gate wants it proved"):
        run(call, quiet())
    proved = replace(call, accuracy_budget_points=15.0)
    manifest = open_bundle(run(proved, quiet())).manifest
    serve, reason = verdicts(manifest)["int8-cpu.onnx"]
    assert serve
    assert "(loss below 12.12 points at 95 % confidence), within the budget of 15" in reason


def test_noise_calibrates_only_where_it_is_allowed(tmp_path, data):
    with pytest.raises(UsageError, match="int8 needs real images"):
        export_bundle(options(tmp_path, evaluate=data, precisions="int8"))
    allowed = options(tmp_path, evaluate=data, allow_random_calibration=True)
    manifest = open_bundle(export_bundle(allowed)).manifest
    assert list(verdicts(manifest)) == ["fp32.onnx", "fp16.onnx", "int8-cpu.onnx", "int8-trt.onnx", "fp8.onnx"]
    assert manifest.provenance.calibration.source == "random numbers"


def test_without_labelled_images_only_fp32_serves(tmp_path, data):
    manifest = open_bundle(export_bundle(options(tmp_path, calibrate=data))).manifest
    assert "held-out images" in verdicts(manifest)["fp32.onnx"][1]
    serve, reason = verdicts(manifest)["int8-cpu.onnx"]
    assert not serve
    assert reason == (
        "not verified on labels: agrees with fp32 on 100.0 % of some samples; export with --evaluate to let it serve"
    )


def test_images_that_are_calibrated_and_evaluated_on_are_refused(tmp_path, data):
    other = write_images(tmp_path / "others", per_class=3)
    (other / "test" / "red" / "0.png").write_bytes((tmp_path / "colour-photos/calibration/red/0.png").read_bytes())
    with pytest.raises(JobError, match=r"both calibrated and evaluated on: red/0.png"):
        export_bundle(options(tmp_path, calibrate=data, evaluate=str(other)))
    assert left_behind(tmp_path) == []


@pytest.mark.parametrize("where", ["convoy.export.assemble.shutil.copyfile", "convoy.export.variants.making.prepare"])
def test_a_full_disk_leaves_no_partial_bundle(tmp_path, data, monkeypatch, where):
    monkeypatch.setattr(where, Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
    with pytest.raises(JobError, match=r"the disk of .* is full; free some space"):
        export_bundle(options(tmp_path, calibrate=data, evaluate=data))
    assert left_behind(tmp_path) == []


@pytest.mark.parametrize(
    "where",
    [
        "convoy.export.command.to_onnx",
        "convoy.export.command.check_against_torch",
        "convoy.export.variants.making.collect",
        "convoy.export.proof.proving.measure_accuracy",
        "convoy.export.command.make_canary",
    ],
)
def test_an_interrupt_leaves_nothing(tmp_path, data, monkeypatch, where):
    monkeypatch.setattr(where, Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        export_bundle(options(tmp_path, calibrate=data, evaluate=data))
    assert not (tmp_path / "store").exists()


def test_a_pipe_gets_the_table_and_no_bars(tmp_path, data):
    console = Console(file=io.StringIO(), width=80)
    run(options(tmp_path, calibrate=data, evaluate=data), console)
    shown = console.file.getvalue()
    assert "Measuring latency" not in shown
    assert "\u2501" not in shown
    rows = [line.rstrip() for line in shown.splitlines()]
    assert any(row.startswith("fp32.onnx ") and row.endswith(" yes") for row in rows)
    # What only a GPU would serve is not served here.
    assert any(row.startswith("fp16.onnx ") and row.endswith(" on GPU") for row in rows)


def test_what_fails_the_proof_is_not_published(tmp_path, data):
    call = options(tmp_path, calibrate=data, evaluate=data)
    (tmp_path / "labels.txt").write_text("blue\nred\n")  # not the order of the network's outputs
    with pytest.raises(JobError, match=r"nothing was published: 0\.00 % of 24 images .* swapped: 'blue' and 'red'"):
        export_bundle(call)
    assert left_behind(tmp_path) == []


def test_a_least_accuracy_that_is_missed_fails_the_job(tmp_path, data, monkeypatch):
    real = command.observe
    monkeypatch.setattr(command, "_FIRST_LOOK_IMAGES", 10)
    looks = []
    monkeypatch.setattr(command, "observe", lambda *given: looks.append(given[1].count) or real(*given))
    (tmp_path / "colour-photos/test/red/0.png").write_bytes((tmp_path / "colour-photos/train/blue/0.png").read_bytes())
    with pytest.raises(
        JobError, match=r"95\.83 % of 24 images are right; --min-accuracy wants 96 %; pass --force to publish it anyway"
    ):
        export_bundle(options(tmp_path, evaluate=data, min_accuracy_percent=96))
    assert looks == [10]
    assert left_behind(tmp_path) == []


def test_the_best_file_that_was_tried_is_published_with_the_trail(tmp_path, data, monkeypatch):
    """Every further look finds a worse file: the first one must lie in the bundle, and be called what it is."""
    looks: list[bytes] = []
    real = proof.measure_accuracy

    def worse_and_worse(candidates, *arguments, **given):
        scores = real(candidates, *arguments, **given)
        if len(candidates) == 2:
            looks.append(candidates[1].path.read_bytes())
        points = 20.0 + 10 * len(looks)
        return scores[0], *(replace(one, accuracy=replace(one.accuracy, loss_points=points)) for one in scores[1:])

    monkeypatch.setattr(proof, "measure_accuracy", worse_and_worse)
    bundle = open_bundle(export_bundle(options(tmp_path, calibrate=data, evaluate=data)))
    int8 = bundle.manifest.variant("int8-cpu.onnx")
    assert int8.accuracy.loss_points == 20.0
    assert looks
    assert bundle.path("int8-cpu.onnx").read_bytes() not in looks[:1]
    assert (int8.serve, int8.is_recovered, int8.kept_layers) == (False, False, 0)
    assert f"the best of {len(int8.trade_offs)} files that were tried, with 0 layers" in int8.reason
    report = (bundle.folder / "report.html").read_text()
    assert "Not recovered: no file that was tried passes the gate." in report
    assert "0, published" in report


def test_bf16_that_nobody_asked_for_and_no_engine_takes_is_left_out_with_a_remark(tmp_path, data, monkeypatch):
    refuse = Mock(side_effect=BundleError("fp32.onnx: OpenVINO cannot load it (no such operator)"))
    monkeypatch.setattr("convoy.export.variants.precision.has_bf16", lambda: True)
    row = next(row for row in ROWS if row.name == "openvino")
    able = replace(row, probe=lambda machine: (True, ""), open=refuse)
    monkeypatch.setattr("convoy.export.variants.precision.ROWS", (REFERENCE_ROW, able))
    manifest = open_bundle(export_bundle(options(tmp_path, calibrate=data, evaluate=data))).manifest
    assert "bf16.onnx" not in verdicts(manifest)
    assert "no bf16.onnx: fp32.onnx: OpenVINO cannot load it" in manifest.variants[0].reason
    with pytest.raises(JobError, match=r"asked for: no bf16\.onnx: .*OpenVINO cannot load it"):
        run(options(tmp_path, calibrate=data, evaluate=data, precisions="bf16"), quiet())


# What only OpenVINO runs is made of other networks than this one.
OTHERS = [recipe for recipe in RECIPES if recipe.make is not None and recipe.target != "openvino"]


def failing(monkeypatch, files, error, step):
    """Recipes of these files raise while they are made, opened, run or timed."""

    def fail(*_, **__):
        raise error

    if step == "make":
        made = tuple(replace(one, make=fail) if one.file in files else one for one in RECIPES)
        monkeypatch.setattr(command, "select", lambda *_, **__: tuple(one for one in made if one.precision != "bf16"))
        return
    owner, name, recipes_of = {
        "time": (profile, "measure_latencies", lambda candidates, _: [one.recipe for one in candidates]),
        "open": (variants_file, "open_engine", lambda spec, recipe, *_: [recipe]),
        "answer": (variants_file.OpenVariant, "answers", lambda variant, _: [variant.recipe]),
    }[step]
    real = getattr(owner, name)
    monkeypatch.setattr(
        owner,
        name,
        lambda *given: fail() if any(one.file in files for one in recipes_of(*given)) else real(*given),
    )


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (
            ValueError("The truth value of an array\nis ambiguous"),
            "ValueError: The truth value of an array is ambiguous",
        ),
        (MemoryError(), "there was not enough memory for it"),
        (JobError("it cannot be made"), "it cannot be made"),
        (EngineFailure("the kernel died"), "EngineFailure: the kernel died"),
        (AssertionError(), "AssertionError"),
        (OSError("a library is missing"), "OSError: a library is missing"),
        (RecursionError("too deep"), "RecursionError: too deep"),
        (BundleError("it does not load"), "it does not load"),
    ],
    ids=lambda one: type(one).__name__,
)
def test_a_precision_that_cannot_be_made_does_not_take_the_others_with_it(tmp_path, data, monkeypatch, error, shown):
    failing(monkeypatch, {"int8-cpu.onnx"}, error, "make")
    console = quiet()
    folder = run(options(tmp_path, calibrate=data, evaluate=data), console)
    variants = open_bundle(folder).manifest.variants
    assert [one.file for one in variants] == ["fp32.onnx", "fp16.onnx", "int8-trt.onnx", "fp8.onnx"]
    for told in (variants[0].reason, console.file.getvalue(), (folder / "report.html").read_text()):
        assert f"no int8-cpu.onnx: {shown}" in told


# Each file and each step once: how all files fail in each step is the next test's.
@pytest.mark.parametrize(
    ("recipe", "step"),
    list(zip(OTHERS, cycle(["make", "time", "open", "answer"]), strict=False)),
    ids=lambda value: getattr(value, "file", value),
)
def test_no_file_takes_the_others_with_it_wherever_it_fails(tmp_path, data, monkeypatch, recipe, step):
    failing(monkeypatch, {recipe.file}, RuntimeError("not this one"), step)
    manifest = open_bundle(export_bundle(options(tmp_path, calibrate=data, evaluate=data))).manifest
    left = {one.file for one in OTHERS} - {recipe.file}
    assert {one.file for one in manifest.variants} == {"fp32.onnx"} | left
    assert f"no {recipe.file}: RuntimeError: not this one" in manifest.variants[0].reason


@pytest.mark.parametrize("step", ["make", "open", "answer"])
def test_where_nothing_else_can_be_made_fp32_is_published_and_what_was_named_is_missed(
    tmp_path, data, monkeypatch, step
):
    failing(monkeypatch, {one.file for one in OTHERS}, RuntimeError("none of them"), step)
    call = options(tmp_path, calibrate=data, evaluate=data, precisions="int8,fp16")
    console = quiet()
    run(replace(call, precisions=None), quiet())
    with pytest.raises(JobError, match=r"published without what --precisions asked for: no fp16\.onnx and no int8-cpu"):
        run(call, console)
    assert [one.file for one in open_bundle(tmp_path / "store/colours/2").manifest.variants] == ["fp32.onnx"]
    assert "none of them" in console.file.getvalue()


def test_what_fails_for_the_reference_is_nobody_elses_fault(tmp_path, data, monkeypatch):
    failing(monkeypatch, {"fp32.onnx"}, EngineFailure("the kernel died"), "answer")
    with pytest.raises(JobError, match="the kernel died"):
        export_bundle(options(tmp_path, calibrate=data, evaluate=data))
    assert left_behind(tmp_path) == []
