"""Every error that Convoy raises on purpose, and what each means to the one who gets it.

    ConvoyError
    ├── UsageError              the command was called wrongly                  exit 2
    ├── JobError                the job cannot be done as things are            exit 1
    │   ├── BundleError         a bundle or bare model is broken or unfit
    │   ├── NotFetched          a version did not come from a remote store, and may on another try
    │   └── FileRefused         TensorRT does not take an ONNX file         exit 3
    └── RequestError            one request cannot be answered                  HTTP, gRPC
        ├── InvalidRequest      the request is wrong                            400, INVALID_ARGUMENT
        │   ├── InvalidJson     the body is not JSON
        │   ├── UnknownParameter    the query has a parameter that does not exist
        │   └── ImageError      the bytes are not an image we accept
        │       └── ImageTooLarge       nor would the memory do                 413, INVALID_ARGUMENT
        ├── Unauthorized        the API key is missing or wrong                 401, UNAUTHENTICATED
        ├── Forbidden           a page of somebody else's asks          403, PERMISSION_DENIED
        ├── NotFound            no such file or shared memory region            404, NOT_FOUND
        │   └── UnknownModel, UnknownVersion, UnknownRoute
        ├── MethodNotAllowed    the route takes another method                  405, UNIMPLEMENTED
        ├── RequestTimeout      the head or the body came too slowly            408, DEADLINE_EXCEEDED
        ├── BodyTooLarge        the body exceeds the limit                      413, INVALID_ARGUMENT
        ├── HeadersTooLarge     the headers exceed the limit                    431, INVALID_ARGUMENT
        ├── Overloaded          a queue is full                                 429, RESOURCE_EXHAUSTED
        │   └── MemoryExhausted, PredictedLate
        ├── ModelFailed         the model fails on this very request            500, INTERNAL
        ├── Unsupported         an extension that is not offered                501, UNIMPLEMENTED
        │   └── UnsupportedCompression      and which compressions are
        ├── Unavailable         an engine is lost, too many connections         503, UNAVAILABLE
        │   └── Draining, NotReady
        └── DeadlineExceeded    the time the client gave has passed             504, DEADLINE_EXCEEDED

A message says what is wrong and what to do next, in one line. Anything else that is raised is a bug.
"""

from __future__ import annotations

from typing import ClassVar


class ConvoyError(Exception):
    """The root: `str(error)` is one line that a person can act on."""

    exit_code: ClassVar[int] = 1


class UsageError(ConvoyError):
    """The command was called wrongly; nothing was started."""

    exit_code = 2


class JobError(ConvoyError):
    """The job cannot be done with these inputs or on this machine."""


class BundleError(JobError):
    """A bundle or bare model is broken, half written, or asks for what this version cannot do."""


class FormRefused(JobError):
    """A training cannot be done in this form: on this device, in this precision, compiled. In another it may be."""


class NotFetched(JobError):
    """A version did not come from a remote store. Nothing is known against it, and it may come on another try."""


class FileRefused(JobError):
    """TensorRT does not take an ONNX file, and will not on another try: the file is to blame, and nothing around it."""

    exit_code = 3


class RequestError(ConvoyError):
    """One request cannot be answered; the server goes on.

    `code` is what programs read; docs/protocol.md lists the codes. `reason` is the metrics' word for why the request
    was refused, and empty where it was not.
    """

    http_status: ClassVar[int] = 500
    grpc_code: ClassVar[str] = "INTERNAL"
    code: str = "internal_error"
    retry_after_s: float | None = None
    reason: str = ""


class InvalidRequest(RequestError):
    """The request is wrong: the message names the field and the expected value."""

    http_status = 400
    grpc_code = "INVALID_ARGUMENT"
    code = "invalid_request"


class InvalidJson(InvalidRequest):
    """The body is not JSON."""

    code = "invalid_json"


class UnknownParameter(InvalidRequest):
    """The query has a parameter that the route does not know."""

    code = "unknown_parameter"


class ImageError(InvalidRequest):
    """The bytes are not an image, are cut off, or have more pixels than allowed."""

    code = "invalid_image"


class ImageTooLarge(ImageError):
    """To decode the image takes more memory than there is for all requests."""

    http_status = 413
    code = "payload_too_large"


class Unauthorized(RequestError):
    """The API key is missing or wrong."""

    http_status = 401
    grpc_code = "UNAUTHENTICATED"
    code = "unauthenticated"


class Forbidden(RequestError):
    """The caller may not ask this, whatever the request says."""

    http_status = 403
    grpc_code = "PERMISSION_DENIED"
    code = "forbidden"


class NotFound(RequestError):
    """There is no such file or shared memory region."""

    http_status = 404
    grpc_code = "NOT_FOUND"
    code = "not_found"


class UnknownModel(NotFound):
    """No model of this name is served."""

    code = "unknown_model"


class UnknownVersion(NotFound):
    """The model is served, but not this version of it."""

    code = "unknown_version"


class UnknownRoute(NotFound):
    """The server has no such path."""

    code = "unknown_route"


class MethodNotAllowed(RequestError):
    """The path exists, but not with this method. `allow` names the methods that it takes."""

    http_status = 405
    grpc_code = "UNIMPLEMENTED"
    code = "method_not_allowed"

    def __init__(self, message: str, *, allow: str = "") -> None:
        super().__init__(message)
        self.allow = allow


class BodyTooLarge(RequestError):
    """The body is larger than the server accepts."""

    http_status = 413
    grpc_code = "INVALID_ARGUMENT"
    code = "payload_too_large"


class HeadersTooLarge(RequestError):
    """The headers are longer than the server accepts."""

    http_status = 431
    grpc_code = "INVALID_ARGUMENT"
    code = "headers_too_large"


class RequestTimeout(RequestError):
    """The client sent its headers or its body too slowly."""

    http_status = 408
    grpc_code = "DEADLINE_EXCEEDED"
    code = "request_timeout"


class Overloaded(RequestError):
    """The server cannot take this request now: a queue is full."""

    http_status = 429
    grpc_code = "RESOURCE_EXHAUSTED"
    code = "queue_full"

    def __init__(self, message: str, *, reason: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.reason = reason
        self.retry_after_s = retry_after_s


class MemoryExhausted(Overloaded):
    """The requests in flight take all the memory for requests."""

    code = "memory_exhausted"


class PredictedLate(Overloaded):
    """The answer would come after the deadline."""

    code = "predicted_late"


class ModelFailed(RequestError):
    """The model itself fails on this request, alone in its batch."""

    code = "model_failed"


class Unsupported(RequestError):
    """An extension of the protocol that this server does not offer."""

    http_status = 501
    grpc_code = "UNIMPLEMENTED"
    code = "not_supported"


class UnsupportedCompression(Unsupported):
    """The body is compressed in a way that this server cannot read."""


class Unavailable(RequestError):
    """The server or the model cannot answer at present; later it can. Without a reason it had begun to."""

    http_status = 503
    grpc_code = "UNAVAILABLE"
    code = "unavailable"

    def __init__(self, message: str, *, reason: str = "", retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.reason = reason
        self.retry_after_s = retry_after_s


class Draining(Unavailable):
    """The server is shutting down."""

    code = "draining"


class NotReady(Unavailable):
    """The server or the model is loading, or its engine is being replaced."""

    code = "not_ready"


class DeadlineExceeded(RequestError):
    """The client's deadline passed before there was an answer."""

    http_status = 504
    grpc_code = "DEADLINE_EXCEEDED"
    code = "deadline_exceeded"


def error_kinds() -> dict[str, type[RequestError]]:
    """Every code, and the most general class that has it."""
    kinds = [RequestError]
    for kind in kinds:  # which grows meanwhile
        kinds += kind.__subclasses__()
    return {kind.code: kind for kind in reversed(kinds)}
