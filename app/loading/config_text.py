"""The text of a `config.pbtxt` as a message, with the line of whatever is wrong with it.

Knows protobuf's text format and the shape of ModelConfig; what its fields mean is not known here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

from convoy.models.errors import BundleError
from convoy.models.files import read_small

# How many mistakes of one file are listed.
MOST_TOLD = 50


@dataclass(frozen=True, slots=True)
class ConfigText:
    """`message` is what could be read; `mistakes` are the fields that there are not, each with its line."""

    message: Any
    mistakes: tuple[str, ...] = ()


class _UnknownField(NamedTuple):
    line: int
    words: str


def read_config_text(path: Path) -> ConfigText:
    """Raises BundleError where it cannot be read at all."""
    try:
        return parse_config(read_small(path), str(path))
    except OSError as error:
        raise BundleError(f"{path}: cannot be read ({error}); mend it or remove it") from error


def parse_config(data: bytes, where: str) -> ConfigText:
    """`where` is how errors name the file. Raises BundleError for what is not ModelConfig in protobuf's text format."""
    # Imported here, because it imports grpc, which only a config.pbtxt needs.
    from google.protobuf import text_format
    from tritonclient.grpc import model_config_pb2

    kind: Any = model_config_pb2.ModelConfig
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise BundleError(f"{where}: line {line}: is not UTF-8; write it as UTF-8 text") from error
    try:
        return ConfigText(text_format.Parse(text, kind()))
    except RecursionError as error:
        raise BundleError(
            f"{where}: cannot be read: its braces are nested too deeply; correct it or remove it"
        ) from error
    except text_format.ParseError as error:
        first, unknown = error, _unknown_fields(text, kind.DESCRIPTOR)
    mistakes = tuple(f"line {line}: {words}" for line, words in unknown[:MOST_TOLD])
    try:
        if unknown:
            return ConfigText(text_format.Parse(text, kind(), allow_unknown_field=True), mistakes)
    except text_format.ParseError as error:
        first = error
    # The parser ends at its first mistake, which may be that it cannot pass over an unknown field.
    if first.GetLine() not in [one.line for one in unknown]:
        mistakes += (_told(first, text),)
    raise BundleError(f"{where}: cannot be read: {'; '.join(mistakes)}; correct it or remove it") from first


def _told(error: Exception, text: str) -> str:
    """Without the line itself, which may be as long as the file."""
    place = re.match(r"(\d+):(\d+) : ", str(error))
    words = str(error)[place.end() if place else 0 :].replace('"inference.', '"')
    if place is None:
        return words
    line = text.split("\n")[int(place[1]) - 1]
    words = " ".join(words.removeprefix(f"'{line}': ").split()).rstrip(".")
    return f"line {place[1]}, column {place[2]}: {words}"


def _unknown_fields(text: str, descriptor: Any) -> tuple[_UnknownField, ...]:
    """All of them, where the parser names one; as far as the text can be followed."""
    from google.protobuf import text_format

    found: list[_UnknownField] = []
    tokens = text_format.Tokenizer(text.split("\n"))
    with suppress(text_format.ParseError):  # what comes before a mistake in the text counts
        found.extend(_in_message(tokens, descriptor, ""))
    return tuple(found)


def _in_message(tokens: Any, descriptor: Any, end: str) -> Iterator[_UnknownField]:
    """A message's fields up to `end`; those of one that is unknown itself, for which there is no descriptor, unseen."""
    while not tokens.AtEnd() and not tokens.LookingAt(end):
        line = tokens.ParseError("").GetLine()
        name = tokens.ConsumeIdentifier()
        field = None if descriptor is None else descriptor.fields_by_name.get(name)
        if descriptor is not None and field is None:
            near = get_close_matches(name.lower(), descriptor.fields_by_name, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            yield _UnknownField(line, f"{descriptor.name} has no field {name!r}{hint}")
        tokens.TryConsume(":")
        yield from _in_value(tokens, None if field is None else field.message_type)
        if not tokens.TryConsume(";"):
            tokens.TryConsume(",")


def _in_value(tokens: Any, descriptor: Any) -> Iterator[_UnknownField]:
    for start, end in ("{}", "<>"):
        if tokens.TryConsume(start):
            yield from _in_message(tokens, descriptor, end)
            tokens.Consume(end)
            return
    if tokens.TryConsume("["):
        while not tokens.TryConsume("]"):
            if tokens.AtEnd():
                raise tokens.ParseError('Expected "]"')
            yield from _in_value(tokens, descriptor)
            tokens.TryConsume(",")
        return
    tokens.TryConsume("-")
    is_text = tokens.token[:1] in ("'", '"')
    tokens.NextToken()
    while is_text and tokens.token[:1] in ("'", '"'):  # pieces of one text
        tokens.NextToken()
