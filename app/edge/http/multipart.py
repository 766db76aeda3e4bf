"""The files in a multipart form.

A form is as large as a body may be, so its files are not copied out of it: they are moved together at its
beginning, in the memory in which the form already lies.
"""

from __future__ import annotations

import logging
from email.message import Message
from typing import TYPE_CHECKING

from python_multipart import MultipartParser
from python_multipart.exceptions import FormParserError

from convoy.models.errors import InvalidRequest

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

MAX_FILES = 256
_READ_BYTES = 64 << 10
# What is wrong with a form is told to who sent it; the library's log would not say whose it was.
logging.getLogger("python_multipart").setLevel(logging.CRITICAL)


def boundary_of(content_type: bytes) -> bytes | None:
    """The boundary of a multipart form, or None for every other content type."""
    if b"multipart" not in content_type.lower():
        return None
    message = Message()
    message["content-type"] = content_type.decode("latin-1")
    if message.get_content_type() != "multipart/form-data":
        return None
    try:
        boundary = message.get_param("boundary")
    except (TypeError, ValueError):  # it is in numbered pieces, of numbers that are none
        return b""
    return boundary.encode("latin-1") if isinstance(boundary, str) and boundary else b""


def split_files(form: memoryview, boundary: bytes) -> list[memoryview]:
    """Views of every part that has a file name, in order; `form` is overwritten. Raises InvalidRequest."""
    if not boundary:
        raise InvalidRequest("the content type multipart/form-data has no boundary that can be read")
    collector = _Collector(form)
    try:
        parser = MultipartParser(boundary, collector.callbacks())
        for start in range(_first_boundary(form, boundary), len(form), _READ_BYTES):
            parser.write(bytes(form[start : start + _READ_BYTES]))
        parser.finalize()
    except FormParserError as error:
        raise InvalidRequest(f"the multipart form is malformed: {error}") from error
    if not collector.is_complete:
        raise InvalidRequest("the multipart form is cut off before its closing boundary")
    if not collector.files:
        raise InvalidRequest("the multipart form has no file; send one with `curl -F file=@image.jpg`")
    return collector.files


def _first_boundary(form: memoryview, boundary: bytes) -> int:
    """Where it is: behind text that is nobody's, if that is not long."""
    if form[: len(boundary) + 2] == b"--" + boundary:
        return 0
    line_end = bytes(form[:_READ_BYTES]).find(b"\r\n--" + boundary)
    return line_end + 2 if line_end >= 0 else 0


def _has_file_name(disposition: bytes) -> bool:
    message = Message()
    message["content-disposition"] = disposition.decode("latin-1")
    try:
        return message.get_param("filename", header="content-disposition") is not None
    except (TypeError, ValueError):  # a name in numbered pieces, of numbers that are none, is a name
        return True


class _Collector:
    """What the parser's callbacks add up to.

    Files are written over the form itself. What is written has been read before, and is never longer, so
    the writing never overtakes the reading.
    """

    def __init__(self, form: memoryview) -> None:
        self.files: list[memoryview] = []
        self.is_complete = False
        self._form = form
        self._written = 0
        self._file_start = 0
        self._is_file = False
        self._field = self._value = b""

    def callbacks(self) -> MultipartCallbacks:
        return {
            "on_part_begin": self._begin,
            "on_header_field": self._header_field,
            "on_header_value": self._header_value,
            "on_header_end": self._end_header,
            "on_part_data": self._data,
            "on_part_end": self._end,
            "on_end": self._complete,
        }

    def _begin(self) -> None:
        self._is_file, self._file_start = False, self._written

    def _header_field(self, data: bytes, start: int, end: int) -> None:
        self._field += data[start:end]

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _end_header(self) -> None:
        if self._field.lower() == b"content-disposition":
            self._is_file = _has_file_name(self._value)
        self._field = self._value = b""

    def _data(self, data: bytes, start: int, end: int) -> None:
        if self._is_file:
            self._form[self._written : self._written + end - start] = data[start:end]
            self._written += end - start

    def _end(self) -> None:
        if self._is_file:
            self.files.append(self._form[self._file_start : self._written])
        if len(self.files) > MAX_FILES:
            raise InvalidRequest(f"the multipart form has more than {MAX_FILES} files; send several forms")

    def _complete(self) -> None:
        self.is_complete = True
