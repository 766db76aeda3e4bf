"""Parameters of requests and tensors: which keys and which kinds of values a client may send."""

from __future__ import annotations

from collections.abc import Mapping

from convoy.app.edge.oip.tensors import brief
from convoy.models.errors import InvalidRequest

_RESERVED_PREFIX = "triton_"
# The one reserved key that clients do send; the gRPC stream reads it.
_ALLOWED = frozenset({"triton_enable_empty_final_response"})

# From here on JSON's readers do not agree on a number.
_TOO_LARGE = 1 << 53


def check_parameters(parameters: Mapping[str, object]) -> None:
    """Raises InvalidRequest for a reserved key, and for a value that the protocol has no kind for."""
    for name, value in parameters.items():
        if name.startswith(_RESERVED_PREFIX) and name not in _ALLOWED:
            raise InvalidRequest(
                f"parameter keys starting with 'triton_' are reserved for Triton usage and should not be specified; "
                f"rename '{name[:100]}'"
            )
        if not isinstance(value, str | int | float | bool):
            raise InvalidRequest(
                f"parameter '{name[:100]}' has an invalid type; it must be a string, a number, true or false"
            )


def whole_number(parameters: Mapping[str, object], name: str, what: str) -> int:
    """A parameter of `what` that counts something; 0 where it is not given. Raises InvalidRequest."""
    value = parameters.get(name, 0)
    if type(value) is not int or not 0 <= value < _TOO_LARGE:
        raise InvalidRequest(
            f"'{name}' in 'parameters' of {what} must be a whole number >= 0 and < {_TOO_LARGE}, got {brief(value)}"
        )
    return value
