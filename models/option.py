"""What the command line says of one field of a record of options, beside the field itself.

Knows words. Knows no command line: `convoy.command` makes the options of them, for `Annotated[kind, Option(...)]`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class Option(NamedTuple):
    """`name` is `--the-field` where none is given, of a bool with its `--no-the-field`; `is_argument` has none.

    `read` makes the field's value of the text that was typed, where that is more than the field's kind says, and raises
    UsageError; then `typed_default` is what it reads where nothing was typed. `words` are all that the field takes,
    where its kind, which may be a Literal, does not say so. `group` is the heading of `--help` under which it stands.
    """

    help: str
    name: str = ""
    is_argument: bool = False
    read: Callable[[Any], object] | None = None
    typed_default: str | None = None
    words: tuple[str, ...] = ()
    group: str = ""
