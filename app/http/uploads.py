"""The images in a JSON body, in base64, for gateways that only forward JSON.

    {"image": "<base64>"}   {"image": {"b64": "<base64>"}}   {"instances": [<either of them, or a string>, ...]}

The member may have any name. These are the forms of clients of TensorFlow Serving (`b64`, `instances`), TorchServe
(`data`) and KServe's first protocol. The bytes are written over the body itself, which is longer than all of them.
"""

from __future__ import annotations

import binascii
import logging
import re
from contextlib import suppress
from email.message import Message
from typing import TYPE_CHECKING, Any, NamedTuple

import orjson
from python_multipart import MultipartParser
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import parse_options_header

from convoy.models.errors import InvalidJson, InvalidRequest

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

MAX_FILES = 256
_READ_BYTES = 64 << 10
# The client gets an error about its form; the library's log would not say which form it was.
logging.getLogger("python_multipart").setLevel(logging.CRITICAL)


class FormFile(NamedTuple):
    """A file of a form, with the name that its client gave; empty if there is none that can be read."""

    name: str
    content: memoryview


def boundary_of(content_type: bytes) -> bytes | None:
    """The boundary of a multipart form, or None for every other content type."""
    try:
        kind, options = parse_options_header(content_type)
    except (TypeError, ValueError):  # some versions raise it for parameters in numbered pieces
        return b""
    return options.get(b"boundary", b"") if kind == b"multipart/form-data" else None


def split_files(form: memoryview, boundary: bytes) -> list[FormFile]:
    """Every part with a file name, in order, as views of `form`, which is overwritten. Raises InvalidRequest."""
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
    """The first boundary: a form may begin with a preamble, which is skipped if it is short."""
    if form[: len(boundary) + 2] == b"--" + boundary:
        return 0
    line_end = bytes(form[:_READ_BYTES]).find(b"\r\n--" + boundary)
    return line_end + 2 if line_end >= 0 else 0


def _file_name(disposition: bytes) -> str | None:
    """None for a field that is not a file."""
    message = Message()
    message["content-disposition"] = disposition.decode("latin-1")
    try:
        if message.get_param("filename", header="content-disposition") is None:
            return None
        name = message.get_filename("")
    except (TypeError, ValueError):  # a name in numbered pieces with invalid numbers is a name
        return ""
    with suppress(UnicodeEncodeError):  # already decoded, if the header says how
        name = name.encode("latin-1").decode("utf-8", "replace")
    return name.encode("utf-8", "replace").decode()


class _Collector:
    """Collects the parser's callbacks.

    Files are written over the form itself. Written bytes have been read before and are never longer, so writing never
    overtakes reading.
    """

    def __init__(self, form: memoryview) -> None:
        self.files: list[FormFile] = []
        self.is_complete = False
        self._form = form
        self._written = 0
        self._file_start = 0
        self._name: str | None = None
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
        self._name, self._file_start = None, self._written

    def _header_field(self, data: bytes, start: int, end: int) -> None:
        self._field += data[start:end]

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _end_header(self) -> None:
        if self._field.lower() == b"content-disposition":
            self._name = _file_name(self._value)
        self._field = self._value = b""

    def _data(self, data: bytes, start: int, end: int) -> None:
        if self._name is not None:
            self._form[self._written : self._written + end - start] = data[start:end]
            self._written += end - start

    def _end(self) -> None:
        if self._name is not None:
            self.files.append(FormFile(self._name, self._form[self._file_start : self._written]))
        if len(self.files) > MAX_FILES:
            raise InvalidRequest(f"the multipart form has more than {MAX_FILES} files; send several forms")

    def _complete(self) -> None:
        self.is_complete = True


EXAMPLE = '{"image": "<base64>"} or {"instances": [{"b64": "<base64>"}]}'
_IGNORED = frozenset({"signature_name"})  # of TensorFlow Serving's clients; here a model has one
# Each makes an object of Python's: an image needs no more of them than five, with those of a data URL.
_PUNCTUATION, _MOST_PUNCTUATION = (b"[", b"{", b","), 5 * MAX_FILES
# A character above ASCII in a string, which would then take up to four times the memory.
_NO_ASCII = re.compile(rb"\\u(?!00[0-7])")
_URL_SAFE = str.maketrans("-_", "+/")


def is_json(body: memoryview, content_type: bytes) -> bool:
    """Whether a body that is not an image is JSON, by its content type or its first bytes."""
    kind = content_type.partition(b";")[0].strip().lower()
    return kind == b"application/json" or bytes(body[:64]).lstrip()[:1] == b"{"


def split_images(body: memoryview) -> memoryview | list[memoryview | str]:
    """A view of the image in a body, which is overwritten; for `instances` a list, with an error for an invalid one.

    Any thread may call it. Raises InvalidRequest.
    """
    document = _document(body)
    members = {name: value for name, value in document.items() if name not in _IGNORED}
    if "instances" not in members:
        image = _image_of(members, "the JSON body")
        body[: len(image)] = image
        return body[: len(image)]
    instances = members.pop("instances")
    if members:
        raise InvalidRequest(f"'{min(members)[:100]}' beside 'instances' means nothing here; options go into the query")
    if not isinstance(instances, list) or not instances:
        raise InvalidRequest(f"'instances' must be a list of images; send {EXAMPLE}")
    if len(instances) > MAX_FILES:
        raise InvalidRequest(f"'instances' has more than {MAX_FILES} images; send several requests")
    images: list[memoryview | str] = []
    at = 0
    for number, instance in enumerate(instances):
        try:
            image = _image_of(instance, f"instances[{number}]")
        except InvalidRequest as error:
            images.append(str(error))
            continue
        body[at : at + len(image)] = image
        images.append(body[at : at + len(image)])
        at += len(image)
    return images


def _document(body: memoryview) -> dict[str, Any]:
    text = bytes(body)
    if sum(map(text.count, _PUNCTUATION)) > _MOST_PUNCTUATION:
        raise InvalidRequest(f"the JSON body is more than {MAX_FILES} images in base64; send {EXAMPLE}")
    if not text.isascii() or _NO_ASCII.search(text):
        raise InvalidRequest(f"the JSON body has characters that base64 has not; send {EXAMPLE}")
    try:
        document = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise InvalidJson(f"failed to parse the request JSON buffer: {error}; send {EXAMPLE}") from error
    if not isinstance(document, dict):
        raise InvalidRequest(f"the JSON body must be an object; send {EXAMPLE}")
    return document


def _image_of(instance: object, where: str) -> bytes:
    """The bytes of one image. Raises InvalidRequest."""
    value = instance
    for _ in range(2):  # {"image": {"b64": "..."}} is the deepest form
        if isinstance(value, dict) and len(value) == 1:
            (value,) = value.values()
    if not isinstance(value, str):
        raise InvalidRequest(f"{where} is not one image in base64; send {EXAMPLE}, and options in the query")
    if "://" in value[:16]:
        raise InvalidRequest("URLs are not fetched; send the image's bytes as the body, or base64 in 'image'")
    if value.startswith("data:"):
        head, _, value = value.partition(",")
        if not head.endswith(";base64"):
            raise InvalidRequest(f"{where} is a data URL without ';base64'; send {EXAMPLE}")
    try:
        return binascii.a2b_base64(_canonical(value), strict_mode=True)
    except binascii.Error as error:
        raise InvalidRequest(f"{where} is not base64 ({error}); send {EXAMPLE}") from None


def _canonical(text: str) -> str:
    """Without line breaks, with the standard alphabet, and padded: the differences between encoders."""
    if any(blank in text for blank in " \t\r\n"):
        text = "".join(text.split())
    if "-" in text or "_" in text:
        text = text.translate(_URL_SAFE)
    return text + "=" * (-len(text) % 4)
