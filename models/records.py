"""Typed records to JSON and back, strictly.

Supports dataclasses, tuples, dicts with string keys, literals, optional values and JSON's scalars. A value of the wrong
type, a missing field without a default and an unknown field are errors that name the path, because guessing at a
manifest would serve wrong answers. Fields that were added later have defaults, so that older files stay readable.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import Any, TypeVar

RecordType = TypeVar("RecordType")


class RecordError(ValueError):
    """The JSON does not match the record; the message starts with the path."""


def to_jsonable(record: object) -> Any:
    """The record as dicts, lists and scalars, in field order."""
    if dataclasses.is_dataclass(record) and not isinstance(record, type):
        return {f.name: to_jsonable(getattr(record, f.name)) for f in dataclasses.fields(record)}
    if isinstance(record, dict):
        return {key: to_jsonable(value) for key, value in record.items()}
    if isinstance(record, tuple | list):
        return [to_jsonable(value) for value in record]
    return record


def from_jsonable(kind: type[RecordType], data: Any, where: str) -> RecordType:
    """Parse `data` as a `kind`; error messages start with the path `where`.

    Raises RecordError.
    """
    return typing.cast(RecordType, _value(kind, data, where))


def _value(kind: Any, data: Any, where: str) -> Any:
    origin = typing.get_origin(kind)
    if dataclasses.is_dataclass(kind):
        return _record(kind, data, where)
    if origin is typing.Literal:
        return _literal(kind, data, where)
    if origin in (typing.Union, types.UnionType):
        return _optional(kind, data, where)
    if origin is tuple:
        return _tuple(kind, data, where)
    if origin is dict:
        if not isinstance(data, dict):
            raise RecordError(f"{where}: expected an object, got {_shown(data)}")
        return {key: _value(typing.get_args(kind)[1], value, f"{where}.{key}") for key, value in data.items()}
    return _scalar(kind, data, where)


def _record(kind: Any, data: Any, where: str) -> Any:
    if not isinstance(data, dict):
        raise RecordError(f"{where}: expected an object, got {_shown(data)}")
    hints = typing.get_type_hints(kind)
    fields = {f.name: f for f in dataclasses.fields(kind)}
    unknown = sorted(set(data) - set(fields))
    if unknown:
        raise RecordError(f"{where}.{unknown[0]}: unknown field")
    missing = [name for name, field in fields.items() if name not in data and _is_required(field)]
    if missing:
        raise RecordError(f"{where}.{missing[0]}: missing")
    return kind(**{name: _value(hints[name], value, f"{where}.{name}") for name, value in data.items()})


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _literal(kind: Any, data: Any, where: str) -> Any:
    allowed = typing.get_args(kind)
    # bool is an int in Python: True must not pass for the literal 1.
    if any(data == value and type(data) is type(value) for value in allowed):
        return data
    raise RecordError(f"{where}: expected one of {list(allowed)}, got {_shown(data)}")


def _optional(kind: Any, data: Any, where: str) -> Any:
    members = [member for member in typing.get_args(kind) if member is not type(None)]
    if data is None and len(members) < len(typing.get_args(kind)):
        return None
    return _value(members[0], data, where)


def _tuple(kind: Any, data: Any, where: str) -> Any:
    if not isinstance(data, list):
        raise RecordError(f"{where}: expected a list, got {_shown(data)}")
    member = typing.get_args(kind)[0]
    return tuple(_value(member, value, f"{where}[{index}]") for index, value in enumerate(data))


def _scalar(kind: Any, data: Any, where: str) -> Any:
    if kind is float and isinstance(data, int) and not isinstance(data, bool):
        return float(data)
    if type(data) is kind:
        return data
    raise RecordError(f"{where}: expected {kind.__name__}, got {_shown(data)}")


def _shown(data: Any) -> str:
    text = repr(data)
    return text if len(text) <= 60 else text[:57] + "..."
