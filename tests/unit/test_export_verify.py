from __future__ import annotations

import numpy as np
import onnx
import pytest
from export_fixtures import IMAGE, answers, write_images, write_red_or_blue

from convoy.export.data import ImageSet
from convoy.export.progress import SILENT
from convoy.export.proof.verify import check_against_torch, measure_accuracy
from convoy.export.sources.torch_job import one_line
from convoy.export.variants.precision import REFERENCE, Recipe
from convoy.export.variants.variant import opened
from convoy.models.datasets import load
from convoy.models.errors import JobError
from convoy.models.spec import ModelSpec, TensorSpec

SPEC = ModelSpec(
    name="colours",
    inputs=(TensorSpec("images", "UINT8", IMAGE.tensor_shape),),
    outputs=(TensorSpec("logits", "FP32", (2,)),),
    max_batch_size=4,
    image=IMAGE,
    activation="softmax",
    labels=("red", "blue"),
)
SAMPLES = np.random.default_rng(1).integers(0, 256, (7, 8, 8, 3), dtype=np.uint8)


@pytest.fixture
def images(tmp_path):
    dataset = load(str(write_images(tmp_path / "images"))).in_order_of(("red", "blue"))
    return {part: ImageSet("colours", tuple(dataset.part(part)), IMAGE) for part in ("calibration", "test")}


@pytest.fixture
def fp32(tmp_path):
    write_red_or_blue(tmp_path / REFERENCE.file)
    with opened(SPEC, [REFERENCE], tmp_path) as (candidate,):
        yield candidate


def test_a_graph_that_equals_torch_passes_at_every_batch_size(fp32):
    assert check_against_torch(fp32, {"images": SAMPLES}, {"logits": answers(fp32.path, SAMPLES)})["logits"] < 1e-6


def test_one_sample_that_differs_fails_the_export(fp32):
    reference = answers(fp32.path, SAMPLES)
    reference[5] *= 1.001
    with pytest.raises(JobError, match=r"differs from torch by 0.001 at batch size 1"):
        check_against_torch(fp32, {"images": SAMPLES}, {"logits": reference})


def test_only_where_batches_differ_samples_are_said_to_mix(fp32, monkeypatch):
    reference = {"logits": answers(fp32.path, SAMPLES)}
    given = type(fp32).answers
    named = "net.onnx in ONNX Runtime"
    for is_mixed in (True, False):

        def wrong(self, inputs, is_mixed=is_mixed):
            found = given(self, inputs)
            factor = 1.01 if len(inputs["images"]) > 1 or not is_mixed else 1
            return {name: one * np.float32(factor) for name, one in found.items()}

        monkeypatch.setattr(type(fp32), "answers", wrong)
        with pytest.raises(JobError, match=f"differs from {named} by 0.01") as caught:
            check_against_torch(fp32, {"images": SAMPLES}, reference, original=named)
        assert ("mix samples" in str(caught.value)) == is_mixed
        assert "torch" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "limit", "kept"),
    [
        ("one\n  two", 300, "one two"),
        ("A first. A second. A third.", 20, "A first. A second."),
        ("a line\nanother line\na third", 20, "a line another line"),
        ("one sentence that is longer than that. Another.", 10, "one sentence that is longer than that."),
        ("no end at all that anybody could find", 10, "no end at all that anybody could find"),
        ("version 1.2.3 of it. More", 18, "version 1.2.3 of it."),
    ],
)
def test_a_librarys_words_end_where_a_sentence_or_a_line_does(text, limit, kept):
    assert one_line(text, limit) == kept


def test_a_variant_that_is_wrong_on_one_class_loses_half_the_points(tmp_path, fp32, images):
    model = onnx.load(fp32.path)
    head = next(tensor for tensor in model.graph.initializer if tensor.name == "head.bias")
    head.CopyFrom(onnx.numpy_helper.from_array(np.array([9, 0], np.float32), "head.bias"))
    onnx.save(model, tmp_path / "broken.onnx")
    with opened(SPEC, [Recipe("broken.onnx", "int8", "cpu", None)], tmp_path) as (broken,):
        _, score = measure_accuracy([fp32, broken], images["test"], SILENT)
    assert (score.accuracy.top1, score.accuracy.agreement, score.accuracy.loss_points) == (0.5, 0.5, 50.0)


def test_broken_images_are_left_out_until_they_are_too_many(fp32, images):
    broken = images["test"].samples[0].content
    broken.write_bytes(b"not an image")
    with pytest.raises(JobError, match=r"1 of 24 images of colours cannot be read: blue/0.png; remove or repair"):
        measure_accuracy([fp32], images["test"], SILENT)
    many = ImageSet("colours", images["test"].samples * 10, IMAGE)
    many.samples[1].content.write_bytes(many.samples[2].content.read_bytes())
    broken.write_bytes(many.samples[2].content.read_bytes())
    (score,) = measure_accuracy([fp32], many, SILENT)
    assert score.accuracy.images == 240
