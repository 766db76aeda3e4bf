"""When somebody is told, and what that person looks at and does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from docs.deploy.observability.objective import FAST, SLOW, WINDOWS, Objective, bad, burns, left, ratio, slow


@dataclass(frozen=True, slots=True)
class Alert:
    """`summary` may name labels of what `expr` finds; `look` is what to look at and what to do."""

    name: str
    expr: str
    lasts: str
    severity: str
    summary: str
    look: str


_JOB, _INSTANCE, _VALUE = "{{ $labels.job }}", "{{ $labels.instance }}", "{{ $value | humanizePercentage }}"
_VERSION = f"{{{{ $labels.model }}}} version {{{{ $labels.version }}}} on {_INSTANCE}"
_BY_VERSION = "sum by (job, instance, model, version)"
_PAGE, _TICKET = "page", "ticket"


def alerts(objective: Objective) -> dict[str, tuple[Alert, ...]]:
    """By group."""
    return {
        "convoy-objective": (*_of_availability(objective), *_of_latency(objective)),
        "convoy-server": _of_servers(),
        "convoy-engines": _of_engines(),
    }


def _of_availability(objective: Objective) -> tuple[Alert, Alert]:
    allowed = left(objective.availability)
    said = f"{_JOB} does not do too many calls: {_VALUE} over"
    promised = f"the objective is {objective.availability:.6g} of all calls"
    look = (
        "The dashboard Overview says by outcome and by reason what is not done, Model says of which model, and the "
        "log says why. Failed: the engine or the model, so go back to the version before. Refused or late: too much "
        "load, so add servers or lower the load."
    )
    fast, slow_ = burns("bad", allowed, FAST), burns("bad", allowed, SLOW)
    return (
        Alert("ConvoyAvailabilityBurnsFast", fast, "", _PAGE, f"{said} an hour or six; {promised}", f"{look} {_SOON}"),
        Alert("ConvoyAvailabilityBurnsSlowly", slow_, "", _TICKET, f"{said} a day or three; {promised}", look),
    )


def _of_latency(objective: Objective) -> tuple[Alert, Alert]:
    allowed = left(objective.latency_share)
    said = f"{_JOB} answers too slowly: {_VALUE} of answers over"
    promised = f"the objective is {objective.latency_share:.6g} within {objective.latency_s:g} s"
    look = (
        "The dashboard Stages says where the time goes. Queue: too much load, so add servers. Decode: give more "
        "cores. Compute: see whether another engine serves than before, and whether a GPU is held back."
    )
    fast, slow_ = burns("slow", allowed, FAST), burns("slow", allowed, SLOW)
    return (
        Alert("ConvoyLatencyBurnsFast", fast, "", _PAGE, f"{said} an hour or six; {promised}", f"{look} {_SOON}"),
        Alert("ConvoyLatencyBurnsSlowly", slow_, "", _TICKET, f"{said} a day or three; {promised}", look),
    )


_SOON = "At this speed a month's budget is gone within days."


def _of_servers() -> tuple[Alert, ...]:
    refused = 'sum by (job, instance) (rate(convoy_rejected_total{reason!="draining"}[5m]))'
    calls = "sum by (job, instance) (rate(convoy_call_duration_seconds_count[5m]))"
    return (
        Alert(
            "ConvoyDown",
            'up{job="convoy"} == 0',
            "2m",
            _PAGE,
            f"{_INSTANCE} does not answer Prometheus",
            "See whether the process runs and why it ended: its exit code and the end of its log.",
        ),
        Alert(
            "ConvoyNotReady",
            "convoy_ready == 0",
            "5m",
            _PAGE,
            f"{_INSTANCE} has not been ready for five minutes",
            "`/v2/health/ready` says why: models that load, an engine that is replaced, or the server is leaving.",
        ),
        Alert(
            "ConvoyRestarted",
            'changes(process_start_time_seconds{job="convoy"}[15m]) > 0',
            "",
            _TICKET,
            f"the process with the engines of {_INSTANCE} has begun anew",
            "The log before the start says why it ended. A lost device, or an engine that could not be replaced, ends "
            "the process on purpose; one that was killed without a word was most often out of memory.",
        ),
        Alert(
            "ConvoyRefuses",
            f"{refused} > 0.01 * {calls}",
            "5m",
            _TICKET,
            f"{_INSTANCE} refuses more than one call in a hundred",
            "The dashboard Overview has the reasons. `queue_full`, `predicted_late`, `decode_queue`: more load than "
            "it can bear, so add servers. `memory`: see ConvoyMemoryNearlyFull. `calls`, `connections`: raise "
            "`--max-connections`. `not_ready`: see ConvoyNotReady and ConvoyRestarted.",
        ),
        Alert(
            "ConvoyMemoryNearlyFull",
            "convoy_inflight_bytes / convoy_inflight_limit_bytes > 0.9",
            "5m",
            _TICKET,
            f"requests hold {_VALUE} of the memory for them on {_INSTANCE}",
            "Soon requests are refused for `memory`. Raise `--max-inflight-mb` if the machine has more, lower "
            "`--max-body-mb`, or add servers; slow clients that send large bodies hold it long.",
        ),
        Alert(
            "ConvoyGpuMemoryNearlyFull",
            "convoy_gpu_memory_used_bytes / convoy_gpu_memory_total_bytes > 0.95",
            "10m",
            _TICKET,
            f"{{{{ $labels.device }}}} of {_INSTANCE} has {_VALUE} of its memory in use",
            "The next version, plan or replaced engine may find no room beside what serves. Unload models, or see "
            "whether another process uses the GPU.",
        ),
    )


def _of_engines() -> tuple[Alert, ...]:
    not_passed = _happened('convoy_canary_runs_total{result!="passed"}', "15m")
    replaced = _happened("convoy_engine_replacements_total", "15m")
    failed = _happened('convoy_plans_total{result=~"not_built|not_proved"}', "1h")
    return (
        Alert(
            "ConvoyCanaryFailed",
            f"{_BY_VERSION} ({not_passed})",
            "",
            _PAGE,
            f"an engine of {_VERSION} gave a wrong answer, or none",
            "It is out of service and is being replaced. The log says how far off it was. Where it comes again on one "
            "machine suspect its hardware (the dashboard Devices has its errors), and take the machine out of service.",
        ),
        Alert(
            "ConvoyEngineReplaced",
            f"{_BY_VERSION} ({replaced})",
            "",
            _TICKET,
            f"an engine of {_VERSION} was lost and replaced",
            "It serves again. The log says why it was lost: a batch that hung comes with the stacks of all threads, a "
            "device's failure with its driver's words. Where it comes every hour take the machine out of service.",
        ),
        Alert(
            "ConvoyPlanFailed",
            f"{_BY_VERSION} ({failed})",
            "",
            _TICKET,
            f"{_VERSION} is served without a plan that was to make it faster",
            "`why_not_others` in `/stats`, and the log, have the reason. Not built: the library does not take the "
            "file, or memory was short. Not proved: the plan answers otherwise than the model, so export another "
            "precision. It is served as before; see whether that is fast enough.",
        ),
        Alert(
            "ConvoyVersionRefused",
            _happened('convoy_loads_total{result="refused"}', "15m"),
            "",
            _TICKET,
            f"{_INSTANCE} has refused a version of a model",
            "`/v2/repository/index` names it and says why. What served before goes on serving. Export it anew, or "
            "take it out of the store.",
        ),
    )


def _happened(counter: str, within: str) -> str:
    """Series of a counter that have risen, or that were above zero when Prometheus first saw them.

    What goes wrong at a start is counted before the first look, and `increase` sees no rise there. A day without a
    look, and not a single missed one, makes a series new: otherwise what is long over would be told again.
    """
    is_new = f"unless present_over_time({counter}[1d] offset {within})"
    return f"(increase({counter}[{within}]) > 0) or ({counter} > 0 {is_new})"


def rules(objective: Objective) -> dict[str, Any]:
    """The file for Prometheus."""
    recorded = [
        {"record": ratio(of, window), "expr": expr}
        for window in WINDOWS
        for of, expr in (("bad", bad(window)), ("slow", slow(window, objective)))
    ]
    groups: list[dict[str, Any]] = [{"name": "convoy-recorded", "rules": recorded}]
    for name, some in alerts(objective).items():
        groups.append({"name": name, "rules": [_alert(one) for one in some]})
    return {"groups": groups}


def _alert(one: Alert) -> dict[str, Any]:
    lasts = {"for": one.lasts} if one.lasts else {}
    told = {"summary": one.summary, "description": one.look}
    return {"alert": one.name, "expr": one.expr, **lasts, "labels": {"severity": one.severity}, "annotations": told}
