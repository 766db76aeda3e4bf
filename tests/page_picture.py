"""The README's picture of the page: a server with models of several kinds, five minutes under load, one row opened.

`python -m tests.page_picture FILE` serves the bundled digits CNN under three names, and two of torchvision's networks
with random weights as bare ONNX files, sends each what `convoy loadtest` sends, and looks with Debian's Chromium.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from playwright.sync_api import expect, sync_playwright

from tests.support.browser import DESKTOP
from tests.support.servers import Server, start_server
from tests.support.stores import DATA, ROOT, StoreFolder
from tests.support.tools import found_tool


class Load(NamedTuple):
    """What a model is asked: requests a second on average, and the arrivals' form."""

    model: str
    rate: float
    form: tuple[str, ...] = ()


LOADS = (
    Load("digits", 40),
    Load("digits", 18, ("--arrivals", "bursts", "--burst-on", "10", "--burst-off", "60")),
    Load("meters", 15),
    Load("postcodes", 8),
    Load("mobilenet_v3_small", 3),
    Load("resnet18", 1, ("--arrivals", "bursts", "--burst-on", "8", "--burst-off", "40")),
)
OPENED = "digits"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("file", type=Path, help="the picture, .png")
    parser.add_argument("--seconds", type=float, default=310.0, help="how long the load lasts before it is taken")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="convoy-picture-") as folder, ExitStack() as stack:
        store = Path(folder) / "store"
        fill(store)
        options = ("--model-control", "explicit", "--load-model", "*", "--host", "127.0.0.1")
        options += ("--max-queue", "8", "--engine", "auto")
        server = stack.enter_context(start_server(*options, store=store))
        for load in LOADS:
            process = send(server, load, given.seconds + 60)
            stack.callback(process.wait)
            stack.callback(process.terminate)
        take(server, given.file, given.seconds)


def fill(store: Path) -> None:
    """Two versions of the digits CNN, so that there is one to go back to; under other names one."""
    folder = StoreFolder(store)
    for version in (1, 2):
        folder.add_digits(version)
    for name in ("meters", "postcodes"):
        folder.add_digits(name=name)
    import torch
    import torchvision

    for name in ("mobilenet_v3_small", "resnet18"):
        path = store / name / "1" / "model.onnx"
        path.parent.mkdir(parents=True)
        network, image = torchvision.models.get_model(name).eval(), torch.zeros(1, 3, 224, 224)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            names = {"input_names": ["image"], "output_names": ["logits"]}
            torch.onnx.export(network, (image,), path, dynamo=False, dynamic_axes={"image": {0: "batch"}}, **names)


def send(server: Server, load: Load, seconds: float) -> subprocess.Popen[bytes]:
    """It goes on until it is ended, or for so long."""
    words = ["convoy", "loadtest", "--url", server.url, "--model", load.model, "--rate", str(load.rate), *load.form]
    words += ["--duration", str(seconds), "--warm-up", "1", "--processes", "1", "--connections", "64"]
    return subprocess.Popen([sys.executable, "-m", *words], cwd=ROOT, stdout=subprocess.DEVNULL)


def take(server: Server, file: Path, seconds: float) -> None:
    """After so many seconds, with an image tried and a row open; as high as the window, or as the open row ends."""
    width, height = DESKTOP
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found_tool("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": width, "height": height}, color_scheme="light")
        page.goto(server.url)
        page.select_option("#asked", f"{OPENED}/2")
        page.wait_for_timeout(1000 * seconds)
        for _ in range(20):  # the queue may be full
            page.set_input_files("#file", DATA / "seven.png")
            page.wait_for_timeout(1000)
            if page.locator("#answer .top li").count():
                break
        expect(page.locator("#answer .top li")).to_have_count(5)
        page.locator(".model button", has_text=OPENED).click()
        expect(page.locator(".more canvas")).to_have_count(4, timeout=30_000)
        page.mouse.move(0, 0)
        page.evaluate("document.activeElement.blur()")
        page.wait_for_timeout(3000)
        page.screenshot(path=file, full_page=True)
        browser.close()


if __name__ == "__main__":
    main()
