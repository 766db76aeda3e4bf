"""What was found out a moment ago, and holds for the next request, too."""

from __future__ import annotations

from typing import Generic, TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")

_MOST = 256


class Recent(Generic[Key, Value]):
    """The last few hundred. Where more come, all are forgotten: clients that send so many kinds gain nothing here.

    Belongs to the event loop.
    """

    __slots__ = ("_values",)

    def __init__(self) -> None:
        self._values: dict[Key, Value] = {}

    def find(self, key: Key) -> Value | None:
        return self._values.get(key)

    def keep(self, key: Key, value: Value) -> None:
        """In the place of what was there, if anything was."""
        if len(self._values) >= _MOST and key not in self._values:
            self._values.clear()
        self._values[key] = value
