"""The errors of requests without an answer. They begin with Triton's wording, which clients parse."""

from __future__ import annotations

from convoy.app.scheduling.decoding import NotDecoded, Why
from convoy.app.scheduling.policy import RefusalReason, Refuse
from convoy.app.scheduling.request import SECOND_NS, Done, Outcome, Request
from convoy.app.scheduling.slab import Slab
from convoy.app.telemetry.outcomes import Refusal
from convoy.models.errors import (
    DeadlineExceeded,
    MemoryExhausted,
    ModelFailed,
    Overloaded,
    PredictedLate,
    RequestError,
    Unavailable,
)

EXPIRED_BEFORE = "Request timeout expired before the request could be queued; allow more time"
EXPIRED_WAITING = "Request timeout expired while the request waited; allow more time"
EXPIRED_RUNNING = "Request timeout expired before the model responded; allow more time"
_HOPELESS = "Request timeout expired: the response could no longer be in time; allow more time"


def refused(request: Request, refusal: Refuse, max_queue: int) -> RequestError:
    """The error for a request that was not admitted."""
    if refusal.reason is RefusalReason.EXPIRED:
        return DeadlineExceeded(EXPIRED_BEFORE)
    retry_after_s = max(0.001, refusal.retry_after_ns / SECOND_NS)
    if refusal.reason is RefusalReason.PREDICTED_LATE:
        return _predicted_late(request.key.model, retry_after_s)
    message = f"Exceeds maximum queue size: {max_queue} samples for '{request.key.model}'; retry later"
    return Overloaded(message, reason=refusal.reason.value, retry_after_s=retry_after_s)


def _predicted_late(name: str, retry_after_s: float) -> PredictedLate:
    message = f"'{name}' is predicted to miss the deadline; retry later"
    return PredictedLate(message, reason=Refusal.PREDICTED_LATE, retry_after_s=retry_after_s)


def not_decoded(refusal: NotDecoded, name: str, waiting: int) -> RequestError:
    """The error for an upload to model `name` that was not decoded; `waiting` jobs wait."""
    retry_after_s = max(0.001, refusal.retry_after_ns / SECOND_NS)
    match refusal.why:
        case Why.QUEUE_FULL:
            message = f"{waiting} uploads are already waiting to be decoded; retry later"
            return Overloaded(message, reason=Refusal.DECODE_QUEUE, retry_after_s=retry_after_s)
        case Why.PREDICTED_LATE:
            return _predicted_late(name, retry_after_s)
        case Why.HOPELESS:
            return DeadlineExceeded(_HOPELESS)
        case _:
            return DeadlineExceeded(EXPIRED_WAITING)


def no_room(nbytes: int, slab: Slab) -> MemoryExhausted:
    """The error for a body or tensor for which there is no memory now."""
    return MemoryExhausted(
        f"no memory for {nbytes} bytes, {slab.used_bytes} of {slab.capacity_bytes} are in use; "
        "retry later, or raise --max-inflight-mb",
        reason=Refusal.MEMORY,
        retry_after_s=1.0,
    )


def failure_of(done: Done) -> RequestError:
    """The error for a request that ended without an answer."""
    name = done.request.key.model
    match done.outcome:
        case Outcome.EXPIRED:
            return DeadlineExceeded(EXPIRED_WAITING)
        case Outcome.HOPELESS:
            return DeadlineExceeded(_HOPELESS)
        case Outcome.MODEL_FAILED:
            return ModelFailed(f"model '{name}' failed on this request: {done.reason}; check its input")
        case Outcome.NO_MEMORY:
            return Unavailable(
                f"the device of '{name}' has too little memory for a batch ({done.reason}); "
                "lower --max-batch, or free memory on the device"
            )
        case Outcome.ENGINE_LOST:
            return Unavailable(f"the engine of '{name}' failed ({done.reason}) and is being replaced; retry later")
        case _:
            return Unavailable(f"the request was cancelled: {done.reason}")
