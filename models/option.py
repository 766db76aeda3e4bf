"""How a field of a record of options appears on the command line, and which variables are not options.

`convoy.command` makes the options, for `Annotated[kind, Option(...)]`.
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
