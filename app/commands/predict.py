"""`convoy predict`: send images to a running server, and print one table, or a line of JSON for each.

Knows files, tables and exit codes; `app.client` talks to the server.
"""

from __future__ import annotations

import glob
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import BinaryIO, NamedTuple

import orjson
from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from convoy.app.client.client import Client
from convoy.app.client.records import NOT_A_SERVER, Sight
from convoy.app.commands.drawing import check_drawing, write_drawing
from convoy.models.answers import Classification, ClassShare, Detection, Detections, Prediction, Segmentation
from convoy.models.errors import (
    ConvoyError,
    DeadlineExceeded,
    JobError,
    NotFound,
    RequestError,
    Unauthorized,
    Unavailable,
    UsageError,
)
from convoy.models.image_files import IMAGE_SUFFIXES

STDIN = "-"
_Rows = list[tuple[str, ...]]


class Given(NamedTuple):
    """An image with its name in the table, and its source: a path, or bytes from stdin."""

    name: str
    image: Path | bytes


def predict(
    client: Client,
    model: str,
    images: Sequence[str],
    top_k: int | None,
    *,
    threshold: float | None = None,
    iou: float | None = None,
    draw: Path | None = None,
    as_json: bool = False,
    console: Console | None = None,
    errors: Console | None = None,
    stdin: BinaryIO | None = None,
) -> int:
    """Predict each image and print the result: a table, or JSON lines as they come.

    Prints the `top_k` best classes or boxes that reach `threshold`, or the share of each class. Boxes of a class that
    overlap by more than `iou` are suppressed. None leaves a number to the server. `images` are files, folders
    (recursively), patterns, and `-` for an image from stdin. One that cannot be read or is refused is one line on
    stderr, and the others continue. Returns the exit code, which is 1 then. With `draw`, what was found in the only
    image is also drawn into a copy of it. Raises JobError if continuing is pointless (no server, unknown model, wrong
    key) or the drawing cannot be written, and UsageError for wrong usage.
    """
    if top_k is not None and top_k < 1:
        raise UsageError(f"--top-k must be at least 1, not {top_k}")
    if iou is not None and not 0 < iou <= 1:
        raise UsageError(f"--iou must be above 0 and at most 1, not {iou:g}")
    console, errors = console or Console(), errors or Console(stderr=True)
    given = list(_images(images, sys.stdin.buffer if stdin is None else stdin))
    if draw is not None:
        check_drawing(draw, [one.image for one in given])
    headings: tuple[str, ...] = ()
    shown: list[tuple[str, _Rows]] = []
    failed = 0
    for one, found in _in_order(client, given, partial(client.look, model, top_k=top_k, threshold=threshold, iou=iou)):
        if found.error is not None:
            failed += 1
            words = str(found.error)
            line = words if one.name in words else f"{one.name}: {words}"
            errors.print(escape(line), style="red", soft_wrap=True)
        elif draw is not None:
            write_drawing(draw, one.image, found)
        if as_json:
            console.out(_json_line(one.name, found), highlight=False)
        elif found.error is None:
            headings, rows = _cells(found)
            shown.append((one.name, rows))
    if shown:
        _print(console, headings, shown)
    return 1 if failed else 0


def _in_order(
    client: Client, given: Sequence[Given], look: Callable[[Path | bytes], Sight]
) -> Iterator[tuple[Given, Sight]]:
    """Each image with its result or its error. Raises JobError for errors that would affect every image."""

    def ask(one: Given) -> Sight:
        try:
            return look(one.image)
        except NotFound as error:
            raise JobError(
                str(error) if "; available: " in str(error) else f"{error}; {_what_is_served(client)}"
            ) from None
        except Unauthorized as error:
            raise JobError(f"{error}; pass a file with the key: --api-key-file or CONVOY_API_KEY_FILE") from None
        except (Unavailable, DeadlineExceeded) as error:
            raise JobError(str(error)) from None
        except RequestError as error:
            return Classification("", 0, (), error=error)  # only its error is read

    with ThreadPoolExecutor(client.at_once) as threads:
        # Not all at once: there may be a million of them.
        for first in range(0, len(given), 1000):
            some = given[first : first + 1000]
            yield from zip(some, threads.map(ask, some), strict=True)


def _images(given: Iterable[str], stdin: BinaryIO) -> Iterator[Given]:
    """Raises UsageError for an argument that names no image."""
    names = list(given)
    if not names:
        raise UsageError("pass at least one image: files, folders, patterns, or - for an image from stdin")
    if names.count(STDIN) > 1:
        raise UsageError(f"{STDIN} reads one image from stdin; pass it once")
    for name in names:
        path = Path(name)
        if name == STDIN:
            yield Given("stdin", stdin.read())
        elif path.is_dir():
            yield from _all_of(sorted(path.rglob("*")), name, "contains no images")
        elif not path.exists() and glob.has_magic(name):
            found = sorted(glob.glob(name, recursive=True))  # noqa: PTH207 - as a shell has them
            yield from _all_of(map(Path, found), name, "matches no image")
        else:
            yield Given(name, path)


def _all_of(paths: Iterable[Path], name: str, objection: str) -> Iterator[Given]:
    found = [path for path in paths if path.suffix.lower() in IMAGE_SUFFIXES and path.is_file()]
    if not found:
        raise UsageError(f"{name} {objection} ({', '.join(sorted(IMAGE_SUFFIXES))}); choose another, or pass the files")
    for path in found:
        yield Given(str(path), path)


def _json_line(name: str, found: Sight) -> str:
    if found.error is not None:
        return orjson.dumps({"image": name, "error": str(found.error)}).decode()
    answer: dict[str, object] = {"image": name, "model": found.model, "version": str(found.version)}
    match found:
        case Classification():
            answer["predictions"] = found.predictions
        case Detections():
            answer["detections"] = [one.document() for one in found.detections]
        case Segmentation():
            answer["segmentation"] = {"classes": found.classes, "unseen_share": found.unseen_share}
    answer["timing_ms"] = None if found.timing_ms is None else found.timing_ms._asdict()
    return orjson.dumps(answer).decode()


def _what_is_served(client: Client) -> str:
    try:
        names = sorted({model.name for model in client.models() if model.is_ready})
    except ConvoyError:
        return NOT_A_SERVER
    return f"available: {', '.join(names)}" if names else "no model is ready"


def _cells(found: Sight) -> tuple[tuple[str, ...], _Rows]:
    """The headings, and a row for each thing in the image: label, class, and what else the task has."""
    match found:
        case Detections():
            boxes = [(*_class(one), f"{one.score:.4f}", _numbers(one.box)) for one in found.detections]
            return ("label", "class", "score", "box: x1, y1, x2, y2"), [*boxes]
        case Segmentation():
            most_first = sorted(found.classes, key=lambda one: -one.share)
            return ("label", "class", "share"), [(*_class(one), f"{100 * one.share:.1f} %") for one in most_first]
    return ("label", "class", "score"), [(*_class(one), f"{one.score:.4f}") for one in found.predictions]


def _class(one: Prediction | Detection | ClassShare) -> tuple[str, str]:
    return "" if one.label is None else escape(one.label), str(one.class_id)


def _numbers(values: Iterable[float]) -> str:
    return ", ".join(f"{value:g}" for value in values)


def _print(console: Console, headings: tuple[str, ...], shown: Sequence[tuple[str, _Rows]]) -> None:
    """One table; if that would break an image's name, each name on its own line with its table below."""
    without = [_table(headings, [("", rows)]) for _, rows in shown]
    figures = max(console.measure(table).minimum for table in without)
    names = max(cell_len(name) for name, _ in shown)
    if names + 3 + figures <= console.width:  # a column's frame takes three
        console.print(_table(("image", *headings), shown))
        return
    for (name, _), table in zip(shown, without, strict=True):
        console.print(name, soft_wrap=True, markup=False, highlight=False)
        console.print(table)


def _table(headings: tuple[str, ...], shown: Sequence[tuple[str, _Rows]]) -> Table:
    """A table of images, with their names if the first heading is theirs."""
    table = Table(*headings)
    has_names = headings[0] == "image"
    table.columns[0].no_wrap = has_names
    table.columns[int(has_names)].overflow = "fold"  # a label must not be cut
    for name, rows in shown:
        for rank, cells in enumerate(rows or [("nothing found",)]):
            first = [escape(name) if rank == 0 else ""] if has_names else []
            table.add_row(*first, *cells, end_section=rank >= len(rows) - 1)
    return table
