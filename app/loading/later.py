"""What loading left for later, proved when it is ready: a plan that was built or compiled, ONNX Runtime tuned.

Knows what one engine beside those that serve has to show. Knows nothing of requests or of when it takes over.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from convoy.app.engines.base import Engine
from convoy.app.engines.jobs import Job, NotProved, Place, PlanRequest, TuningCandidate, refusal
from convoy.app.engines.onnxruntime_tuned import open_tuned
from convoy.app.engines.plans import PlanOpener
from convoy.app.loading.choice import NOTHING_SERVES, choose
from convoy.app.loading.proving import ProvedEngine, open_and_prove, prove
from convoy.models.bundle import Variant
from convoy.models.plan_cache import find_plan
from convoy.models.plans import NoPlan


def prove_plan(job: Job, wish: PlanRequest) -> ProvedEngine:
    """The engine of a plan that has just been built, or is compiled now. Raises NotProved."""
    if job.plan_cache is None:
        raise NotProved(f"{wish.variant.file}: there is no plan cache")
    found = find_plan(job.plan_cache, wish.key)
    if isinstance(found, NoPlan):
        raise NotProved(f"{wish.variant.file}: {found.reason}")
    return _proved(job, wish.variant, PlanOpener(job, wish.device, found).open, "its plan was built")


def prove_tuned(job: Job, untried: TuningCandidate) -> ProvedEngine:
    """ONNX Runtime at its best. Raises NotProved."""
    variant, place = untried.variant, Place(untried.device)
    return _proved(job, variant, partial(open_tuned, job, variant, place), "tuned, and no plan is faster")


def _proved(job: Job, variant: Variant, open_engine: Callable[[], Engine], why: str) -> ProvedEngine:
    assert job.canary is not None  # of a model without one nothing is left for later
    reason, runs = f"{variant.file}: {why}", job.warm_up_runs
    prove_engine = partial(prove, variant, job.canary, reason, warm_up_runs=runs)
    candidate = open_and_prove(variant, open_engine, prove_engine)
    return choose([candidate], [])


def still_refused(skipped: tuple[str, ...], wish: PlanRequest) -> tuple[str, ...]:
    """Of what was told, all that holds when the wish has been tried: there was no plan, and now there is an answer."""
    device = wish.device.name
    of_file, of_all = (refusal(wish.library, device, why) for why in (f"{wish.variant.file}: ", NOTHING_SERVES))
    return tuple(reason for reason in skipped if not reason.startswith(of_file) and reason != of_all)
