"""The film of the whole way: its words, its folder, and its pictures where there is a browser."""

from __future__ import annotations

import http.server
import threading
from pathlib import Path

import pytest
from PIL import Image

from convoy.loadtest import demo
from convoy.loadtest.browser import Browser, find_browser
from convoy.loadtest.demo import Scene, film
from convoy.models.errors import JobError, UsageError

TRAIN = Scene(
    "Train", "It learns.", "train digits --out x.safetensors", "99 % are right\n", 12.0, "99 %", "demo/train.png"
)
LOOK = Scene("Look", "The page.", "loadtest", "", 3.0, "seen", None)


def test_each_step_has_its_words_its_command_what_it_printed_and_its_picture() -> None:
    text = film([TRAIN, LOOK])
    train, _, look = text.partition("## 1. Train")[2].partition("## 2. Look")
    assert train.strip().splitlines() == [
        "It learns.",
        "",
        "```bash",
        ".venv/bin/convoy train digits --out x.safetensors",
        "```",
        "",
        "```text",
        "99 % are right",
        "```",
        "",
        "![Train: 99 %](demo/train.png)",
    ]
    assert "```text" not in look
    assert "![" not in look


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").touch()
    with pytest.raises(UsageError, match="holds something that no demo wrote"):
        demo.make_empty(tmp_path)
    assert (tmp_path / "thesis.txt").exists()


def test_an_earlier_demo_is_replaced(tmp_path: Path) -> None:
    folder = tmp_path / "build" / "demo"
    demo.make_empty(folder)
    (folder / "store").mkdir()
    (folder / "store" / "old").touch()
    demo.make_empty(folder)
    assert not (folder / "store").exists()


@pytest.mark.slow
@pytest.mark.skipif(find_browser() is None, reason="needs a Chromium")
class TestBrowser:
    """A real one, without a window."""

    def test_a_page_is_pictured_as_far_as_a_heading(self, tmp_path: Path) -> None:
        page, picture = tmp_path / "page.html", tmp_path / "page.png"
        page.write_text(
            "<!doctype html><body style='margin: 0'><div style='background: #c00; height: 500px'></div>"
            "<h2 style='margin: 0'>Rest</h2><div style='background: #00c; height: 5000px'></div>"
        )
        program = find_browser()
        assert program is not None
        with Browser(program) as browser:
            browser.picture(page.as_uri(), picture, width=640, until="Rest")
            with Image.open(picture) as image:
                assert image.size == (640, 500)
                assert image.convert("RGB").getpixel((320, 499)) == (204, 0, 0)
            browser.picture(page.as_uri(), picture, width=640, until="no such heading")
            with Image.open(picture) as image:
                assert image.height == 4000
                assert image.convert("RGB").getpixel((320, 3999)) == (0, 0, 204)

    def test_what_a_page_opens_is_in_its_picture_and_is_missed_where_it_is_not(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        page, picture = tmp_path / "page.html", tmp_path / "page.png"
        page.write_text(
            "<!doctype html><body style='margin: 0'><script>setTimeout(() => {"  # as pages do that ask a server first
            "document.body.innerHTML = '<button style=\"height: 100px\">open</button>';"
            "document.querySelector('button').onclick = () => setTimeout(() => {"
            'document.body.innerHTML = \'<div class="opened" style="background: #c00; height: 400px"></div>\'; }, 200);'
            "}, 200)</script>"
        )
        program = find_browser()
        assert program is not None
        with Browser(program) as browser:
            browser.picture(page.as_uri(), picture, width=640, wait_s=0, click="button", wanted=".opened")
            with Image.open(picture) as image:
                assert image.size == (640, 400)
                assert image.convert("RGB").getpixel((320, 399)) == (204, 0, 0)
            monkeypatch.setattr("convoy.loadtest.browser.ANSWER_S", 1.0)
            with pytest.raises(JobError, match=r"nothing that is \.split"):
                browser.picture(page.as_uri(), picture, width=640, click="button", wanted=".split")

    def test_a_live_page_is_left_after_its_picture(self, tmp_path: Path) -> None:
        asked: list[str] = []

        class Live(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                asked.append(self.path)
                self.send_response(200)
                self.end_headers()
                self.wfile.write(b"<script>setInterval(() => fetch('/again'), 50)</script>")

            def log_message(self, *_: object) -> None:
                pass

        program = find_browser()
        assert program is not None
        with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Live) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            url = f"http://127.0.0.1:{server.server_port}/"
            with Browser(program) as browser:
                browser.picture(url, tmp_path / "live.png", width=320, wait_s=0.5)
                assert asked.count("/again") >= 2
                browser.picture("about:blank", tmp_path / "blank.png", width=320)  # what was under way has come
                before = len(asked)
                browser.picture("about:blank", tmp_path / "blank.png", width=320)
                assert len(asked) == before
            server.shutdown()


def test_what_is_no_browser_is_named() -> None:
    with pytest.raises(JobError, match="/bin/true does not start"), Browser("/bin/true"):
        pass
