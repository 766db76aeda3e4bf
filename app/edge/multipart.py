"""The files in a multipart form."""

from __future__ import annotations

from email.message import Message
from typing import TYPE_CHECKING

from python_multipart import MultipartParser
from python_multipart.exceptions import MultipartParseError

from models.errors import InvalidRequest

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

MAX_FILES = 256


def boundary_of(content_type: bytes) -> bytes | None:
    """The boundary of a multipart form, or None for every other content type."""
    message = Message()
    message["content-type"] = content_type.decode("latin-1")
    if message.get_content_type() != "multipart/form-data":
        return None
    boundary = message.get_param("boundary")
    return boundary.encode("latin-1") if isinstance(boundary, str) and boundary else b""


def split_files(form: bytes, boundary: bytes) -> list[bytes]:
    """The contents of every part that has a file name, in order. Raises InvalidRequest."""
    if not boundary:
        raise InvalidRequest("the content type multipart/form-data has no boundary")
    collector = _Collector()
    try:
        parser = MultipartParser(boundary, collector.callbacks())
        parser.write(form)
        parser.finalize()
    except MultipartParseError as error:
        raise InvalidRequest(f"the multipart form is malformed: {error}") from error
    if not collector.is_complete:
        raise InvalidRequest("the multipart form is cut off before its closing boundary")
    if not collector.files:
        raise InvalidRequest("the multipart form has no file; send one with `curl -F file=@image.jpg`")
    return collector.files


class _Collector:
    """What the parser's callbacks add up to."""

    def __init__(self) -> None:
        self.files: list[bytes] = []
        self.is_complete = False
        self._header = b""
        self._is_file = False
        self._chunks: list[bytes] = []

    def callbacks(self) -> MultipartCallbacks:
        return {
            "on_part_begin": self._begin,
            "on_header_field": self._header_part,
            "on_header_value": self._header_part,
            "on_header_end": self._end_header,
            "on_part_data": lambda data, start, end: self._chunks.append(data[start:end]),
            "on_part_end": self._end,
            "on_end": self._complete,
        }

    def _begin(self) -> None:
        self._is_file, self._chunks = False, []

    def _header_part(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _end_header(self) -> None:
        self._is_file |= b"filename" in self._header.lower()
        self._header = b""

    def _end(self) -> None:
        if self._is_file:
            self.files.append(b"".join(self._chunks))
        if len(self.files) > MAX_FILES:
            raise InvalidRequest(f"the multipart form has more than {MAX_FILES} files; send several forms")

    def _complete(self) -> None:
        self.is_complete = True
