"""One sentence tells what came of an export, whatever came of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_fixtures import full_manifest
from test_export_report import Page

from convoy.export.report.page import render
from convoy.export.report.verdict import verdict_of
from convoy.models.bundle import Accuracy, Interval, Manifest, Variant
from convoy.models.spec import ImageSpec
from convoy.models.tasks import Task

IMAGE = ImageSpec(224, 224, 3, "shorter_side", 256, "bilinear", True, (0.5,) * 3, (0.5,) * 3, "uint8_nhwc")


def manifest_of(*variants: Variant, **changes: object) -> Manifest:
    manifest = full_manifest()
    spec = replace(manifest.spec, image=IMAGE)
    return replace(manifest, spec=spec, variants=variants or manifest.variants, **changes)  # type: ignore[arg-type]


def of_task(task: Task, accuracy: Accuracy | None = None) -> Manifest:
    """Of tensors, with fp32 alone."""
    manifest = full_manifest()
    spec = replace(manifest.spec, task=task, activation="none")
    return replace(manifest, spec=spec, variants=(replace(FP32, accuracy=accuracy),))


FP32, INT8, FP16 = full_manifest().variants
SLOW = replace(INT8, serve=False, passes_gate=True, latency=replace(INT8.latency, speedup=Interval(0.9, 0.8, 1.0)))
POOR = replace(INT8, serve=False, passes_gate=False)
FAST = "CPUs serve int8-cpu.onnx, 2.35 times as fast as fp32 on the export machine (2.25 to 2.44)"
RIGHT = "right on 93.40 % of 1,200 images"


@pytest.mark.parametrize(
    ("manifest", "tone", "sentence"),
    [
        (
            manifest_of(),
            "good",
            f"{FAST}, right on 92.81 % of 1,200 images, 0.59 points less than fp32 (it loses at most 0.97 with 95 %); "
            "GPUs may serve fp16.onnx.",
        ),
        (
            manifest_of(FP32, SLOW),
            "good",
            f"CPUs serve fp32.onnx, {RIGHT}, while int8-cpu.onnx is not faster beyond doubt.",
        ),
        (
            manifest_of(FP32, POOR, replace(SLOW, file="bf16.onnx", target="openvino")),
            "good",
            f"CPUs serve fp32.onnx, {RIGHT}, while bf16.onnx is not faster beyond doubt and int8-cpu.onnx does not "
            "pass the accuracy gate.",
        ),
        (
            manifest_of(FP32, replace(FP16, serve=False, passes_gate=False)),
            "good",
            f"CPUs serve fp32.onnx, {RIGHT}.",
        ),
        (
            manifest_of(FP32, FP16, replace(FP16, file="fp8.onnx"), replace(FP16, file="int8-trt.onnx")),
            "good",
            f"CPUs serve fp32.onnx, {RIGHT}; GPUs may serve fp16.onnx, fp8.onnx and int8-trt.onnx.",
        ),
        (
            manifest_of(
                FP32, replace(INT8, accuracy=replace(INT8.accuracy, loss_points=-0.5, is_proved=False), latency=None)
            ),
            "good",  # of what was not measured nobody can say that it is what serves
            f"CPUs serve fp32.onnx, {RIGHT}.",
        ),
        (
            manifest_of(FP32, replace(INT8, accuracy=replace(INT8.accuracy, loss_points=-0.5, is_proved=False))),
            "doubt",
            f"{FAST}, right on 92.81 % of 1,200 images, 0.50 points more than fp32 (it loses at most 0.97 with "
            "95 %), not proved to be within the budget.",
        ),
        (
            manifest_of(replace(FP32, accuracy=None)),
            "doubt",
            "CPUs serve fp32.onnx, whose accuracy nobody measured, for want of labelled images (--evaluate).",
        ),
        (
            replace(full_manifest(), variants=(replace(FP32, accuracy=None),)),
            "doubt",
            "CPUs serve fp32.onnx, whose accuracy nobody measured, for want of targets (--evaluate).",
        ),
        (
            of_task("none"),
            "doubt",
            "CPUs serve fp32.onnx, whose accuracy nobody measured, "
            "for want of targets (--evaluate FILE.npz and --metric).",
        ),
        (
            of_task("multilabel"),
            "doubt",
            "CPUs serve fp32.onnx, whose accuracy nobody measured, for want of targets (--evaluate FILE.npz).",
        ),
        (
            of_task("none", replace(FP32.accuracy, metric="scores.py:close", top1=-0.25, images=1)),
            "good",
            "CPUs serve fp32.onnx, of scores.py:close -0.25 on 1 sample.",
        ),
        (
            manifest_of(objections=("10.00 % are right: not better than chance", "--min-accuracy wants 50 %")),
            "alarm",
            "resnet should not be served: 10.00 % are right: not better than chance (and 1 more, below).",
        ),
        (
            manifest_of(replace(FP32, serve=False), replace(POOR, reason="it is poor")),
            "alarm",
            "No file of resnet is served (fp32.onnx: because; int8-cpu.onnx: it is poor).",
        ),
        (
            manifest_of(replace(FP32, serve=False), FP16),
            "alarm",
            "GPUs may serve fp16.onnx (fp32.onnx: because; fp16.onnx: because).",
        ),
    ],
)
def test_every_outcome_is_one_sentence(manifest, tone, sentence):
    found = verdict_of(manifest)
    assert (found.tone, found.sentence) == (tone, sentence)


@given(st.lists(st.tuples(st.sampled_from([FP32, INT8, SLOW, POOR, FP16]), st.booleans()), min_size=1, max_size=6))
def test_what_the_sentence_says_is_served_may_serve(drawn):
    variants = tuple(
        replace(variant, file=f"{index}-{variant.file}", serve=serve) for index, (variant, serve) in enumerate(drawn)
    )
    sentence = verdict_of(manifest_of(*variants)).sentence
    served = {variant.file for variant in variants if variant.serve}
    named = {variant.file for variant in variants if f"serve {variant.file}" in sentence}
    assert named <= served
    assert bool(named) == bool(served)


def test_a_model_that_fails_the_absolute_check_raises_an_alarm_before_all_else():
    objection = "10.00 % of 390 images are right: not better than chance beyond doubt"
    page = Page(render(manifest_of(objections=(objection,))))
    (alarm,) = [given for tag, given in page.tags if given.get("role") == "alert"]
    assert alarm["class"] == "banner alarm"
    words = " ".join(page.text.split())
    assert words.index("should not be served: 10.00 %") < words.index("exported 2026")
    assert "verdict good" not in {given.get("class") for _, given in page.tags}
    assert not [given for _, given in Page(render(manifest_of())).tags if given.get("role") == "alert"]
