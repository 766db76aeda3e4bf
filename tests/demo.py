"""A complete run, as a film: train, export, serve, predict, load, look; ends by itself and keeps what it wrote.

Runs the same commands that a user would type, in a folder that stays. Each step is written down in `demo.md`, with what
it printed and, where a Chromium is installed, a picture of its page. So `docs/demo.md` is made.
"""

from __future__ import annotations

import base64
import json
import os
import shlex
import shutil
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Annotated
from xml.etree.ElementTree import Element

import typer
from PIL import Image
from playwright.sync_api import Page, sync_playwright
from rich.console import Console
from rich.table import Table

from convoy.loadtest.bodies import DATA as _IMAGES
from convoy.models.errors import ConvoyError, UsageError
from convoy.models.page.markup import element, page
from tests.support.servers import Server, start_server
from tests.support.tools import found_tool

_MARK = ".convoy-demo"  # says that a folder is a demo's, and may be emptied by the next
_PICTURED = 12  # images that are asked for
_WIDTH = 1200
_LOOK_S = 8.0  # so long is the live page watched before its picture is taken
_LOAD = "loadtest --model digits --concurrency 8"
_COLOURS = 256  # of a picture that is kept: pages have few, and such a file is half of the full one
_MOST_HEIGHT = 4000
_MOST_LINES = 13  # of what a command printed: an export's verdict and its table
_STYLE = """
  .answers { display: grid; grid-template-columns: repeat(6, 1fr); gap: 1rem; margin-top: 1rem; }
  .answers figure { margin: 0; text-align: center; } .answers img { width: 100%; image-rendering: pixelated; }
"""


@dataclass(frozen=True, slots=True)
class Scene:
    """One step. `result` is short, for a table; `picture` is its name in `demo.md`, None where none could be taken."""

    title: str
    words: str
    command: str
    printed: str
    seconds: float
    result: str
    picture: str | None


class Film:
    """Plays the scenes in `folder`; words and pictures go to `out`."""

    def __init__(self, folder: Path, out: Path, tab: Page | None) -> None:
        self._folder, self._out, self._tab = folder, out, tab
        self._store = folder / "store"

    def play(self) -> Iterator[Scene]:
        self._store.mkdir()
        yield self._train()
        yield self._export()
        begun_s = time.perf_counter()
        with start_server(
            "--access-log", "off", store=self._store, env={"CONVOY_ENGINE": "auto"}, under=("env",)
        ) as server:
            yield self._serve(server, time.perf_counter() - begun_s)
            yield self._predict(server)
            yield self._load(server)
            yield self._watch(server)

    def _train(self) -> Scene:
        weights = self._folder / "digits.safetensors"
        command = f"train digits --arch simple_cnn --out {weights}"
        printed, seconds = _convoy(command)
        return Scene(
            "Train",
            "Train a small CNN on scikit-learn's handwritten digits. The accuracy is measured on images that it never "
            "saw.",
            command,
            printed,
            seconds,
            printed.partition(";")[0].partition(", after")[0],
            self._picture("train", self._folder / "digits.training.html", "Epochs"),
        )

    def _export(self) -> Scene:
        command = (
            f"export zoo:simple_cnn --weights {self._folder / 'digits.safetensors'} --name digits --calibrate digits "
            f"--evaluate digits --store {self._store}"
        )
        printed, seconds = _convoy(command)
        bundle = self._store / "digits" / "1"
        return Scene(
            "Export",
            "Turn the checkpoint into a bundle of ONNX files, one per precision. A file that loses accuracy, or is not "
            "faster, is not served. A † marks times that were measured while other processes were busy.",
            command,
            printed,
            seconds,
            _variants(bundle),
            self._picture("export", bundle / "report.html", "Recall per class"),
        )

    def _serve(self, server: Server, ready_s: float) -> Scene:
        return Scene(
            "Serve",
            "The server verifies the bundle, picks the fastest engine, and runs a test inference before it reports "
            "ready. Its page is at `/`.",
            f"serve --store {self._store} --access-log off --port 0 --grpc-port 0",
            "".join(line.partition(" ")[2] for line in server.log_so_far.splitlines(keepends=True)),
            ready_s,
            "from start to ready",
            self._picture("serve", server.url, wait_s=3.0),
        )

    def _predict(self, server: Server) -> Scene:
        images = self._folder / "images"
        images.mkdir()
        for image in sorted(_IMAGES.glob("*.png"))[:_PICTURED]:
            shutil.copy(image, images)
        command = f"predict digits {images} --top-k 1 --url {server.url}"
        printed, seconds = _convoy(command)
        answers = [json.loads(line) for line in _convoy(f"{command} --json", quiet=True)[0].splitlines()]
        sheet = self._folder / "predict.html"
        sheet.write_text(_answers_page(answers), encoding="utf-8")
        # The images that ship with Convoy are named for what they show: `digit-0002-is-2.png`.
        right = sum(Path(one["image"]).stem.endswith(f"-is-{one['predictions'][0]['label']}") for one in answers)
        return Scene(
            "Predict",
            "Send a folder of images. The file names say what they show.",
            command,
            printed,
            seconds,
            f"{right} of {len(answers)} images right",
            self._picture("predict", sheet),
        )

    def _load(self, server: Server) -> Scene:
        report, figures = self._folder / "load.html", self._folder / "load.json"
        command = f"{_LOAD} --duration 10 --url {server.url} --report {report} --json {figures}"
        printed, seconds = _convoy(command)
        measured = json.loads(figures.read_text())
        rate = measured["good"] / measured["window_s"]
        return Scene(
            "Load",
            "Eight clients send requests for ten seconds, each the next one when it has its answer.",
            command,
            printed,
            seconds,
            f"{rate:,.0f} images a second over HTTP, {measured['failed']} failed",
            self._picture("load", report, "Where the time went"),
        )

    def _watch(self, server: Server) -> Scene:
        """In a load of its own, because a browser beside it would take from the measured one."""
        command = f"{_LOAD} --duration {_LOOK_S + 4:g} --url {server.url}"
        print(f"$ convoy {command}", flush=True)
        started_s = time.perf_counter()
        with subprocess.Popen(_words(command), stdout=subprocess.PIPE, text=True) as load:
            picture = self._picture("page", server.url, wait_s=_LOOK_S, wanted=".more .split")
            load.communicate()
        if load.returncode != 0:
            raise SystemExit(f"the demo stops: `convoy {command}` ended with exit code {load.returncode}")
        return Scene(
            "Look",
            "The same load again, and the server's page with the model's row open.",
            command,
            "",
            time.perf_counter() - started_s,
            f"the page at {server.url}, under load",
            picture,
        )

    def _picture(
        self, name: str, what: Path | str, until: str | None = None, wait_s: float = 0.5, **how: str
    ) -> str | None:
        """The file's name, below where the words are; the rest is as for `take`."""
        if self._tab is None:
            time.sleep(wait_s)
            return None
        url = what if isinstance(what, str) else what.absolute().as_uri()
        take(self._tab, url, self._out / "demo" / f"{name}.png", until=until, wait_s=wait_s, **how)
        return f"demo/{name}.png"


@contextmanager
def open_tab(program: str | None) -> Iterator[Page | None]:
    """A page of that Chromium; None where there is none."""
    if program is None:
        yield None
        return
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser.new_page(viewport={"width": _WIDTH, "height": 300}, color_scheme="light")
        browser.close()


def take(
    tab: Page,
    url: str,
    file: Path,
    *,
    until: str | None = None,
    wait_s: float = 0.5,
    wanted: str | None = None,
) -> None:
    """A PNG of the page as it looks so long after it was opened, as far as the heading `until`, if there is one.

    `wanted` is a CSS selector of what must be there before the picture is taken.
    """
    tab.goto(url)
    tab.wait_for_timeout(1000 * wait_s)
    if wanted is not None:
        tab.wait_for_selector(wanted)
    height = min(_MOST_HEIGHT, tab.evaluate("document.documentElement.scrollHeight"))
    headings = tab.locator("h2, h3").filter(has_text=until or "no such heading")
    box = headings.first.bounding_box() if headings.count() else None
    clip = {"x": 0, "y": 0, "width": _WIDTH, "height": min(height, box["y"]) if box else height}
    taken = tab.screenshot(full_page=True, clip=clip)  # type: ignore[arg-type]  # a dict of just these
    tab.goto("about:blank")  # a live page would go on asking its server
    with Image.open(BytesIO(taken)) as image:
        image.convert("RGB").quantize(_COLOURS).save(file, optimize=True)


def film(scenes: list[Scene]) -> str:
    """The steps as Markdown: words, what is typed, what it prints, and the picture."""
    parts = [
        "# A complete run",
        _filled(
            "`make demo` types the commands on this page and keeps the results in `build/demo`. `make demo OUT=docs` "
            f"writes this page. This run was on a machine with {len(os.sched_getaffinity(0))} cores."
        ),
    ]
    for number, scene in enumerate(scenes, start=1):
        parts += [
            f"## {number}. {scene.title}",
            _filled(scene.words),
            f"```bash\n.venv/bin/convoy {scene.command}\n```",
        ]
        if scene.printed.strip():
            parts.append(f"```text\n{_shortened(scene.printed.strip(chr(10)))}\n```")
        if scene.picture is not None:
            parts.append(f"![{scene.title}: {scene.result}]({scene.picture})")
    return "\n\n".join(parts) + "\n"


def _shortened(printed: str) -> str:
    """The first lines and the last one."""
    lines = printed.splitlines()
    return printed if len(lines) <= _MOST_LINES else "\n".join([*lines[: _MOST_LINES - 2], "...", lines[-1]])


def _filled(words: str) -> str:
    return textwrap.fill(words, 120, break_long_words=False, break_on_hyphens=False)


def main(
    folder: Annotated[Path, typer.Option(help="Where everything is kept; an earlier demo there is replaced.")],
    out: Annotated[Path, typer.Option(help="Where demo.md goes, and the folder of its pictures.")],
) -> None:
    """A complete run: train, export, serve, predict, load, look."""
    console = Console()
    try:
        make_empty(folder)
        (out / "demo").mkdir(parents=True, exist_ok=True)
        program = found_tool("chromium")
        if program is None:
            console.print("No pictures: there is no Chromium here (Debian, Ubuntu: apt-get install chromium).")
        with open_tab(program) as tab:
            scenes = list(Film(folder, out, tab).play())
    except ConvoyError as error:
        print(f"demo: {error}", file=sys.stderr)
        raise typer.Exit(error.exit_code) from None
    words = out / "demo.md"
    if program is None and out != folder:
        console.print(f"{words} stays as it is, because its pictures could not be made anew", soft_wrap=True)
    else:
        words.write_text(film(scenes), encoding="utf-8")
    console.print(_table(scenes))
    for what, where in (
        ("the film", words),
        ("how it learned", folder / "digits.training.html"),
        ("what export proved", folder / "store" / "digits" / "1" / "report.html"),
        ("what the load showed", folder / "load.html"),
        ("the store, to serve", folder / "store"),
    ):
        console.print(f"{what:<22} {where}", soft_wrap=True, highlight=False)


def make_empty(folder: Path) -> None:
    """A folder for a demo, without what an earlier one left. Raises UsageError where something else lies."""
    if folder.exists() and any(folder.iterdir()):
        if not (folder / _MARK).exists():
            raise UsageError(f"{folder} holds something that no demo wrote; name another --folder")
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _MARK).touch()


def _words(command: str) -> list[str]:
    return [sys.executable, "-m", "convoy", *shlex.split(command)]


def _convoy(command: str, *, quiet: bool = False) -> tuple[str, float]:
    """Run one command as a user would: what it printed, and the seconds it took. Ends the demo when it fails."""
    started_s = time.perf_counter()
    if not quiet:
        print(f"$ convoy {command}", flush=True)
    environment = {**os.environ, "COLUMNS": "100"}
    with subprocess.Popen(_words(command), stdout=subprocess.PIPE, text=True, env=environment) as child:
        assert child.stdout is not None
        printed = []
        for line in child.stdout:
            printed.append(line.rstrip() + "\n")
            if not quiet:
                print(line, end="", flush=True)
    if child.returncode != 0:
        raise SystemExit(f"the demo stops: `convoy {command}` ended with exit code {child.returncode}")
    return "".join(printed), time.perf_counter() - started_s


def _variants(bundle: Path) -> str:
    manifest = json.loads((bundle / "manifest.json").read_text())
    return ", ".join(f"{variant['file']} {100 * variant['accuracy']['top1']:.2f} %" for variant in manifest["variants"])


def _answers_page(answers: list[dict[str, list[dict[str, str]]]]) -> str:
    """Each image with what the server says of it."""
    figures = [_answered(answer) for answer in answers]
    body = element("main", element("h1", "What is in them?"), element("div", *figures, class_="answers"))
    return page("predict", body, _STYLE)


def _answered(answer: dict[str, list[dict[str, str]]]) -> Element:
    path, best = Path(str(answer["image"])), answer["predictions"][0]
    source = f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}"
    says = f"{best['label']}, {100 * float(best['score']):.1f} %"
    return element("figure", element("img", src=source, alt=path.name), element("figcaption", says))


def _table(scenes: list[Scene]) -> Table:
    table = Table("step", "seconds", "result")
    for scene in scenes:
        table.add_row(scene.title, f"{scene.seconds:.1f}", scene.result)
    table.columns[0].no_wrap = table.columns[1].no_wrap = True
    return table


if __name__ == "__main__":
    typer.run(main)
