"""The page at `/` in a browser, before real servers: what its document says after real traffic, and what it does."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from PIL import Image
from playwright.sync_api import Browser, Locator, Page, Route, expect

from convoy.models.tasks import DetectionOutputs
from tests.support.browser import DESKTOP, PHONE, open_page, start_browser
from tests.support.fake_server import POISON
from tests.support.pictures import saved
from tests.support.servers import Server, rows_request, start_fake_server, start_server, wait_until
from tests.support.stores import DATA, DEMO, StoreFolder, digit
from tests.support.task_models import FixedOutput, add_colours, add_detector, stretched

slow = pytest.mark.slow
INFER = "/v2/models/rows/infer"
# What has something to say of one model, in the order of the columns behind the engine.
REQUESTS, REFUSED, FAILED, P50, P99, IN_FLIGHT, QUEUED, BATCH = range(8)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with start_browser() as browser:
        yield browser


def row(page: Page, name: str) -> Locator:
    """The row of a model, and what it has opened."""
    return page.locator("#models tbody", has=page.locator(f'.model button span[title="{name}"]'))


def figures(page: Page, name: str) -> list[str]:
    return row(page, name).locator("tr.model td").all_inner_texts()[2:]


def show(page: Page, name: str, column: int, value: str | re.Pattern[str]) -> None:
    expect(row(page, name).locator("tr.model td").nth(2 + column)).to_have_text(value)


def state(page: Page, name: str) -> Locator:
    return row(page, name).locator(".state")


def names(page: Page) -> list[str]:
    return page.locator("#models .model button span").evaluate_all("all => all.map(one => one.title)")


def opened(page: Page, name: str) -> Locator:
    """What the row has opened; the row of a single model is open at the start."""
    button = row(page, name).get_by_role("button").first
    if button.get_attribute("aria-expanded") == "false":
        button.click()
    return row(page, name).locator(".more")


NOT_NULL = re.compile(r"[1-9]")


# The document itself


def test_it_is_one_file_that_asks_nobody_else_and_runs_nothing_else(demo: Server) -> None:
    answer = demo.get("/")
    text, policy = answer.text, answer.headers["content-security-policy"]
    for tag in ("script", "style"):
        (part,) = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        assert text.count(f"<{tag}") == 1
        digest = base64.b64encode(hashlib.sha256(part.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}';" in policy
    assert policy.startswith("default-src 'none'; ")
    assert "connect-src 'self'" in policy
    assert not re.findall(r"""(?:src|href)\s*=\s*["']?(?:https?:)?//""", text)
    assert text.count("Copyright (c) 2022 Leon Sorokin") == 2, "the library goes with its licence, script and style"


# What it is told


@slow
def test_a_row_says_what_has_happened_to_its_model(browser: Browser) -> None:
    fake = {"per_sample_ms": 20, "max_batch": 1}
    with (
        start_fake_server(fake=fake, max_queue=1) as server,
        ThreadPoolExecutor(2) as pool,
        open_page(browser, server.url) as page,
    ):
        expect(state(page, "rows")).to_have_text("ready")
        assert figures(page, "rows") == ["0", "0", "0", "–", "–", "0", "0", "–"]
        assert {server.infer(1.0).status_code for _ in range(4)} == {200}
        assert server.infer(POISON).status_code == 500
        server.switch_on("hold")
        held = []
        for count in (1, 2):  # one that runs, and one that waits
            held.append(pool.submit(server.infer, 1.0))
            wait_until(lambda count=count: server.stats()["unfinished_requests"] == count, "it has come")  # type: ignore[misc]
        assert server.infer(1.0).status_code == 429
        for column, value in ((IN_FLIGHT, "2"), (QUEUED, "1"), (REFUSED, NOT_NULL)):
            show(page, "rows", column, value)
        show(page, "images", IN_FLIGHT, "0")
        server.switch_off("hold")
        assert {one.result().status_code for one in held} == {200}
        for column, value in ((IN_FLIGHT, "0"), (REQUESTS, NOT_NULL), (FAILED, NOT_NULL), (BATCH, "1.0")):
            show(page, "rows", column, value)
        (told,) = [one for one in server.stats()["models"] if one["name"] == "rows"]
        shown = figures(page, "rows")
        assert float(shown[P50]) == pytest.approx(told["stages"]["total"]["p50_ms"], rel=0.5)
        assert float(shown[P99].replace(",", "")) >= 20
        assert row(page, "rows").locator(".more").count() == 0, "of several models none is open at the start"


@slow
def test_a_model_of_which_every_call_is_late_or_wrong_does_not_look_idle(browser: Browser) -> None:
    wrong = {**rows_request(1.0), "inputs": []}
    with start_fake_server() as server, open_page(browser, server.url) as page:
        expect(state(page, "rows")).to_have_text("ready")
        late = [server.post(f"{INFER}?timeout_ms=0.001", json=rows_request(1.0)).status_code for _ in range(9)]
        assert set(late) == {504}
        show(page, "rows", FAILED, NOT_NULL)
        expect(row(page, "rows").locator("tr.model td").nth(2 + FAILED)).to_have_class("raised bad")
        shown = figures(page, "rows")
        assert shown[REQUESTS] == shown[FAILED]
        assert (shown[REFUSED], shown[P50]) == ("0", "–")
        assert figures(page, "images")[:3] == ["0", "0", "0"]
        failed = page.get_by_role("columnheader", name="Failed/s")
        assert "deadline" in (failed.get_attribute("title") or "")
        assert {server.post(INFER, json=wrong).status_code for _ in range(9)} == {400}

        def counts_all() -> bool:
            requests, refused, failed = map(float, figures(page, "rows")[:3])
            return requests == pytest.approx(2 * failed, rel=0.2) and refused == 0

        wait_until(counts_all, "what was wrong is a request, and no failure of the model's")


@slow
def test_an_opened_row_has_five_minutes_by_keyboard_alone(browser: Browser) -> None:
    fake = {"per_sample_ms": 5, "max_batch": 4}
    with (
        start_fake_server(fake=fake, max_queue=1) as server,
        ThreadPoolExecutor(8) as pool,
        open_page(browser, server.url) as page,
    ):
        expect(state(page, "rows")).to_have_text("ready")
        while page.evaluate("document.activeElement.closest('.model') === null"):
            page.keyboard.press("Tab")
        page.keyboard.press("ArrowDown")
        assert page.evaluate("document.activeElement.textContent") == "rows v1"
        page.keyboard.press("Enter")
        more = row(page, "rows").locator(".more")
        expect(more.locator("figure.empty")).to_have_text(
            [
                "Requests per second, by outcomeno requests yet",
                "Latency (ms)no requests yet",
                "Refused per second, by reasonnone",
                "Batch sizeno requests yet",
            ]
        )
        assert more.locator("canvas").count() == 0

        def is_refused(_: int) -> bool:
            return server.infer(1.0, 1.0, 1.0).status_code == 429

        wait_until(lambda: any(pool.map(is_refused, range(40))), "some had to be refused, whatever the machine")
        for title, said in (
            ("Requests per second", r"answered .* now, \d*\.?\d*[1-9]\d*\.?\d* at most.*; refused .* now"),
            ("Refused per second", "queue full .* now"),
            ("Latency", r"p50 [\d.]+ now.*p99 [\d.]+ now"),
            ("Batch size", r"mean 3 now.*largest 3 now"),
        ):
            chart = more.locator("figure", has_text=title).get_by_role("img")
            expect(chart).to_have_attribute("aria-label", re.compile(said))
        split = more.locator(".split")
        assert "compute" in split.inner_text()
        shares = [float(one.removesuffix(" %")) for one in split.locator("small").all_inner_texts()]
        assert sum(shares) == pytest.approx(100, abs=1 + 0.5 * len(shares))
        assert more.locator(".bars").first.inner_text().split() == ["3", "to", "4", "100", "%"]
        assert "engine busy" in " ".join(more.locator(".devices").inner_text().split())
        page.keyboard.press("Escape")
        expect(more).to_have_count(0)
        assert page.evaluate("document.activeElement.getAttribute('aria-expanded')") == "false"


def with_more(route: Route, **model: Any) -> None:
    """What the server answers, and of its first model something that only other machines have."""
    document = route.fetch().json()
    document["models"][0] |= model
    route.fulfill(json=document)


@slow
def test_a_plan_that_is_being_built_has_its_progress_and_text_stays_text(browser: Browser) -> None:
    build = {"state": "building", "file": "fp16.onnx", "phase": "Timing kernels", "step": 30, "total": 120}
    build |= {"elapsed_s": 61.0, "reason": None, "plan": None, "refused": False}
    more = {"plan_build": build, "why_not_others": ["<img src=x onerror=alert(1)>"], "why": "<b>because</b>"}
    with start_fake_server() as server, open_page(browser, server.url) as page:
        page.route("**/stats*", lambda route: with_more(route, **more))
        expect(row(page, "images").locator("tr.model")).to_contain_text("plan 25 %")
        details = opened(page, "images")
        assert "Why this engine\n<b>because</b>" in details.inner_text()
        assert details.locator("progress").evaluate("bar => bar.value / bar.max") == 0.25
        words = ("Timing kernels, 30 of 120", "<img src=x onerror=alert(1)>")
        assert all(one in details.inner_text() for one in words)
        assert details.locator("img").count() == 0


@slow
def test_a_gpu_tells_its_load_its_memory_and_its_power(browser: Browser) -> None:
    with start_fake_server(fake={"gpu": True}, engine="auto") as server, open_page(browser, server.url) as page:
        devices = opened(page, "rows").locator(".devices")
        expect(devices).to_contain_text("413 W, 61 °C")
        told = " ".join(devices.inner_text().split())
        assert ("GPU busy 75 %" in told, "GPU memory 8.0 GiB" in told) == (True, True)


# An image


@pytest.fixture
def digits(browser: Browser, demo: Server) -> Iterator[Page]:
    with open_page(browser, demo.url) as page:
        expect(state(page, "digits")).to_have_text("ready")
        yield page


SEND = """
([form, bytes]) => {
  const data = new DataTransfer();
  data.items.add(new File([new Uint8Array(bytes)], "digit.png", { type: "image/png" }));
  const event = form === "drop" ? new DragEvent("drop", { dataTransfer: data, bubbles: true, cancelable: true })
    : new ClipboardEvent("paste", { clipboardData: data, bubbles: true, cancelable: true });
  document.body.dispatchEvent(event);
}
"""


@slow
def test_an_image_that_is_chosen_dropped_or_pasted_has_its_five_best_classes(digits: Page) -> None:
    answer, top = digits.locator("#answer"), digits.locator("#answer .top")
    digits.set_input_files("#file", DATA / "seven.png")
    for form, name, word in (("choose", "seven", "7"), ("drop", "two", "2"), ("paste", "five", "5")):
        if form != "choose":
            digits.evaluate(SEND, [form, list(digit(name))])
        expect(top.locator("li").first.locator("span")).to_have_text(word)
        rows = top.locator("li")
        assert rows.count() == 5
        scores = [float(text) for text in rows.locator("b").all_inner_texts()]
        assert scores == sorted(scores, reverse=True)
        assert 0.5 < scores[0] <= 1
        widths = rows.locator("i").evaluate_all("all => all.map(one => parseFloat(one.style.width))")
        assert widths == pytest.approx([100 * score for score in scores], abs=0.1)
        assert answer.locator("img").evaluate("image => image.decode().then(() => image.naturalWidth)") == 32
        assert re.search(r"compute\s+[\d.]+ ms", answer.locator(".split").inner_text())
        assert "ms in the server" in answer.inner_text()


@slow
@pytest.mark.parametrize(("scheme", "size"), [("light", DESKTOP), ("dark", PHONE)])
def test_boxes_and_class_maps_lie_over_the_picture(
    browser: Browser, store: StoreFolder, scheme: Literal["light", "dark"], size: tuple[int, int]
) -> None:
    """In their places, with sliders that are moved by keys and ask the server nothing."""
    boxes = np.array([[8, 4, 24, 20], [32, 16, 64, 32], [0, 0, 9, 9]], np.float32)
    fixed = [FixedOutput("boxes", boxes), FixedOutput("scores", np.array([0.9, 0.5, 0.2], np.float32))]
    add_detector(store.root, "boxes", stretched(32, 64), DetectionOutputs("boxes", "scores"), fixed, labels=("a cat",))
    add_colours(store.root, "map", stretched(32, 64))
    # An object with its mask, the upper half of its box; and one with a keypoint.
    row = np.array([[32, 16, 64, 32, 0.9, 1]], np.float32).T
    prototypes = np.repeat(np.float32([1, -1]), 4).reshape(1, 8, 1) * np.ones((1, 8, 16), np.float32)
    said = DetectionOutputs("boxes", layout="yolo_v8_seg", prototypes="prototypes")
    outputs = [FixedOutput("boxes", row), FixedOutput("prototypes", prototypes)]
    add_detector(store.root, "shaped", stretched(32, 64), said, outputs)
    point = np.array([[32, 16, 64, 32, 0.9, 16, 24, 0.9]], np.float32).T
    said = DetectionOutputs("boxes", layout="yolo_v8_pose", keypoints=(1, 3))
    add_detector(store.root, "posed", stretched(32, 64), said, [FixedOutput("boxes", point)])
    picture = Image.new("RGB", (128, 64))
    picture.paste((255, 0, 0), (64, 0, 128, 64))
    file = {"name": "half.png", "mimeType": "image/png", "buffer": saved(picture)}
    with start_server(store=store.root) as server, open_page(browser, server.url, size, scheme) as page:
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url) if "/predictions/" in request.url else None)
        page.locator("#asked").select_option("boxes/1")
        page.set_input_files("#file", file)  # type: ignore[arg-type]
        drawn, slider, said = page.locator(".layer i"), page.get_by_role("slider"), page.locator(".slider output")
        expect(drawn).to_have_text(["a cat 0.50", "a cat 0.90"])  # the best is on top; one is below the usual 0.30
        expect(said).to_have_text("0.30: 2 of 3 boxes")
        frame, best = page.locator(".thumbnail").bounding_box(), drawn.last.bounding_box()
        assert frame is not None
        assert best is not None
        whole, at = (frame["width"] - 2, frame["height"] - 2), (best["x"] - frame["x"] - 1, best["y"] - frame["y"] - 1)
        assert at == pytest.approx((whole[0] / 8, whole[1] / 8), abs=1.5)
        assert (best["width"], best["height"]) == pytest.approx((whole[0] / 4, whole[1] / 2), abs=1.5)
        expect(page.get_by_role("slider", name="Score at least")).to_be_visible()
        slider.focus()
        page.keyboard.press("Home")
        expect(drawn).to_have_count(3)
        for _ in range(40):
            page.keyboard.press("ArrowRight")
        expect(said).to_have_text("0.60: 1 of 3 boxes")
        expect(page.locator("#answer .top li")).to_have_count(1)
        page.keyboard.press("End")
        expect(drawn).to_have_count(0)

        page.locator("#asked").select_option("map/1")  # with the same picture
        expect(page.get_by_role("img", name="Class map: black, red")).to_be_visible()
        pixels = page.locator("canvas.layer").evaluate(
            "map => [[10, 10], [100, 50]].map(at => [...map.getContext('2d').getImageData(...at, 1, 1).data])"
        )
        (black, red) = (page.locator("#answer .track i").nth(number) for number in range(2))
        for pixel, bar in zip(pixels, (black, red), strict=True):
            colour = bar.evaluate("bar => getComputedStyle(bar).backgroundColor")
            assert (colour, pixel[3]) == (f"rgb({pixel[0]}, {pixel[1]}, {pixel[2]})", 255)
        slider.focus()
        page.keyboard.press("Home")
        expect(said).to_have_text("0 %")
        expect(page.locator("canvas.layer")).to_have_css("opacity", "0")

        for model, inside, outside in (("shaped", [100, 20], [100, 44]), ("posed", [32, 48], [50, 48])):
            page.locator("#asked").select_option(f"{model}/1")
            page.get_by_role("slider", name="Score at least").press("Home")
            expect(drawn).to_have_text(["class 0 0.90"])
            painted, free = page.locator("canvas.layer").evaluate(
                "(map, at) => at.map(one => map.getContext('2d').getImageData(...one, 1, 1).data[3])", [inside, outside]
            )
            assert (painted > 0, free) == (True, 0), model
        assert len(asked) == 4
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "nothing is beside the window"


@slow
def test_what_is_no_image_is_answered_in_the_servers_words(digits: Page, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("no image")
    digits.set_input_files("#file", tmp_path / "notes.txt")
    expect(digits.locator("#answer [role=alert]")).to_contain_text("image")
    assert digits.locator("#answer .top").count() == 0


@slow
def test_a_single_model_is_open_with_the_reason_for_its_engine_its_accuracy_and_its_report(digits: Page) -> None:
    more = row(digits, "digits").locator(".more")
    (told,) = digits.evaluate("fetch('stats').then(answer => answer.json())")["models"]
    expect(more.locator("dd").first).to_have_text(told["why"])
    assert more.locator("dl").evaluate_all(CUT) == []
    assert re.search(r"\d\d\.\d\d % top-1 on 390 images", more.inner_text())
    with digits.context.expect_page() as opened_page:
        more.get_by_role("link", name="export report").click()
    report = opened_page.value
    expect(report.get_by_role("heading", name="digits").first).to_be_visible()
    assert report.evaluate("self.origin") == "null", "it is kept apart from the page"
    for name in ("server CPU", "host CPU", "server memory", "host memory"):
        expect(digits.locator("#summary div", has_text=name)).to_have_text(re.compile(r"\d (%|[MG]iB)$"))


@slow
@pytest.mark.parametrize("key", ["", "guest"])
def test_the_command_for_curl_gives_what_the_page_shows(
    browser: Browser, store: StoreFolder, tmp_path: Path, key: str
) -> None:
    store.add_digits(name="digits")
    (tmp_path / "key").write_text("guest")
    options = ("--api-key-file", str(tmp_path / "key")) if key else ()
    image = tmp_path / "it's seven.png"
    image.write_bytes(digit("seven"))
    with start_server(*options, store=store.root) as server, open_page(browser, server.url) as page:
        if key:
            page.locator("#key-field").fill(key)
            page.keyboard.press("Enter")
        expect(state(page, "digits")).to_have_text("ready")
        page.set_input_files("#file", image)
        expect(page.locator("#answer .top li")).to_have_count(5)
        page.evaluate("addEventListener('copy', () => { document.body.dataset.copied = String(getSelection()); })")
        page.get_by_role("button", name="Copy as curl").click()
        expect(page.get_by_role("button", name="Copied")).to_be_visible()
        command = page.locator("#curl").inner_text()
        assert page.evaluate("document.body.dataset.copied") == command
        environment = {**os.environ, "CONVOY_API_KEY": key}
        ended = subprocess.run(
            ["sh", "-c", f"{command} --silent"], cwd=tmp_path, env=environment, capture_output=True, check=True
        )
        assert json.loads(ended.stdout)["predictions"][0]["label"] == "7"
        assert ("$CONVOY_API_KEY" in command, "guest" in command) == (bool(key), False)
        link = row(page, "digits").get_by_role("link", name="export report")
        if key:
            assert server.get("/reports/digits/1").status_code == 401
            with page.expect_download() as saved:
                link.click()
            assert saved.value.suggested_filename == "digits-1.html"
            assert "Recall per class" in saved.value.path().read_text()


def test_a_report_is_served_where_there_is_one_and_nothing_in_it_runs(demo: Server, store: StoreFolder) -> None:
    answer = demo.get("/reports/digits")
    assert answer.text == (DEMO / "report.html").read_text()
    policy = answer.headers["content-security-policy"].split("; ")
    assert {"default-src 'none'", "sandbox", "frame-ancestors 'none'"} <= set(policy)
    assert not any("script" in part for part in policy)
    assert demo.get("/reports/digits/7").status_code == 404
    assert demo.get("/reports/nobody").status_code == 404
    store.add_shift(1.0)
    with start_server(store=store.root) as server:
        answer = server.get("/reports/shift")
        assert (answer.status_code, "has no report" in answer.json()["error"]) == (404, True)
        (told,) = server.stats()["models"]
        assert (told["has_report"], told["accuracy"]) == (False, None)


# Loading and unloading


EXPLICIT = ("--model-control", "explicit", "--load-model", "*")


@slow
def test_key_and_token_open_what_they_are_for_and_the_store_is_changed(
    browser: Browser, store: StoreFolder, tmp_path: Path
) -> None:
    store.add_shift(1.0, version=1)
    store.add_shift(2.0, version=2)
    (tmp_path / "key").write_text("guest")
    (tmp_path / "token").write_text("boss")
    options = ("--api-key-file", str(tmp_path / "key"), "--admin-token-file", str(tmp_path / "token"))
    with start_server(*EXPLICIT, *options, store=store.root) as server, open_page(browser, server.url) as page:
        key, token = page.locator("#key"), page.locator("#token")

        def type_in(word: str) -> None:
            page.keyboard.type(word)
            page.keyboard.press("Enter")

        expect(key).to_be_visible()
        assert page.locator("main").is_hidden()
        type_in("stranger")  # the field has the focus
        expect(key.get_by_role("alert")).to_have_text("The server does not accept this key.")
        type_in("guest")
        expect(state(page, "shift")).to_have_text("ready")
        assert key.is_hidden()
        page.reload()
        expect(state(page, "shift")).to_have_text("ready"), "the tab has kept the key"
        summary = page.locator("#summary")
        expect(summary).not_to_contain_text("unknown model")
        for _ in range(9):
            assert server.post("/v2/models/shift/infer", json=rows_request(1.0)).status_code == 401
        expect(summary).to_contain_text("unauthorised")

        actions = opened(page, "shift").locator(".actions")
        expect(actions.get_by_role("button")).to_have_text(["Enter the admin token to load or unload"])
        actions.get_by_role("button").click()
        type_in("nobody")
        actions.get_by_role("button", name="Load again").click()
        expect(token.get_by_role("alert")).to_have_text("The server does not accept this token.")
        expect(actions).to_contain_text("missing or wrong")
        token.get_by_role("textbox").fill("boss")
        page.keyboard.press("Enter")
        expect(token).to_be_hidden()

        actions.get_by_role("button", name="Roll back to version 1").click()
        page.get_by_role("button", name="Roll back", exact=True).click()
        expect(row(page, "shift").locator(".model th")).to_contain_text("v1")
        assert row(page, "shift").locator(".more").count() == 1, "it has stayed open"
        actions.get_by_role("button", name="Load version 2").click()
        expect(row(page, "shift").locator(".model th")).to_contain_text("v2")
        actions.get_by_role("button", name="Unload").click()
        page.get_by_role("button", name="Cancel").click()
        expect(state(page, "shift")).to_have_text("ready")
        actions.get_by_role("button", name="Unload").click()
        page.locator("dialog").get_by_role("button", name="Unload").click()
        expect(state(page, "shift")).to_have_text("unloaded")
        actions.get_by_role("button", name="Load").click()
        expect(state(page, "shift")).to_have_text("ready")

        page.get_by_role("button", name="Forget key").click()
        expect(key).to_be_visible()


@slow
def test_a_model_is_loaded_and_unloaded_without_a_token_where_nobody_else_can_ask(
    browser: Browser, store: StoreFolder
) -> None:
    store.add_shift(1.0)
    local = ("--host", "127.0.0.1")
    with start_server(*EXPLICIT, *local, store=store.root) as server, open_page(browser, server.url) as page:
        store.add_shift(1.0, name="newcomer")
        actions = opened(page, "shift").locator(".actions")
        expect(state(page, "newcomer")).to_have_text("not loaded")
        assert state(page, "newcomer").evaluate("word => word.scrollWidth <= word.clientWidth"), "the widest state fits"
        opened(page, "newcomer").get_by_role("button", name="Load").click()
        expect(state(page, "newcomer")).to_have_text("ready")
        actions.get_by_role("button", name="Unload").click()
        page.locator("dialog").get_by_role("button", name="Unload").click()
        expect(state(page, "shift")).to_have_text("unloaded")
        shutil.rmtree(store.root / "shift")
        expect(row(page, "shift")).to_have_count(0)
        assert names(page) == ["newcomer"]


@slow
def test_there_are_no_buttons_where_the_address_forbids_it(browser: Browser, store: StoreFolder) -> None:
    store.add_shift(1.0)
    with start_server(*EXPLICIT, store=store.root) as server, open_page(browser, server.url) as page:
        more = opened(page, "shift")
        expect(more.locator("figure.empty")).to_have_count(4)
        assert more.get_by_role("button").count() == 0


@slow
def test_a_removed_model_leaves_the_page_and_a_broken_version_says_why(browser: Browser, store: StoreFolder) -> None:
    store.add_shift(1.0)
    store.add_shift(1.0, name="leaver")
    polling = ("--model-control", "poll", "--poll-interval-s", "0.2")
    with start_server(*polling, store=store.root) as server, open_page(browser, server.url) as page:
        expect(state(page, "leaver")).to_have_text("ready")
        shutil.rmtree(store.root / "leaver")
        expect(row(page, "leaver")).to_have_count(0)
        for name in ("broken/1", "shift/2"):
            (store.root / name).mkdir(parents=True)
            (store.root / name / "model.onnx").write_bytes(b"no model")
        expect(state(page, "broken")).to_have_text("refused")
        expect(row(page, "shift")).to_contain_text("version 2 refused: ")
        assert state(page, "shift").inner_text() == "ready"
        assert names(page) == ["shift", "broken"]


# A server that is not there


@slow
def test_a_dead_server_greys_the_page_and_says_since_when(browser: Browser) -> None:
    with start_fake_server(exit_code=-signal.SIGKILL) as server, open_page(browser, server.url) as page:
        expect(state(page, "rows")).to_have_text("ready")
        silence = page.locator("#silence")
        assert silence.is_hidden()
        server.signal(signal.SIGSTOP)
        expect(silence).to_be_visible()
        expect(silence.get_by_role("alert")).to_have_text("The server does not respond.")
        assert page.title() == "No data – Convoy"
        server.signal(signal.SIGCONT)
        expect(silence).to_be_hidden()
        shown = page.locator("#summary div", has_text="updated").locator("dd").inner_text()
        server.signal(signal.SIGKILL)
        expect(silence).to_be_visible()
        told = silence.inner_text()
        since = re.search(
            r"No update since (\d\d:\d\d:\d\d), for \d+ s\. The page shows data from (\d\d:\d\d:\d\d)\.", told
        )
        assert since is not None, told
        assert since[1] == since[2] >= shown
        assert page.locator("main").evaluate("main => getComputedStyle(main).filter") == "grayscale(1)"
        assert names(page) == ["images", "rows"], "what was last known is still to be read"


# How it looks

# Of every text on the page the contrast against what is behind it, by WCAG 2.2; what is too faint for reading.
FAINT = """
() => {
  const light = colour => {
    const [r, g, b] = colour.match(/[\\d.]+/g).slice(0, 3).map(one => one / 255)
      .map(one => one <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = node => {
    for (let one = node; one; one = one.parentElement) {
      const colour = getComputedStyle(one).backgroundColor;
      if (!/, 0\\)$/.test(colour)) return colour;
    }
    return "rgb(255, 255, 255)";
  };
  const isText = node => [...node.childNodes].some(one => one.nodeType === 3 && one.data.trim());
  const found = [...document.querySelectorAll("body *")].filter(node => isText(node) && node.checkVisibility());
  const ratios = found.filter(node => node.tagName !== "SCRIPT" && !node.disabled).map(node => {
    const [low, high] = [light(getComputedStyle(node).color), light(behind(node))].sort((one, other) => one - other);
    return [node.textContent.trim().slice(0, 40), (high + 0.05) / (low + 0.05)];
  });
  if (ratios.length < 30) throw new Error("there is hardly any text");
  return ratios.filter(([, ratio]) => ratio < 4.5);
}
"""

# The texts of these elements that are not to be seen whole.
CUT = """all => all.filter(one => one.scrollWidth > one.clientWidth || one.scrollHeight > one.clientHeight)
  .map(one => one.textContent)"""


@slow
def test_twelve_models_fit_a_screen_a_phone_is_wide_enough_and_all_is_readable_by_day_and_night(
    browser: Browser, store: StoreFolder
) -> None:
    # Long names that differ at their ends only; the first two are of models that take images and are offered for one.
    long = [f"resnet-for-factory-line-{number:02}" for number in range(8)]
    twelve = ["digits", "faces", *long, "a-model-with-a-rather-long-name-1", "a-model-with-a-rather-long-name-2"]
    store.add_mean(name="faces")
    for name in ("digits", *long[:2]):
        store.add_digits(name=name)
    for name in (*long[2:], *twelve[-2:]):
        store.add_shift(1.0, name=name)
    with start_server("--host", "127.0.0.1", store=store.root) as server:
        assert server.post("/predictions/digits", content=digit("one")).status_code == 200
        grounds = set()
        for size, scheme in ((DESKTOP, "light"), (PHONE, "dark")):
            with open_page(browser, server.url, size, scheme) as page:  # type: ignore[arg-type]
                expect(state(page, "digits")).to_have_text("ready")
                assert sorted(names(page)) == sorted(twelve)
                assert page.evaluate("document.scrollingElement.scrollWidth") <= size[0]
                assert page.locator(".model button b").evaluate_all(CUT) == []
                if size == DESKTOP:
                    assert page.evaluate("document.scrollingElement.scrollHeight") <= 900
                    last = page.locator(".model").last.bounding_box()
                    assert last is not None
                    assert last["y"] + last["height"] <= 900
                page.set_input_files("#file", DATA / "seven.png")
                expect(page.locator("#answer .top li")).to_have_count(5)
                more = opened(page, "digits")
                expect(more.locator("canvas")).to_have_count(3)  # and none of refusals
                assert page.evaluate("document.scrollingElement.scrollWidth") <= size[0]
                assert page.evaluate(FAINT) == []
                wide = more.locator("canvas").evaluate_all(
                    "all => Math.max(...all.map(one => one.getBoundingClientRect().right))"
                )
                assert 0 < wide <= size[0]
                assert figures(page, "digits")[BATCH] == "1.0"
                grounds.add(page.evaluate("getComputedStyle(document.body).backgroundColor"))
        assert len(grounds) == 2, "the night has a ground of its own"
