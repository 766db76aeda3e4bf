"""The alerts: when they fire, and what the person on call should check and do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from docs.deploy.observability.objective import FAST, SLOW, WINDOWS, Objective, bad, burns, left, ratio, slow


@dataclass(frozen=True, slots=True)
class Alert:
    """`summary` may use labels of the result of `expr`; `look` says what to check and what to do."""

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
    said = f"{_VALUE} of the calls to {_JOB} did not succeed in the last"
    promised = f"(objective: {objective.availability:.6g} succeed)"
    look = (
        "The dashboard Overview shows outcomes and reasons, Model the affected model, and the log has the errors. "
        "If calls fail, the model or its engine is at fault: roll back to the previous version. If calls are refused "
        "or late, the load is too high: add servers or reduce the load."
    )
    fast, slow_ = burns("bad", allowed, FAST), burns("bad", allowed, SLOW)
    return (
        Alert("ConvoyAvailabilityBurnsFast", fast, "", _PAGE, f"{said} 1 or 6 hours {promised}", f"{look} {_SOON}"),
        Alert("ConvoyAvailabilityBurnsSlowly", slow_, "", _TICKET, f"{said} 1 or 3 days {promised}", look),
    )


def _of_latency(objective: Objective) -> tuple[Alert, Alert]:
    allowed = left(objective.latency_share)
    said = f"{_VALUE} of the responses of {_JOB} took longer than {objective.latency_s:g} s in the last"
    promised = f"(objective: {objective.latency_share:.6g} are faster)"
    look = (
        "The dashboard Stages shows where the time goes. Queue: the load is too high, so add servers. Decode: give the "
        "server more cores. Compute: check whether another engine serves than before, and whether a GPU is throttled."
    )
    fast, slow_ = burns("slow", allowed, FAST), burns("slow", allowed, SLOW)
    return (
        Alert("ConvoyLatencyBurnsFast", fast, "", _PAGE, f"{said} 1 or 6 hours {promised}", f"{look} {_SOON}"),
        Alert("ConvoyLatencyBurnsSlowly", slow_, "", _TICKET, f"{said} 1 or 3 days {promised}", look),
    )


_SOON = "At this rate the monthly error budget is used up within days."


def _of_servers() -> tuple[Alert, ...]:
    refused = 'sum by (job, instance) (rate(convoy_rejected_total{reason!="draining"}[5m]))'
    calls = "sum by (job, instance) (rate(convoy_call_duration_seconds_count[5m]))"
    return (
        Alert(
            "ConvoyDown",
            'up{job="convoy"} == 0',
            "2m",
            _PAGE,
            f"Prometheus cannot scrape {_INSTANCE}",
            "Check whether the process runs. If it has ended, its exit code and the end of its log say why.",
        ),
        Alert(
            "ConvoyNotReady",
            "convoy_ready == 0",
            "5m",
            _PAGE,
            f"{_INSTANCE} has not been ready for 5 minutes",
            "`/v2/health/ready` says why: models load, an engine is being replaced, or the server is shutting down.",
        ),
        Alert(
            "ConvoyRestarted",
            'changes(process_start_time_seconds{job="convoy"}[15m]) > 0',
            "",
            _TICKET,
            f"{_INSTANCE} has restarted",
            "The end of the previous log says why. Exit code 70 means that a GPU was lost or an engine could not be "
            "replaced. A process that was killed without a message was probably out of memory.",
        ),
        Alert(
            "ConvoyRefuses",
            f"{refused} > 0.01 * {calls}",
            "5m",
            _TICKET,
            f"{_INSTANCE} refuses more than 1 % of calls",
            "The dashboard Overview shows the reasons. `queue_full`, `predicted_late`, `decode_queue`: the load is too "
            "high, so add servers. `memory`: see ConvoyMemoryNearlyFull. `calls`, `connections`: raise "
            "`--max-connections`. `not_ready`: see ConvoyNotReady and ConvoyRestarted.",
        ),
        Alert(
            "ConvoyMemoryNearlyFull",
            "convoy_inflight_bytes / convoy_inflight_limit_bytes > 0.9",
            "5m",
            _TICKET,
            f"requests use {_VALUE} of the request memory of {_INSTANCE}",
            "Requests will soon be refused with reason `memory`. Raise `--max-inflight-mb` if the machine has more "
            "memory, lower `--max-body-mb`, or add servers. Slow clients with large bodies hold memory for long.",
        ),
        Alert(
            "ConvoyGpuMemoryNearlyFull",
            "convoy_gpu_memory_used_bytes / convoy_gpu_memory_total_bytes > 0.95",
            "10m",
            _TICKET,
            f"{{{{ $labels.device }}}} of {_INSTANCE} uses {_VALUE} of its memory",
            "The next version, plan or replacement engine may not fit. Unload models, or check whether another process "
            "uses the GPU.",
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
            f"an engine of {_VERSION} failed its canary",
            "The engine is out of service and is being replaced. The log shows the error. If this repeats on one "
            "machine, suspect its hardware (see the dashboard Devices) and take the machine out of service.",
        ),
        Alert(
            "ConvoyEngineReplaced",
            f"{_BY_VERSION} ({replaced})",
            "",
            _TICKET,
            f"an engine of {_VERSION} was lost and replaced",
            "The model serves again. The log says why the engine was lost, with the stacks of all threads for a hung "
            "batch or the driver's message for a lost device. If this repeats, take the machine out of service.",
        ),
        Alert(
            "ConvoyPlanFailed",
            f"{_BY_VERSION} ({failed})",
            "",
            _TICKET,
            f"{_VERSION} serves without its TensorRT plan",
            "`why_not_others` in `/stats` and the log have the reason. Not built: the library rejects the file, or "
            "memory was short. Not proved: the plan's results differ from the model's, so export another precision. "
            "The fallback serves meanwhile; check whether it is fast enough.",
        ),
        Alert(
            "ConvoyVersionRefused",
            _happened('convoy_loads_total{result="refused"}', "15m"),
            "",
            _TICKET,
            f"{_INSTANCE} refused a version of a model",
            "`/v2/repository/index` names the version and the reason. The previous version keeps serving. Export the "
            "model again, or remove the version from the store.",
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
