"""A page that was written by hand, with blocks in it that are measured: each stands between two marks.

Knows the marks. Replaces what is between them and leaves the rest alone.
"""

from __future__ import annotations

from pathlib import Path

from convoy.loadtest.peers.results import write_text
from convoy.models.errors import JobError


def replace_block(path: Path, name: str, text: str) -> None:
    """Puts `text` between the marks of `name`; a page that is not there yet gets nothing but that.

    Raises JobError where the page lacks the marks or cannot be written.
    """
    begin, end = f"<!-- measured: {name} -->", f"<!-- end of {name} -->"
    block = f"{begin}\n{text}\n{end}"
    if not path.exists():
        write_text(path, block + "\n")
        return
    before, found_begin, rest = path.read_text().partition(begin)
    _, found_end, after = rest.partition(end)
    if not (found_begin and found_end):
        raise JobError(f"{path} has no lines {begin!r} and {end!r}, between which the figures go; add them")
    write_text(path, before + block + after)
