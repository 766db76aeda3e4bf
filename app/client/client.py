"""`convoy.Client` and `convoy.AsyncClient`: call a server from a program, from threads or on an event loop.

`http_wire` and `grpc_wire` build requests and read replies; `retry` decides on retries.
"""

from __future__ import annotations

import asyncio
import io
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import numpy as np

from convoy.app.client.http_wire import HttpWire
from convoy.app.client.options import Cert, OwnHeaders, Verify, headers_of, trust_of, whole_url
from convoy.app.client.records import RemoteModel, Sight
from convoy.app.client.retry import Tries, WireQuestion, ask, ask_async
from convoy.app.python.values import OneImage, image_of, is_pillow_image, no_image, one_or_several
from convoy.models.answers import Classification, Detections, MaskForm, Segmentation
from convoy.models.errors import ImageError, InvalidRequest, RequestError, UsageError
from convoy.models.image_files import read_image_file

if TYPE_CHECKING:
    from PIL import Image

    from convoy.app.client.grpc_wire import GrpcWire

_PNG_MODES = frozenset(("1", "L", "LA", "I;16", "P", "RGB", "RGBA"))


def encoded(given: object) -> bytes:
    """Encode an image: files and bytes as they are, pixels losslessly. Raises ImageError."""
    match given:
        case str() | os.PathLike():
            return read_image_file(given)
        case bytes() | bytearray() | memoryview():
            return bytes(given)
        case np.ndarray():
            return _file_of(image_of(given))
    if is_pillow_image(given):
        return _file_of(given)
    raise no_image(given)


def _file_of(image: Image.Image) -> bytes:
    # TIFF has modes that PNG lacks (CMYK, floats and others), and the server treats a file of either alike.
    name, options = ("PNG", {"compress_level": 1}) if image.mode in _PNG_MODES else ("TIFF", {})
    file = io.BytesIO()
    try:
        image.save(file, name, exif=image.getexif(), **options)  # the server applies its orientation
    except (OSError, ValueError, KeyError) as error:
        raise ImageError(f"an image of mode {image.mode} cannot be sent ({error}); convert it to RGB") from error
    return file.getvalue()


Answer = TypeVar("Answer")
_Kind = TypeVar("_Kind", Classification, Segmentation, Detections)
_ASKED_BY = {Classification: "predict", Segmentation: "segment", Detections: "detect"}
DEFAULT_URL = "http://127.0.0.1:8000"


class _BaseClient:
    """The settings of both clients: timeouts, retries, and how many images at once."""

    _is_async: ClassVar[bool]

    def __init__(
        self,
        url: str = DEFAULT_URL,
        *,
        api_key: str | None = None,
        timeout_s: float = 60.0,
        retries: int = 2,
        at_once: int = 8,
        verify: Verify = True,
        cert: Cert | None = None,
        headers: OwnHeaders | None = None,
    ) -> None:
        if not timeout_s > 0:
            raise UsageError(f"timeout_s must be positive, got {timeout_s}")
        if retries < 0 or at_once < 1:
            raise UsageError(f"retries must be at least 0 and at_once at least 1, got {retries} and {at_once}")
        if not callable(headers):
            headers_of(headers)  # raises UsageError
        key = (api_key or "").strip()  # a key file ends with a line break
        if not (key.isascii() and key.isprintable()):
            raise UsageError("the API key has characters that a header cannot carry; check the key")
        self._timeout_s, self._retries, self.at_once = timeout_s, retries, at_once
        whole = whole_url(url)
        kind = _grpc_wire() if whole.startswith("grpc") else HttpWire
        self._wire = kind(whole, key, trust_of(verify, cert), headers, is_async=self._is_async)

    def _tries(self, timeout_s: float | None) -> Tries:
        return Tries(timeout_s or self._timeout_s, self._retries)


def _grpc_wire() -> type[GrpcWire]:
    try:
        from convoy.app.client.grpc_wire import GrpcWire  # its libraries are needed only here
    except ModuleNotFoundError as error:
        raise UsageError(f"gRPC needs {error.name}; run `pip install 'convoy-client[grpc]'`") from error
    return GrpcWire


class Client(_BaseClient):
    """A server, called from any number of threads.

        with convoy.Client("http://localhost:8000") as client:
            print(client.predict("digits", "seven.png").best.label)

    `grpc://localhost:8001` uses gRPC, `https://` and `grpcs://` TLS; everything else is the same. Without a scheme,
    `localhost:8000` means HTTP, and `localhost` its port 8000.

    Requests that are refused temporarily (429, 503) are sent again up to `retries` times, after their `Retry-After`,
    and so are requests whose connection fails. All of this happens within `timeout_s`. The server gets the remaining
    time and drops requests whose client does not wait any more. `verify` is a file with the CA of the server's
    certificate, and `cert` a file with your own certificate and key, or a pair of files; over HTTP, `verify` may also
    be an SSLContext, or False to check no certificate. `headers` are sent with every request, over gRPC as metadata: a
    mapping, or a function that returns one, for example for tracing. `at_once` limits how many images of one call are
    in flight. Proxies from the environment are not used.

    Raises UsageError for an invalid URL, key, file or number. Nothing is sent before the first call.
    """

    _is_async = False

    def predict(
        self,
        model: str,
        images: OneImage | Iterable[OneImage],
        *,
        version: int | str | None = None,
        top_k: int | None = None,
        threshold: float | None = None,
        timeout_s: float | None = None,
    ) -> Any:
        """Classify images: `POST /predictions/{model}`, or its gRPC counterpart.

        An image is a path, the bytes of an image file, a PIL image, or a uint8 array [height, width] or [height, width,
        channels] with 1, 3 or 4 channels: grey, RGB or RGBA. Pixels are sent as PNG, or as TIFF if PNG lacks the mode.
        One image gives a Classification; several, in any other iterable, give a list in their order, in which a failed
        one has its `error`. `top_k` None means the best five or, with `threshold`, all that reach it. `timeout_s`
        defaults to the client's and applies to each image.

        Raises the server's errors for one image: InvalidRequest, ImageError (for a file that cannot be read), NotFound,
        Unauthorized, Overloaded, Unavailable (also if no server answers), DeadlineExceeded.
        """

        def one(image: OneImage) -> Classification:
            sight = self.look(model, image, version=version, top_k=top_k, threshold=threshold, timeout_s=timeout_s)
            return _of_kind(sight, Classification)

        def one_or_error(image: OneImage) -> Classification:
            try:
                return one(image)
            except RequestError as error:
                return _failed(error, model, version)

        several = one_or_several(images)
        if not isinstance(several, list):
            return one(several)
        # The tracing context is the caller's, whichever thread sends.
        contexts = [copy_context() for _ in several]
        with ThreadPoolExecutor(min(self.at_once, max(1, len(several)))) as threads:
            return list(threads.map(lambda context, image: context.run(one_or_error, image), contexts, several))

    def segment(
        self, model: str, image: OneImage, *, version: int | str | None = None, timeout_s: float | None = None
    ) -> Segmentation:
        """Compute the class of each pixel of an image. Raises as `predict` does."""
        return _of_kind(self.look(model, image, version=version, timeout_s=timeout_s), Segmentation)

    def detect(
        self,
        model: str,
        image: OneImage,
        *,
        version: int | str | None = None,
        top_k: int | None = None,
        threshold: float | None = None,
        iou: float | None = None,
        masks: MaskForm | None = None,
        timeout_s: float | None = None,
    ) -> Detections:
        """Find objects in an image, with boxes in its own pixels. None means the model's defaults.

        Boxes of a class that overlap by more than `iou` (intersection over union, above 0 and at most 1) are
        suppressed. If the model gives masks, each object has its `mask`, or its `polygons` with masks="polygons", or
        neither with "none". Raises as `predict` does, and InvalidRequest for `iou` if the model's graph suppresses
        boxes itself, and for `masks` if it gives none.
        """
        found = self.look(
            model, image, version=version, top_k=top_k, threshold=threshold, iou=iou, masks=masks, timeout_s=timeout_s
        )
        return _of_kind(found, Detections)

    def look(
        self,
        model: str,
        image: OneImage,
        *,
        version: int | str | None = None,
        top_k: int | None = None,
        threshold: float | None = None,
        iou: float | None = None,
        masks: MaskForm | None = None,
        timeout_s: float | None = None,
    ) -> Sight:
        """Predict by the model's task, whichever it is. Raises as `predict` does."""
        asked = _given(top_k=top_k, threshold=threshold, iou=iou, masks=masks)
        return self._ask(self._wire.look(model, _text(version), encoded(image), asked), timeout_s)

    def infer(
        self,
        model: str,
        inputs: Mapping[str, np.ndarray],
        *,
        version: int | str | None = None,
        outputs: Sequence[str] | None = None,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> dict[str, np.ndarray]:
        """Run a model on tensors: `POST /v2/models/{model}/infer`, all binary. The caller owns the arrays.

        `inputs` have the model's names, dtypes and shapes, with the batch first if it has one; strings are arrays of
        bytes or str, BF16 is `V2`. `outputs` None means all of them. Raises the server's errors, as `predict` does.
        """
        return self._ask(self._wire.infer(model, _text(version), inputs, outputs, priority), timeout_s)

    def models(self) -> tuple[RemoteModel, ...]:
        """The served models, and those that were refused, with the reason."""
        return self._ask(self._wire.models(), None)

    def close(self) -> None:
        """Close the connections. Can be called twice."""
        self._wire.close()

    def _ask(self, question: WireQuestion[Answer], timeout_s: float | None) -> Answer:
        return ask(question, self._tries(timeout_s), self._wire.send)

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncClient(_BaseClient):
    """`Client` on one event loop, with methods to await; its arguments and errors are the same."""

    _is_async = True

    async def predict(
        self,
        model: str,
        images: OneImage | Iterable[OneImage],
        *,
        version: int | str | None = None,
        top_k: int | None = None,
        threshold: float | None = None,
        timeout_s: float | None = None,
    ) -> Any:
        """Like `Client.predict`. Cancelling closes the connection, so that the server drops the request."""

        async def one(image: OneImage) -> Classification:
            sight = await self.look(
                model, image, version=version, top_k=top_k, threshold=threshold, timeout_s=timeout_s
            )
            return _of_kind(sight, Classification)

        several = one_or_several(images)
        if not isinstance(several, list):
            return await one(several)
        room = asyncio.Semaphore(self.at_once)

        async def in_turn(image: OneImage) -> Classification:
            async with room:
                try:
                    return await one(image)
                except RequestError as error:
                    return _failed(error, model, version)

        return list(await asyncio.gather(*map(in_turn, several)))

    async def segment(
        self, model: str, image: OneImage, *, version: int | str | None = None, timeout_s: float | None = None
    ) -> Segmentation:
        """Like `Client.segment`."""
        return _of_kind(await self.look(model, image, version=version, timeout_s=timeout_s), Segmentation)

    async def detect(
        self,
        model: str,
        image: OneImage,
        *,
        version: int | str | None = None,
        top_k: int | None = None,
        threshold: float | None = None,
        iou: float | None = None,
        masks: MaskForm | None = None,
        timeout_s: float | None = None,
    ) -> Detections:
        """Like `Client.detect`."""
        found = await self.look(
            model, image, version=version, top_k=top_k, threshold=threshold, iou=iou, masks=masks, timeout_s=timeout_s
        )
        return _of_kind(found, Detections)

    async def look(
        self,
        model: str,
        image: OneImage,
        *,
        version: int | str | None = None,
        top_k: int | None = None,
        threshold: float | None = None,
        iou: float | None = None,
        masks: MaskForm | None = None,
        timeout_s: float | None = None,
    ) -> Sight:
        """Like `Client.look`."""
        body = await asyncio.to_thread(encoded, image)  # it may be a file on a slow disk, or pixels to encode
        asked = _given(top_k=top_k, threshold=threshold, iou=iou, masks=masks)
        return await self._ask(self._wire.look(model, _text(version), body, asked), timeout_s)

    async def infer(
        self,
        model: str,
        inputs: Mapping[str, np.ndarray],
        *,
        version: int | str | None = None,
        outputs: Sequence[str] | None = None,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> dict[str, np.ndarray]:
        """Like `Client.infer`."""
        return await self._ask(self._wire.infer(model, _text(version), inputs, outputs, priority), timeout_s)

    async def models(self) -> tuple[RemoteModel, ...]:
        """The served models, and those that were refused, with the reason."""
        return await self._ask(self._wire.models(), None)

    async def close(self) -> None:
        """Close the connections. Can be called twice."""
        await self._wire.close_async()

    async def _ask(self, question: WireQuestion[Answer], timeout_s: float | None) -> Answer:
        return await ask_async(question, self._tries(timeout_s), self._wire.send_async)

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


def _given(**options: int | float | str | None) -> dict[str, int | float | str]:
    return {name: value for name, value in options.items() if value is not None}


def _text(version: int | str | None) -> str | None:
    return None if version is None else str(version)


def _failed(error: RequestError, model: str, version: int | str | None) -> Classification:
    """One of several images; version 0 if none was asked for and none has answered."""
    number = str(version)
    return Classification(model, int(number) if number.isdigit() else 0, (), error=error)


def _of_kind(sight: Sight, kind: type[_Kind]) -> _Kind:
    """Raise InvalidRequest if the model has another task."""
    if isinstance(sight, kind):
        return sight
    raise InvalidRequest(f"'{sight.model}' has another task; call {_ASKED_BY[type(sight)]}()")
