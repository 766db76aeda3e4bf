"""Networks that segment and detect, over HTTP, in Python and from the command line: the answers that people expect."""

from __future__ import annotations

import io
import json
import threading
from base64 import b64encode
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

import convoy
from convoy.app.pictures import answering
from convoy.app.ray.handle import HandleCalls
from convoy.models.answers import Mask
from convoy.models.errors import ImageError, InvalidRequest
from convoy.models.tasks import DetectionOutputs
from tests.support.pictures import saved
from tests.support.servers import Server, check_ended, run_convoy, start_server
from tests.support.stores import StoreFolder
from tests.support.task_models import FixedOutput, add_colours, add_detector, cropped, painted, stretched
from tests.support.wire import check_refused

RGB = {"black": (0, 0, 0), "red": (255, 0, 0), "green": (0, 255, 0), "blue": (0, 0, 255)}
# In a network's input of 32 x 64 pixels: two of a class that overlap, one of another class in the same place.
BOXES = np.array([[8, 4, 24, 20], [9, 4, 25, 20], [8, 4, 24, 20], [-9, 30, 70, 99]], np.float32)
SCORES = np.array([[0.9, 0.0], [0.8, 0.01], [0.0, 0.7], [0.0, 0.3]], np.float32)
RAW = DetectionOutputs("boxes", "scores", iou_threshold=0.5)
# The same four with masks, the upper half and everything, and with keypoints.
SHAPED = DetectionOutputs("boxes", layout="yolo_v8_seg", prototypes="prototypes", threshold=0.25, iou_threshold=0.5)
POSED = DetectionOutputs("boxes", layout="yolo_v8_pose", keypoints=(2, 3), threshold=0.25, iou_threshold=0.5)
CENTRED = np.concatenate([(BOXES[:, :2] + BOXES[:, 2:]) / 2, BOXES[:, 2:] - BOXES[:, :2], SCORES], axis=1)
COEFFICIENTS = np.array([[1, 0], [1, 0], [0, 1], [0, 1]], np.float32)
PROTOTYPES = np.stack([np.repeat([1, -1], 4).reshape(8, 1) * np.ones((8, 16)), np.ones((8, 16))]).astype(np.float32)
POINTS = np.tile(np.array([8, 4, 0.5, 64, 40, 0.25], np.float32), (4, 1))
FINAL = DetectionOutputs("boxes", "scores", labels="labels", count="count")


@pytest.fixture(scope="module")
def filled_store(shared_store: StoreFolder) -> StoreFolder:
    root = shared_store.root
    add_colours(root, "stretched", stretched(30, 60))
    add_colours(root, "cropped", cropped(40, 32, 32))
    add_colours(root, "tensors", stretched(30, 60), task="none", segmentation=None)
    raw = [FixedOutput("boxes", BOXES), FixedOutput("scores", SCORES)]
    add_detector(root, "raw", stretched(32, 64), RAW, raw, labels=("cat", "dog"))
    final = [
        FixedOutput("count", np.array([3], np.int64)),
        FixedOutput("boxes", BOXES),
        FixedOutput("labels", np.array([1, 0, -1, 1], np.int64)),
        FixedOutput("scores", np.array([0.6, 0.5, 0.9, 0.9], np.float32)),
    ]
    add_detector(root, "final", cropped(40, 32, 40), FINAL, final)
    add_detector(root, "alone", stretched(32, 64), RAW, raw, max_batch_size=0)
    boxes = {"shaped": COEFFICIENTS, "posed": POINTS}
    of_boxes = {
        name: FixedOutput("boxes", np.concatenate([CENTRED, more], axis=1).T.copy()) for name, more in boxes.items()
    }
    names = {"labels": ("cat", "dog")}
    add_detector(
        *(root, "shaped", stretched(32, 64), SHAPED, [of_boxes["shaped"], FixedOutput("prototypes", PROTOTYPES)]),
        **names,  # type: ignore[arg-type]
    )
    add_detector(root, "posed", stretched(32, 64), POSED, [of_boxes["posed"]], **names)  # type: ignore[arg-type]
    add_detector(root, "flags", stretched(32, 64), RAW, raw, task="multilabel", detection=None, activation="none")
    return shared_store


@pytest.fixture(scope="module")
def server(filled_store: StoreFolder) -> Iterator[Server]:
    with start_server(store=filled_store.root) as server:
        yield server


@pytest.fixture(scope="module")
def engine(filled_store: StoreFolder) -> Iterator[convoy.Engine]:
    with convoy.Engine(filled_store.root, engine="cpu") as engine:
        yield engine


def flag(width: int, height: int, *colours: str) -> Image.Image:
    """Upright stripes of one width."""
    image = Image.new("RGB", (width, height))
    for index, colour in enumerate(colours):
        image.paste(RGB[colour], (index * width // len(colours), 0, (index + 1) * width // len(colours), height))
    return image


# Segmentation


def test_a_class_map_has_the_size_of_the_picture(server: Server) -> None:
    document = server.post(
        "/predictions/stretched", content=saved(flag(120, 50, "red", "black", "blue", "blue"))
    ).json()
    assert (document["model"], document["version"]) == ("stretched", "1")
    assert set(document["timing_ms"]) == {"decode_wait", "decode", "queue", "compute", "total"}
    segmentation = document["segmentation"]
    assert [(one["class_id"], one["label"], one["share"]) for one in segmentation["classes"]] == [
        (0, "black", 0.25),
        (1, "red", 0.25),
        (3, "blue", 0.5),
    ]
    assert segmentation["unseen_share"] == 0
    expected = np.repeat([[1] * 30 + [0] * 30 + [3] * 60], 50, axis=0)
    assert painted(segmentation).tolist() == expected.tolist()
    assert segmentation["classes"][1]["rle"]["counts"] == [0, 1500, 4500]


@pytest.mark.parametrize(
    ("query", "accept", "is_png"),
    [
        ("", "image/png", True),
        ("?format=png", "application/json", True),
        ("", "image/png;q=0.5, application/json", False),
        ("", "application/json;q=0.5, image/png", True),
        ("", "*/*", False),
        ("?format=json", "image/png", False),
    ],
)
def test_who_asks_for_a_png_gets_one(server: Server, query: str, accept: str, is_png: bool) -> None:
    picture = saved(flag(40, 20, "green", "red"))
    answer = server.post(
        f"/predictions/stretched{query}", content=picture, headers={"accept": accept, "accept-encoding": "gzip"}
    )
    assert answer.headers["content-type"] == ("image/png" if is_png else "application/json")
    if is_png:
        assert "content-encoding" not in answer.headers
        assert "total;dur=" in answer.headers["server-timing"]
        with Image.open(io.BytesIO(answer.content)) as image:
            assert np.asarray(image).tolist() == [[2] * 20 + [1] * 20] * 20


def test_what_the_crop_does_not_show_is_unseen_and_the_picture_upright(server: Server) -> None:
    """An upright picture of 40 x 80 is scaled to 40 x 80, of which the middle 32 x 32 is seen."""
    turned = Image.Exif()
    turned[0x0112] = 6  # to be turned by 90 degrees clockwise
    upright = Image.new("RGB", (40, 80), RGB["green"])
    upright.paste(RGB["blue"], (0, 40, 40, 80))
    lying = saved(upright.transpose(Image.Transpose.ROTATE_90), "PNG", exif=turned)
    segmentation = server.post("/predictions/cropped", content=lying).json()["segmentation"]
    expected = np.full((80, 40), 255)
    expected[24:40, 4:36], expected[40:56, 4:36] = 2, 3
    assert painted(segmentation).tolist() == expected.tolist()
    assert segmentation["unseen_share"] == pytest.approx(1 - 32 * 32 / 3200)
    answer = server.post("/predictions/cropped?format=png", content=lying)
    assert np.asarray(Image.open(io.BytesIO(answer.content))).tolist() == expected.tolist()


def test_several_pictures_have_a_map_each_and_no_png(server: Server) -> None:
    files = [("file", saved(flag(30, 20, colour))) for colour in ("red", "blue")] + [("file", b"no picture")]
    results = server.post("/predictions/stretched", files=files).json()["results"]
    assert [one["class_id"] for result in results[:2] for one in result["segmentation"]["classes"]] == [1, 3]
    assert "not an image" in results[2]["error"]
    check_refused(server.post("/predictions/stretched?format=png", files=files), 400, "one image")


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("stretched?format=gif", "format must be json or png"),
        ("flags?format=gif", "format must be json, got"),
        ("raw?format=png", "format=png is for class maps, but 'raw' has the task 'detect'; use json or coco"),
        ("stretched?format=coco", "format=coco is for boxes, but 'stretched' has the task 'segment'; use json or png"),
        ("flags?format=coco", "format=coco is for boxes"),
        *[(f"raw?iou={bad}", "iou must be a number above 0 and at most 1") for bad in ("0", "1.01", "-1", "x", "nan")],
        ("final?iou=0.5", "the boxes of 'final' leave its graph final"),
        ("flags?iou=0.5", "iou is for boxes, but 'flags' has the task 'multilabel'"),
        ("stretched?iou=0.5", "iou is for boxes"),
        ("shaped?masks=png", "masks must be rle, polygons or none, got 'png'"),
        ("shaped?masks=", "masks must be rle, polygons or none, got ''"),
        ("shaped?mask=rle", "did you mean masks?"),
        ("posed?masks=rle", "masks is for models that give a mask of each object, but 'posed' has boxes without masks"),
        ("stretched?masks=none", "but 'stretched' has the task 'segment'; remove it"),
        ("stretched?top_k=3", "top_k is for classes"),
        ("stretched?threshold=0.1", "threshold"),
        ("raw?threshold=2x", "threshold"),
        ("raw?threshold=nan", "threshold"),
        ("raw?top_k=0", "top_k"),
    ],
)
def test_words_that_mean_nothing_to_the_task_are_refused(server: Server, query: str, words: str) -> None:
    check_refused(server.post(f"/predictions/{query}", content=saved(flag(30, 20, "red"))), 400, words)


# Detection


def test_boxes_are_in_pixels_of_the_picture(server: Server) -> None:
    """Of one class the better of two that overlap stays, and what is beyond the picture is cut off."""
    picture = saved(Image.new("RGB", (128, 32)))
    answer = server.post("/predictions/raw", content=picture)
    assert answer.json()["detections"] == [
        {"class_id": 0, "label": "cat", "score": 0.9, "box": {"x1": 16, "y1": 4, "x2": 48, "y2": 20}},
        {"class_id": 1, "label": "dog", "score": 0.7, "box": {"x1": 16, "y1": 4, "x2": 48, "y2": 20}},
        {"class_id": 1, "label": "dog", "score": 0.3, "box": {"x1": 0, "y1": 30, "x2": 128, "y2": 32}},
    ]
    order = [answer.text.index(f'"{name}"') for name in ("class_id", "label", "score", "box", "x1", "y1", "x2", "y2")]
    assert order == sorted(order)
    # The two cats overlap by 15 / 17.
    for query, scores in (
        *(("threshold=0.5", [0.9, 0.7]), ("top_k=1", [0.9]), ("threshold=0.95", [])),
        *(("iou=0.9", [0.9, 0.8, 0.7, 0.3]), ("iou=0.85&threshold=0.5", [0.9, 0.7]), ("iou=1", [0.9, 0.8, 0.7, 0.3])),
    ):
        found = server.post(f"/predictions/raw?{query}", content=picture).json()["detections"]
        assert [one["score"] for one in found] == pytest.approx(scores)


def test_boxes_of_a_cropped_picture_that_the_graph_has_suppressed(server: Server) -> None:
    """A picture of 160 x 80 is scaled to 80 x 40, of which the network sees 40 x 32 from (20, 4) on."""
    found = server.post("/predictions/final", content=saved(Image.new("RGB", (160, 80)))).json()["detections"]
    assert [(one["class_id"], one["label"], one["score"], list(one["box"].values())) for one in found] == [
        (1, None, pytest.approx(0.6), [56, 16, 88, 48]),
        (0, None, pytest.approx(0.5), [58, 16, 90, 48]),
    ]


def test_a_detector_that_cannot_be_batched_answers_the_same(server: Server) -> None:
    picture = saved(Image.new("RGB", (128, 32)))
    documents = [server.post(f"/predictions/{name}", content=picture).json() for name in ("raw", "alone")]
    raw, alone = ([(one["box"], one["class_id"]) for one in document["detections"]] for document in documents)
    assert raw == alone


def test_boxes_as_results_of_coco(server: Server) -> None:
    """As its page says: [left, top, width, height], and the image by its number."""
    picture = saved(Image.new("RGB", (128, 32)))
    expected = [
        {"image_id": 0, "category_id": 0, "bbox": [16, 4, 32, 16], "score": 0.9},
        {"image_id": 0, "category_id": 1, "bbox": [16, 4, 32, 16], "score": 0.7},
    ]
    url = "/predictions/raw?format=coco&threshold=0.5"
    assert server.post(url, content=picture).json() == expected

    def named(*names: str) -> list[tuple[str, tuple[str, bytes]]]:
        return [("file", (name, picture)) for name in names]

    records = server.post(url, files=named("val/000000397133.jpg", "straße.v2.png", "9" * 30 + ".png")).json()
    ids = [one["image_id"] for one in records]
    assert ids == [397133, 397133, "straße.v2", "straße.v2", "9" * 30, "9" * 30]
    assert [{**one, "image_id": 0} for one in records] == expected * 3
    in_base64 = b64encode(picture).decode()
    records = server.post(url, json={"instances": [in_base64, in_base64]}).json()
    assert [one["image_id"] for one in records] == [0, 0, 1, 1]
    check_refused(server.post(url, files=named("a.png", "b/a.jpg")), 400, "several are named 'a'")
    broken = [*named("7.png"), ("file", ("8.png", b"no picture"))]
    check_refused(server.post(url, files=broken), 400, "the file '8' failed", "not an image", "all files or none")


def test_objects_have_masks_in_the_asked_form(server: Server) -> None:
    """A picture of 128 x 32, twice as wide as the input. The upper half of the first object's box is in its mask."""
    picture = saved(Image.new("RGB", (128, 32)))
    url, plain = "/predictions/shaped?threshold=0.5", "/predictions/raw?threshold=0.5"
    first, second = server.post(url, content=picture).json()["detections"]
    upper, whole = (painted_mask(one["mask"]) for one in (first, second))
    expected = np.zeros((32, 128), bool)
    expected[4:16, 16:48] = True
    assert np.array_equal(upper, expected)
    expected[16:20, 16:48] = True
    assert np.array_equal(whole, expected)
    first, second = server.post(f"{url}&masks=polygons", content=picture).json()["detections"]
    assert (first["polygons"], "mask" in first) == ([[16, 4, 48, 4, 48, 16, 16, 16]], False)
    without = server.post(f"{url}&masks=none", content=picture).json()["detections"]
    assert without == server.post(plain, content=picture).json()["detections"]
    (record, _) = server.post(f"{url}&format=coco", content=picture).json()
    assert np.array_equal(painted_mask(record["segmentation"]), upper)
    (record, _) = server.post(f"{url}&format=coco&masks=polygons", content=picture).json()
    assert record["segmentation"] == first["polygons"]
    files = [("file", ("a.png", picture)), ("file", ("b.png", picture))]
    results = server.post(f"{url}&masks=polygons", files=files).json()["results"]
    assert [one["detections"][0]["polygons"] for one in results] == [first["polygons"]] * 2


def painted_mask(mask: dict[str, Any]) -> np.ndarray:
    height, width = mask["size"]
    return Mask(height, width, mask["counts"]).array()


def test_objects_have_keypoints_in_pixels_of_the_picture(server: Server) -> None:
    picture = saved(Image.new("RGB", (128, 32)))
    first = server.post("/predictions/posed?top_k=1", content=picture).json()["detections"][0]
    # The second lies beyond the lower right corner.
    assert first["keypoints"] == [{"x": 16, "y": 4, "score": 0.5}, {"x": 128, "y": 32, "score": 0.25}]
    (record,) = server.post("/predictions/posed?top_k=1&format=coco", content=picture).json()
    assert record["keypoints"] == [16, 4, 0.5, 128, 32, 0.25]


# The others


def test_a_model_of_which_nothing_is_known_takes_tensors(server: Server) -> None:
    check_refused(
        server.post("/predictions/tensors", content=saved(flag(30, 20, "red"))),
        400,
        "has the task 'none'",
        "/v2/models/tensors/versions/1/infer",
    )
    images = np.asarray(flag(60, 30, "red"))[None]
    inputs = [{"name": "images", "shape": images.shape, "datatype": "UINT8", "data": images.reshape(-1).tolist()}]
    outputs = server.post("/v2/models/tensors/infer", json={"inputs": inputs}).json()["outputs"]
    assert outputs[0]["shape"] == [1, 4, 30, 60]


def test_labels_that_stand_each_for_itself_are_answered_by_threshold(server: Server) -> None:
    picture = saved(Image.new("RGB", (20, 20)))
    found = server.post("/predictions/flags?threshold=20", content=picture).json()["predictions"]
    assert [one["score"] for one in found] == [99, 70, 30, 25, 24, 24, 20, 20, 20]


# Python


def test_python_gets_the_same_map(engine: convoy.Engine, server: Server, tmp_path: Path) -> None:
    picture = flag(120, 50, "red", "black", "blue", "blue")
    found = engine.segment("stretched", picture)
    document = server.post("/predictions/stretched", content=saved(picture)).json()["segmentation"]
    assert found.class_map.tolist() == painted(document).tolist()
    assert [(one.class_id, one.label, one.share) for one in found.classes] == [
        (one["class_id"], one["label"], one["share"]) for one in document["classes"]
    ]
    assert found.timing_ms is not None
    good, bad = engine.segment("stretched", [np.asarray(picture), b"no picture"])
    assert good.class_map.tolist() == found.class_map.tolist()
    assert (type(bad.error), bad.class_map.size) == (ImageError, 0)


def test_python_gets_the_same_boxes(engine: convoy.Engine, server: Server) -> None:
    picture = Image.new("RGB", (128, 32))
    document = server.post("/predictions/raw?threshold=0.5", content=saved(picture)).json()["detections"]
    for found in (engine.detect("raw", picture, threshold=0.5), *engine.detect("raw", [picture], threshold=0.5)):
        assert [one.document() for one in found.detections] == document
        x1, y1, x2, y2 = found.detections[0].box
        assert (x1, y1, x2, y2) == (16, 4, 48, 20)
    assert [one.score for one in engine.detect("raw", picture, iou=0.9).detections][1] == pytest.approx(0.8)
    for model, iou, words in (("raw", 0.0, "above 0"), ("raw", "x", "above 0"), ("final", 0.5, "graph final")):
        with pytest.raises(InvalidRequest, match=words):
            engine.detect(model, picture, iou=iou)  # type: ignore[arg-type]
    assert len(engine.detect("raw", picture, top_k=1).detections) == 1


def test_python_gets_the_same_masks_and_keypoints(engine: convoy.Engine, server: Server) -> None:
    picture = Image.new("RGB", (128, 32))
    for model in ("shaped", "posed"):
        found = engine.detect(model, picture)
        document = server.post(f"/predictions/{model}", content=saved(picture)).json()["detections"]
        assert [one.document() for one in found.detections] == document
        with convoy.Client(server.url) as client:
            assert client.detect(model, picture).detections == found.detections
    mask = engine.detect("shaped", picture, top_k=1).detections[0].mask
    assert mask is not None
    assert mask.array().sum() == 12 * 32


@pytest.mark.parametrize("asked", ["engine", "http", "grpc"])
def test_python_asks_for_a_form_of_masks(engine: convoy.Engine, server: Server, asked: str) -> None:
    url = server.url if asked == "http" else f"grpc://{server.grpc_address}"
    with nullcontext(engine) if asked == "engine" else convoy.Client(url) as one:
        outlined = one.detect("shaped", Image.new("RGB", (128, 32)), masks="polygons").detections[0]
        assert (outlined.polygons, outlined.mask) == ([[16, 4, 48, 4, 48, 16, 16, 16]], None)
        bare = one.detect("shaped", Image.new("RGB", (128, 32)), masks="none").detections[0]
        assert (bare.polygons, bare.mask) == (None, None)
        for model, form, words in (("raw", "none", "boxes without masks"), ("shaped", "png", "rle, polygons or none")):
            with pytest.raises(InvalidRequest, match=words):
                one.detect(model, Image.new("RGB", (128, 32)), masks=form)


@pytest.mark.parametrize(
    ("model", "method", "words"),
    [
        ("raw", "predict", r"'raw' has the task 'detect'; call detect\(\)"),
        ("stretched", "detect", r"'stretched' has the task 'segment'; call segment\(\)"),
        ("flags", "segment", r"'flags' has the task 'multilabel'; call predict\(\)"),
        ("tensors", "predict", r"pass tensors to infer\(\)"),
    ],
)
def test_python_says_how_to_ask_instead(engine: convoy.Engine, model: str, method: str, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        getattr(engine, method)(model, Image.new("RGB", (20, 20)))


def test_reading_the_outputs_is_done_by_the_decoders(engine: convoy.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not on the event loop, which others wait for."""
    threads: list[str] = []
    for name in ("segmented", "detections"):
        real = getattr(answering, name)

        def noted(*given: Any, real: Any = real) -> Any:
            threads.append(threading.current_thread().name)
            return real(*given)

        monkeypatch.setattr(answering, name, noted)
    engine.segment("stretched", flag(30, 20, "red"))
    engine.detect("raw", flag(30, 20, "red"))
    assert [name.partition("_")[0] for name in threads] == ["decode", "decode"]


def test_a_handle_of_rays_asks_the_same(engine: convoy.Engine) -> None:
    """Its calls, on the core of an engine and without a cluster."""

    class Here(HandleCalls):
        def __init__(self) -> None:
            self._core, self._asking, self._ways = engine._inside._core, engine._inside, SimpleNamespace(by_handle=0)

    handle, picture = Here(), flag(128, 32, "red", "blue")
    mapped = engine._loop.result(lambda: handle.segment(picture, model="stretched"))
    assert mapped.class_map.tolist() == engine.segment("stretched", picture).class_map.tolist()
    (found,) = engine._loop.result(lambda: handle.detect([picture], model="raw", top_k=1, iou=0.9))
    assert found.detections == engine.detect("raw", picture, top_k=1).detections
    shaped = engine._loop.result(lambda: handle.detect(picture, model="shaped", masks="none"))
    assert {one.mask for one in shaped.detections} == {None}
    assert handle._ways.by_handle == 3
    with pytest.raises(InvalidRequest, match=r"call detect\(\)"):
        engine._loop.result(lambda: handle.predict(picture, model="raw"))


# The command line


def test_predict_prints_boxes_and_classes(server: Server, tmp_path: Path) -> None:
    path = tmp_path / "one.png"
    path.write_bytes(saved(Image.new("RGB", (128, 32))))
    boxes = run_convoy("predict", "raw", str(path), "--url", server.url, "--top-k", "2")
    check_ended(boxes, 0, "16, 4, 48, 20", "dog")
    assert "30, 128" not in boxes.stdout
    line = json.loads(run_convoy("predict", "raw", str(path), "--url", server.url, "--top-k", "1", "--json").stdout)
    box = {"x1": 16, "y1": 4, "x2": 48, "y2": 20}
    assert line["detections"] == [{"class_id": 0, "label": "cat", "score": pytest.approx(0.9), "box": box}]
    path.write_bytes(saved(flag(120, 50, "red", "blue", "blue", "blue")))
    check_ended(run_convoy("predict", "stretched", str(path), "--url", server.url), 0, "75.0 %", "blue")


def test_predict_draws_what_it_finds(server: Server, tmp_path: Path) -> None:
    """In a picture that is enlarged five times; and it says all at once why it cannot."""
    path, out = tmp_path / "one.png", tmp_path / "drawn.png"

    def drawn(model: str, picture: Image.Image, *options: str) -> np.ndarray:
        path.write_bytes(saved(picture))
        done = run_convoy("predict", model, str(path), "--url", server.url, "--draw", str(out), *options)
        check_ended(done, 0, str(path))
        return np.asarray(Image.open(out)).astype(int)

    boxes = drawn("raw", Image.new("RGB", (128, 32)), "--threshold", "0.8", "--iou", "0.9")
    assert boxes.shape == (160, 640, 3)
    assert boxes[50, 80].tolist() == boxes[99, 200].tolist() != [0, 0, 0], (
        "the lines of the left edge and the lower one"
    )
    assert boxes[60, 150].tolist() == boxes[120, 600].tolist() == [0, 0, 0], "what is inside, and what is outside"
    red, _, _, blue = (tuple(RGB[name]) for name in ("red", "black", "black", "blue"))
    blended = drawn("stretched", flag(128, 32, "red", "blue"))
    for x, colour in ((300, red), (600, blue)):
        assert blended[150, x].tolist() != list(colour)
        assert np.abs(blended[150, x] - colour).max() < 200
    assert (drawn("flags", Image.new("RGB", (128, 32)), "--threshold", "90") > 0).any()
    folder = run_convoy("predict", "raw", str(path), str(path), "--url", server.url, "--draw", str(tmp_path))
    check_ended(folder, 2, "--draw is for one image, not 2", "is a folder; pass a file in it")
    nowhere = run_convoy("predict", "raw", str(path), "--url", server.url, "--draw", str(tmp_path / "no" / "a.xyz"))
    check_ended(nowhere, 2, "cannot write files that end in '.xyz'", "a folder that does not exist")
    check_ended(
        run_convoy("predict", "raw", str(path), "--url", server.url, "--draw", str(path)),
        2,
        "overwrite the image itself",
    )
    check_ended(run_convoy("predict", "raw", str(path), "--url", server.url, "--iou", "2"), 2, "--iou must be above 0")


@pytest.mark.parametrize(("model", "options"), [("raw", ()), ("final", ("--threshold", "0.55")), ("alone", ())])
def test_batch_finds_the_boxes_that_the_server_finds(
    server: Server, filled_store: StoreFolder, tmp_path: Path, model: str, options: tuple[str, ...]
) -> None:
    pictures, out = tmp_path / "pictures", tmp_path / "out"
    pictures.mkdir()
    for number in range(11):
        (pictures / f"{number}.png").write_bytes(saved(Image.new("RGB", (20 + 9 * number, 60 - 3 * number))))
    (pictures / "broken.png").write_bytes(b"not a picture")
    command = ("batch", model, str(pictures), "--out", str(out), "--store", str(filled_store.root), *options)
    check_ended(run_convoy(*command), 0)
    table = pa.concat_tables(pq.read_table(part) for part in sorted(out.glob("part-*.parquet")))
    assert table.column_names == ["path", "class_ids", "labels", "scores", "boxes"]
    rows = table.to_pylist()
    assert len(rows) == 11
    for row in rows:
        query = "?threshold=0.55" if options else ""
        answer = server.post(f"/predictions/{model}{query}", content=Path(row["path"]).read_bytes()).json()
        found = answer["detections"]
        assert row["class_ids"] == [one["class_id"] for one in found]
        assert row["labels"] == [one["label"] for one in found]
        assert row["scores"] == pytest.approx([one["score"] for one in found], abs=1e-6)
        boxes = [list(one["box"].values()) for one in found]
        assert np.array(row["boxes"]) == pytest.approx(np.array(boxes), abs=0.01)
    assert pq.read_table(out / "errors.parquet").column("path").to_pylist() == [str(pictures / "broken.png")]


def test_batch_names_what_it_cannot_do(filled_store: StoreFolder, tmp_path: Path) -> None:
    (tmp_path / "one.png").write_bytes(saved(Image.new("RGB", (20, 20))))
    common = (str(tmp_path / "one.png"), "--out", str(tmp_path / "out"), "--store", str(filled_store.root))
    ended = run_convoy("batch", "stretched", *common)
    check_ended(ended, 1, "has the task 'segment', but convoy batch only classifies and detects")
    check_ended(run_convoy("batch", "raw", *common, "--threshold", "2"), 2, "--threshold must be from 0 to 1, got 2")
    check_ended(run_convoy("batch", "flags", *common, "--threshold", "0.5"), 2, "--threshold is for detectors")


# The client


@pytest.mark.parametrize("wire", ["http", "grpc"])
def test_the_client_gives_what_the_engine_gives(server: Server, engine: convoy.Engine, wire: str) -> None:
    picture = flag(121, 50, "red", "blue", "blue", "blue")
    with convoy.Client(server.url if wire == "http" else f"grpc://{server.grpc_address}") as client:
        there, here = client.segment("stretched", picture), engine.segment("stretched", picture)
        np.testing.assert_array_equal(there.class_map, here.class_map)
        assert there.class_map.dtype == np.uint8
        assert (there.classes, there.unseen_share) == (here.classes, pytest.approx(here.unseen_share))
        assert str(there) == "stretched version 1: 2 classes in 121 x 50 pixels\n  blue 75.2 %\n  red 24.8 %"
        picture = Image.new("RGB", (128, 32))
        shown = str(client.detect("raw", picture, top_k=2)).splitlines()
        assert shown == [
            "raw version 1: 2 objects",
            "  cat 0.900 from (16, 4) to (48, 20)",
            "  dog 0.700 from (16, 4) to (48, 20)",
        ]
        assert client.detect("raw", picture).detections == engine.detect("raw", picture).detections
        assert [one.score for one in client.detect("raw", picture, top_k=1).detections] == pytest.approx([0.9])
        assert len(client.detect("raw", picture, iou=0.9).detections) == 4
        with pytest.raises(InvalidRequest, match="iou must be a number above 0"):
            client.detect("raw", picture, iou=2.0)
        with pytest.raises(InvalidRequest, match=r"'raw' has another task; call detect\(\)"):
            client.predict("raw", picture)
        with pytest.raises(InvalidRequest, match="/infer"):
            client.predict("tensors", picture)
