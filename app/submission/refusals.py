"""What a client is told when its request was not answered. The beginnings of the sentences are Triton's."""

from __future__ import annotations

from convoy.app.scheduling.policy import RefusalReason, Refuse
from convoy.app.scheduling.request import SECOND_NS, Done, Outcome, Request
from convoy.app.scheduling.slab import Slab
from convoy.models.errors import DeadlineExceeded, ModelFailed, Overloaded, RequestError, Unavailable


def refused(request: Request, refusal: Refuse, max_queue: int) -> RequestError:
    """The error for a request that was not let in."""
    if refusal.reason is RefusalReason.EXPIRED:
        return DeadlineExceeded("Request timeout expired before the request could be queued")
    retry_after_s = max(0.001, refusal.retry_after_ns / SECOND_NS)
    if refusal.reason is RefusalReason.QUEUE_FULL:
        message = f"Exceeds maximum queue size: {max_queue} samples for '{request.key.model}'"
    else:
        message = f"'{request.key.model}' is expected to answer after the deadline"
    return Overloaded(f"{message}; send it again later", reason=refusal.reason.value, retry_after_s=retry_after_s)


def no_room(nbytes: int, slab: Slab) -> Overloaded:
    """The error for a body or a tensor that does not fit among those in flight."""
    return Overloaded(
        f"no room for {nbytes} bytes, {slab.used_bytes} of {slab.capacity_bytes} are in flight; "
        "send it again later, or raise --max-inflight-mb",
        reason="memory",
        retry_after_s=1.0,
    )


def check(done: Done) -> Done:
    """The same Done when it is an answer. Raises the RequestError that tells the client otherwise."""
    if done.outcome is Outcome.ANSWERED:
        return done
    name = done.request.key.model
    match done.outcome:
        case Outcome.EXPIRED:
            raise DeadlineExceeded("Request timeout expired while the request waited")
        case Outcome.HOPELESS:
            raise DeadlineExceeded("Request timeout expired: the answer could not have been in time any more")
        case Outcome.MODEL_FAILED:
            raise ModelFailed(f"the model '{name}' fails on this request: {done.reason}")
        case Outcome.NO_MEMORY:
            raise Unavailable(
                f"'{name}' has not enough memory on its device for a batch ({done.reason}); "
                "lower --max-batch, or free memory there, and send it again"
            )
        case Outcome.ENGINE_LOST:
            raise Unavailable(f"the engine of '{name}' was lost ({done.reason}) and is being replaced; send it again")
        case Outcome.STOPPED:
            raise Unavailable(f"the request was given up: {done.reason}")
