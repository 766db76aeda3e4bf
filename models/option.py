"""How a field of a record of options appears on the command line, declared beside the field.

`convoy.command` makes the options, for `Annotated[kind, Option(...)]`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class Option(NamedTuple):
    """`name` defaults to `--the-field`, for a bool also `--no-the-field`; an `is_argument` has none.

    `read` converts the typed text if the field's type does not do that, and raises UsageError; `typed_default` is the
    text to read if nothing was typed. `words` lists the allowed values if the field's type, such as a Literal, does
    not. `group` is its heading in `--help`.
    """

    help: str
    name: str = ""
    is_argument: bool = False
    read: Callable[[Any], object] | None = None
    typed_default: str | None = None
    words: tuple[str, ...] = ()
    group: str = ""
