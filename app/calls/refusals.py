"""The errors of requests that were not answered. The beginnings of the sentences are Triton's."""

from __future__ import annotations

from convoy.app.scheduling.decoding import NotDecoded, Why
from convoy.app.scheduling.policy import RefusalReason, Refuse
from convoy.app.scheduling.request import SECOND_NS, Done, Outcome, Request
from convoy.app.scheduling.slab import Slab
from convoy.app.telemetry.outcomes import Refusal
from convoy.models.errors import DeadlineExceeded, ModelFailed, Overloaded, RequestError, Unavailable

EXPIRED_BEFORE = "Request timeout expired before the request could be queued"
EXPIRED_WAITING = "Request timeout expired while the request waited"
EXPIRED_RUNNING = "Request timeout expired before the model responded"
_HOPELESS = "Request timeout expired: the response could no longer be in time"


def refused(request: Request, refusal: Refuse, max_queue: int) -> RequestError:
    """The error for a request that was not let in."""
    if refusal.reason is RefusalReason.EXPIRED:
        return DeadlineExceeded(EXPIRED_BEFORE)
    retry_after_s = max(0.001, refusal.retry_after_ns / SECOND_NS)
    if refusal.reason is RefusalReason.QUEUE_FULL:
        message = f"Exceeds maximum queue size: {max_queue} samples for '{request.key.model}'"
    else:
        message = _predicted_late(request.key.model)
    return Overloaded(f"{message}; retry later", reason=refusal.reason.value, retry_after_s=retry_after_s)


def _predicted_late(name: str) -> str:
    return f"the response of '{name}' is predicted to miss the deadline"


def not_decoded(refusal: NotDecoded, name: str, waiting: int) -> RequestError:
    """The error for an upload to the model `name` that is not decoded; `waiting` jobs wait."""
    retry_after_s = max(0.001, refusal.retry_after_ns / SECOND_NS)
    match refusal.why:
        case Why.QUEUE_FULL:
            message, reason = f"{waiting} uploads are already waiting to be decoded", Refusal.DECODE_QUEUE
        case Why.PREDICTED_LATE:
            message, reason = _predicted_late(name), Refusal.PREDICTED_LATE
        case Why.HOPELESS:
            return DeadlineExceeded(_HOPELESS)
        case _:
            return DeadlineExceeded(EXPIRED_WAITING)
    return Overloaded(f"{message}; retry later", reason=reason, retry_after_s=retry_after_s)


def no_room(nbytes: int, slab: Slab) -> Overloaded:
    """The error for a body or a tensor that does not fit among those in flight."""
    return Overloaded(
        f"no memory for {nbytes} bytes, {slab.used_bytes} of {slab.capacity_bytes} are in use; "
        "retry later, or raise --max-inflight-mb",
        reason=Refusal.MEMORY,
        retry_after_s=1.0,
    )


def failure_of(done: Done) -> RequestError:
    """The error for a request that has no answer."""
    name = done.request.key.model
    match done.outcome:
        case Outcome.EXPIRED:
            return DeadlineExceeded(EXPIRED_WAITING)
        case Outcome.HOPELESS:
            return DeadlineExceeded(_HOPELESS)
        case Outcome.MODEL_FAILED:
            return ModelFailed(f"model '{name}' failed on this request: {done.reason}")
        case Outcome.NO_MEMORY:
            return Unavailable(
                f"the device of '{name}' has too little memory for a batch ({done.reason}); "
                "lower --max-batch, or free memory on the device"
            )
        case Outcome.ENGINE_LOST:
            return Unavailable(f"the engine of '{name}' failed ({done.reason}) and is being replaced; retry later")
        case _:
            return Unavailable(f"the request was cancelled: {done.reason}")
