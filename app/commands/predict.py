"""`convoy predict`: images to a running server, one table out, or a line of JSON for each.

Knows files, tables and exit codes; the server is `app.client`'s.
"""

from __future__ import annotations

import glob
import itertools
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO, NamedTuple

import orjson
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from convoy.app.client.client import Client
from convoy.app.client.errors import NOT_A_SERVER
from convoy.app.python.records import Classification
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
from convoy.models.image_files import IMAGE_SUFFIXES, read_image_file

STDIN = "-"


class Given(NamedTuple):
    """An image as it is called in the table, and where it is: a path, or the bytes that came by stdin."""

    name: str
    image: Path | bytes


def predict(
    client: Client,
    model: str,
    images: Sequence[str],
    top_k: int,
    *,
    as_json: bool = False,
    console: Console | None = None,
    errors: Console | None = None,
    stdin: BinaryIO | None = None,
) -> int:
    """Asks for each image and prints its `top_k` best classes: a table, or JSON lines as they come.

    `images` are files, folders (with all that is below them), patterns, and `-` for an image from stdin. One that
    cannot be read or is refused is one line on stderr, and the others go on. Gives the exit code, which is 1 then.
    Raises JobError where going on makes no sense (no server, no such model, wrong key), UsageError for a wrong call.
    """
    if top_k < 1:
        raise UsageError(f"--top-k must be at least 1, not {top_k}")
    console, errors = console or Console(), errors or Console(stderr=True)
    given = list(_images(images, sys.stdin.buffer if stdin is None else stdin))
    table = Table("image", "label", "class", "score")
    table.columns[0].overflow = table.columns[1].overflow = "fold"  # a name that is cut is none
    failed = 0
    for one, found in _in_order(client, model, given, top_k):
        if found.error is not None:
            failed += 1
            words = str(found.error)
            line = words if one.name in words else f"{one.name}: {words}"
            errors.print(escape(line), style="red", soft_wrap=True)
        if as_json:
            console.out(_json_line(one.name, found), highlight=False)
        elif found.error is None:
            _add_rows(table, one.name, found)
    if table.row_count:
        console.print(table)
    return 1 if failed else 0


def _in_order(client: Client, model: str, given: Sequence[Given], top_k: int) -> Iterator[tuple[Given, Classification]]:
    """Each image with its answer or its error. Raises JobError for what would go wrong with every image."""

    def ask(one: Given) -> Classification:
        try:
            image = one.image if isinstance(one.image, bytes) else read_image_file(one.image)
            return client.predict(model, image, top_k=top_k)
        except NotFound as error:
            raise JobError(f"{error}; {_what_is_served(client)}") from None
        except Unauthorized as error:
            raise JobError(f"{error}; give a file with the key: --api-key-file or CONVOY_API_KEY_FILE") from None
        except (Unavailable, DeadlineExceeded) as error:
            raise JobError(str(error)) from None
        except RequestError as error:
            return Classification(model, 0, (), error=error)

    # A window, so that a folder of a million images is not read ahead of its answers.
    with ThreadPoolExecutor(client.at_once) as threads:
        waiting = iter(given)
        asked = [(one, threads.submit(ask, one)) for one in itertools.islice(waiting, 2 * client.at_once)]
        try:
            while asked:
                one, future = asked.pop(0)
                yield one, future.result()
                asked += [(other, threads.submit(ask, other)) for other in itertools.islice(waiting, 1)]
        finally:
            threads.shutdown(wait=False, cancel_futures=True)


def _images(given: Iterable[str], stdin: BinaryIO) -> Iterator[Given]:
    """Raises UsageError for what names none."""
    names = list(given)
    if not names:
        raise UsageError("name at least one image: files, folders, patterns, or - for one from stdin")
    if names.count(STDIN) > 1:
        raise UsageError(f"{STDIN} is one image from stdin; name it once")
    for name in names:
        path = Path(name)
        if name == STDIN:
            yield Given("stdin", stdin.read())
        elif path.is_dir():
            yield from _all_of(sorted(path.rglob("*")), name, "has no images below it")
        elif not path.exists() and glob.has_magic(name):
            found = sorted(glob.glob(name, recursive=True))  # noqa: PTH207 - as a shell has them
            yield from _all_of(map(Path, found), name, "fits no image")
        else:
            yield Given(name, path)


def _all_of(paths: Iterable[Path], name: str, objection: str) -> Iterator[Given]:
    found = [path for path in paths if path.suffix.lower() in IMAGE_SUFFIXES and path.is_file()]
    if not found:
        raise UsageError(
            f"{name} {objection} ({', '.join(sorted(IMAGE_SUFFIXES))}); name another, or the files themselves"
        )
    for path in found:
        yield Given(str(path), path)


def _json_line(name: str, found: Classification) -> str:
    if found.error is not None:
        return orjson.dumps({"image": name, "error": str(found.error)}).decode()
    timing = None if found.timing_ms is None else found.timing_ms._asdict()
    answer = {
        "model": found.model,
        "version": str(found.version),
        "predictions": found.predictions,
        "timing_ms": timing,
    }
    return orjson.dumps({"image": name, **answer}).decode()


def _what_is_served(client: Client) -> str:
    try:
        names = sorted({model.name for model in client.models() if model.is_ready})
    except ConvoyError:
        return NOT_A_SERVER
    return f"the server has {', '.join(names)}" if names else "the server has no model ready"


def _add_rows(table: Table, image: str, found: Classification) -> None:
    for rank, one in enumerate(found.predictions):
        name = "" if one.label is None else escape(one.label)
        last = rank == len(found.predictions) - 1
        shown = escape(image) if rank == 0 else ""
        table.add_row(shown, name, str(one.class_id), f"{one.score:.4f}", end_section=last)
