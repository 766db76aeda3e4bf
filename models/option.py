"""What the command line says of one field of a record of options, and which variables are not options.

`convoy.command` makes options of `Annotated[kind, Option(...)]`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

# Kubernetes sets these in each pod of a namespace that has a Service whose name begins with "convoy".
_NAME_BY_KUBERNETES = re.compile(r"_SERVICE_(HOST|PORT)(_|$)|_PORT_\d+_(TCP|UDP|SCTP)(_|$)")
_ADDRESS_BY_KUBERNETES = re.compile(r"(tcp|udp|sctp)://")


def is_of_kubernetes(name: str, value: str) -> bool:
    """Whether Kubernetes set a variable for a Service, such as CONVOY_PORT=tcp://10.0.0.1:8000."""
    return bool(_NAME_BY_KUBERNETES.search(name.upper()) or _ADDRESS_BY_KUBERNETES.match(value))


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
