"""Pictures of pages, by a Chromium without a window where one is installed.

Speaks the Chrome DevTools Protocol (https://chromedevtools.github.io/devtools-protocol/) over its web socket, because a
page that asks its server each second must be looked at in real time, and a long page cut where its height is known.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import math
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
from PIL import Image
from websockets.sync.client import connect

from convoy.models.errors import JobError

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
START_S = 60.0
ANSWER_S = 60.0
COLOURS = 256  # of a picture that is kept: pages have few, and such a file is half of the full one
VIEW_HEIGHT = 300  # a page is never lower than the view
MOST_HEIGHT = 4000
_LISTENS = "DevTools listening on ws://"


def find_browser() -> str | None:
    """Path of a Chromium; None where none is installed."""
    return next((found for name in NAMES if (found := shutil.which(name)) is not None), None)


class Browser:
    """One Chromium, for several pictures; ended at the end. Raises JobError where it does not start or answer."""

    def __init__(self, program: str) -> None:
        self._program = program
        self._numbers = count(1)

    def __enter__(self) -> Browser:
        with contextlib.ExitStack() as opened:
            profile = tempfile.TemporaryDirectory(prefix="convoy-browser-", ignore_cleanup_errors=True)
            folder = Path(opened.enter_context(profile))
            host = opened.enter_context(self._running(folder))
            # A page for pictures; the first one, of `about:blank`, is not always there at once.
            page = httpx.put(f"http://{host}/json/new", timeout=ANSWER_S).json()
            self._socket = opened.enter_context(connect(page["webSocketDebuggerUrl"], max_size=None, proxy=None))
            self._opened = opened.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._opened.close()

    def picture(
        self,
        url: str,
        path: Path,
        *,
        width: int,
        until: str | None = None,
        wait_s: float = 0.5,
        click: str | None = None,
        wanted: str | None = None,
    ) -> None:
        """A PNG of the page as it looks so long after it was opened, as far as the heading `until`, if there is one.

        `click` selects what is clicked first, and `wanted` what must be there before the picture is taken; as in CSS.
        Raises JobError where one of them does not come.
        """
        metrics = {"width": width, "height": VIEW_HEIGHT, "deviceScaleFactor": 1, "mobile": False}
        self._ask("Emulation.setDeviceMetricsOverride", **metrics)
        self._ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "light"}])
        self._ask("Page.navigate", url=url)
        if click is not None:
            self._await(click, url, "found.click()")
        time.sleep(wait_s)
        if wanted is not None:
            self._await(wanted, url)
        height = min(self._top_of(until), self._ask("Page.getLayoutMetrics")["cssContentSize"]["height"], MOST_HEIGHT)
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        taken = self._ask("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)
        self._ask("Page.navigate", url="about:blank")  # a live page would go on asking its server
        with Image.open(io.BytesIO(base64.b64decode(taken["data"]))) as image:
            image.convert("RGB").quantize(COLOURS).save(path, optimize=True)

    def _await(self, selector: str, url: str, then: str = "") -> None:
        """Return when the page has something that the selector finds, after `then` was done with what was `found`."""
        find = f"const found = document.querySelector({json.dumps(selector)})"
        look = f"{find}; if (found) {{ {then} }} return found !== null"
        give_up_s = time.monotonic() + ANSWER_S
        while time.monotonic() < give_up_s:
            answer = self._ask("Runtime.evaluate", expression=f"(() => {{ {look}; }})()", returnByValue=True)
            if answer["result"].get("value"):
                return
            time.sleep(0.05)
        raise JobError(f"{url} has nothing that is {selector}, {ANSWER_S:g} s after it was opened")

    def _top_of(self, heading: str | None) -> float:
        """How far down the page it stands; infinite where it does not."""
        there = f"[...document.querySelectorAll('h2, h3')].find(one => one.textContent === {json.dumps(heading)})"
        found = self._ask("Runtime.evaluate", expression=f"({there})?.getBoundingClientRect().top")["result"]
        return float(found.get("value", math.inf))

    @contextlib.contextmanager
    def _running(self, folder: Path) -> Iterator[str]:
        """The process, which says on stderr at which host and port it listens."""
        # Chromium's own sandbox refuses to run as root.
        as_root = ["--no-sandbox"] if os.geteuid() == 0 else []
        flags = ["--headless", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-port=0", *as_root]
        command = [self._program, *flags, f"--user-data-dir={folder}", "about:blank"]
        said = folder / "stderr"
        with said.open("wb") as errors:
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=errors)
        try:
            yield self._listens_at(process, said)
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _listens_at(self, process: subprocess.Popen[bytes], said: Path) -> str:
        give_up_s = time.monotonic() + START_S
        while time.monotonic() < give_up_s and process.poll() is None:
            address, is_whole, _ = said.read_text(errors="replace").partition(_LISTENS)[2].partition("/")
            if is_whole:
                return address
            time.sleep(0.05)
        raise JobError(f"{self._program} does not start; try `{self._program} --headless --dump-dom about:blank`")

    def _ask(self, method: str, **parameters: object) -> dict[str, Any]:
        number = next(self._numbers)
        self._socket.send(json.dumps({"id": number, "method": method, "params": parameters}))
        give_up_s = time.monotonic() + ANSWER_S
        while True:
            try:
                said = json.loads(self._socket.recv(timeout=max(0.0, give_up_s - time.monotonic())))
            except TimeoutError:
                raise JobError(f"{self._program} did not answer {method} within {ANSWER_S:g} s") from None
            if said.get("id") == number:  # whatever else it tells is news, not an answer
                break
        if "error" in said:
            raise JobError(f"{self._program} refuses {method}: {said['error'].get('message')}")
        result: dict[str, Any] = said["result"]
        return result
