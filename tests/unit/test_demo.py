"""The film of the whole way: its words, its folder, and its pictures where there is a browser."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from convoy.models.errors import UsageError
from tests import demo
from tests.demo import Scene, film
from tests.support.tools import found_tool

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


def test_an_earlier_demo_is_replaced_and_a_folder_of_something_else_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / "build" / "demo"
    demo.make_empty(folder)
    (folder / "store").mkdir()
    (folder / "store" / "old").touch()
    demo.make_empty(folder)
    assert not (folder / "store").exists()
    with pytest.raises(UsageError, match="holds something that no demo wrote"):
        demo.make_empty(folder.parent)
    assert folder.exists()


@pytest.mark.slow
@pytest.mark.skipif(found_tool("chromium") is None, reason="needs a Chromium")
def test_a_page_is_pictured_as_far_as_a_heading_once_what_it_opens_is_there(tmp_path: Path) -> None:
    page, picture = tmp_path / "page.html", tmp_path / "page.png"
    page.write_text(
        "<!doctype html><body style='margin: 0'><script>"
        "setTimeout(() => { document.body.innerHTML = "  # like a page that fetches its data first
        '\'<div class="opened" style="background: #c00; height: 500px"></div><h2 style="margin: 0">Rest</h2>'
        '<div style="background: #00c; height: 5000px"></div>\'; }, 400)</script>'
    )
    with demo.open_tab(found_tool("chromium")) as tab:
        assert tab is not None
        for until, height, colour in (("Rest", 500, (204, 0, 0)), ("no such heading", 4000, (0, 0, 204))):
            demo.take(tab, page.as_uri(), picture, until=until, wait_s=0, wanted=".opened")
            with Image.open(picture) as image:
                assert image.size == (1200, height)
                assert image.convert("RGB").getpixel((320, height - 1)) == colour
