"""The alerts: when each fires, what it says, and what to check."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from docs.deploy.observability.objective import FAST, SLOW, WINDOWS, Objective, bad, burns, left, ratio, slow


@dataclass(frozen=True, slots=True)
class Alert:
    """`summary` may use the labels of `expr`; `look` says what to check and what to do."""

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
    burning = f"Error budget of {_JOB} burning"
    failed = f"{_VALUE} of requests failed, were refused or were late (SLO {_percent(objective.availability)})"
    look = (
        "The dashboard Overview shows the outcomes and reasons, Model shows which model is affected, and the log has "
        "the errors. Failed: the engine or the model is broken; roll back to the previous version. Refused or late: "
        "the load is too high; add servers or reduce the load."
    )
    fast, slow_ = burns("bad", allowed, FAST), burns("bad", allowed, SLOW)
    return (
        Alert("ConvoyAvailabilityBurnsFast", fast, "", _PAGE, f"{burning} fast: {failed}", f"{look} {_SOON}"),
        Alert("ConvoyAvailabilityBurnsSlowly", slow_, "", _TICKET, f"{burning} slowly: {failed}", look),
    )


def _of_latency(objective: Objective) -> tuple[Alert, Alert]:
    allowed = left(objective.latency_share)
    share, latency = _percent(objective.latency_share), f"{objective.latency_s:g} s"
    burning = f"Latency budget of {_JOB} burning"
    slow_ones = f"{_VALUE} of responses took longer than {latency} (SLO {share} within {latency})"
    look = (
        "The dashboard Stages shows where the time goes. Queue: the load is too high; add servers. Decode: add CPU "
        "cores. Compute: check whether a different engine serves now and whether a GPU is throttled."
    )
    fast, slow_ = burns("slow", allowed, FAST), burns("slow", allowed, SLOW)
    return (
        Alert("ConvoyLatencyBurnsFast", fast, "", _PAGE, f"{burning} fast: {slow_ones}", f"{look} {_SOON}"),
        Alert("ConvoyLatencyBurnsSlowly", slow_, "", _TICKET, f"{burning} slowly: {slow_ones}", look),
    )


_SOON = "At this rate the monthly error budget is used up within days."


def _percent(share: float) -> str:
    return f"{100 * share:.6g} %"


def _of_servers() -> tuple[Alert, ...]:
    refused = 'sum by (job, instance) (rate(convoy_rejected_total{reason!="draining"}[5m]))'
    calls = "sum by (job, instance) (rate(convoy_call_duration_seconds_count[5m]))"
    return (
        Alert(
            "ConvoyDown",
            'up{job="convoy"} == 0',
            "2m",
            _PAGE,
            f"{_INSTANCE} is down: Prometheus cannot scrape it",
            "Check whether the process is running. If it ended, its exit code and the end of its log say why.",
        ),
        Alert(
            "ConvoyNotReady",
            "convoy_ready == 0",
            "5m",
            _PAGE,
            f"{_INSTANCE} has not been ready for 5 minutes",
            "`/v2/health/ready` gives the reason: models load, an engine is being replaced, or the server drains.",
        ),
        Alert(
            "ConvoyRestarted",
            'changes(process_start_time_seconds{job="convoy"}[15m]) > 0',
            "",
            _TICKET,
            f"{_INSTANCE} restarted",
            "The log before the restart says why the process ended. It exits on purpose when a device is lost or an "
            "engine cannot be replaced. A process that was killed without a log line most often ran out of memory.",
        ),
        Alert(
            "ConvoyRefuses",
            f"{refused} > 0.01 * {calls}",
            "5m",
            _TICKET,
            f"{_INSTANCE} refuses more than 1 % of requests",
            "The dashboard Overview shows the reasons. `queue_full`, `predicted_late`, `decode_queue`: the load is "
            "too high; add servers. `memory`: see ConvoyMemoryNearlyFull. `calls`, `connections`: raise "
            "`--max-connections`. `not_ready`: see ConvoyNotReady and ConvoyRestarted.",
        ),
        Alert(
            "ConvoyMemoryNearlyFull",
            "convoy_inflight_bytes / convoy_inflight_limit_bytes > 0.9",
            "5m",
            _TICKET,
            f"Request memory of {_INSTANCE} is {_VALUE} full",
            "When it is full, requests are refused with the reason `memory`. Raise `--max-inflight-mb` if the machine "
            "has free memory, lower `--max-body-mb`, or add servers. Slow clients with large bodies hold memory long.",
        ),
        Alert(
            "ConvoyGpuMemoryNearlyFull",
            "convoy_gpu_memory_used_bytes / convoy_gpu_memory_total_bytes > 0.95",
            "10m",
            _TICKET,
            f"GPU memory of {{{{ $labels.device }}}} on {_INSTANCE} is {_VALUE} full",
            "A new version, plan or replacement engine may not fit. Unload models, or check whether another process "
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
            f"An engine of {_VERSION} failed its canary",
            "The engine is out of service and is being replaced. The log says how far off its output was. If it "
            "happens again on the same machine, suspect the hardware (see the dashboard Devices) and take the machine "
            "out of service.",
        ),
        Alert(
            "ConvoyEngineReplaced",
            f"{_BY_VERSION} ({replaced})",
            "",
            _TICKET,
            f"An engine of {_VERSION} failed and was replaced",
            "The model serves again. The log says why the engine failed: a hung batch with the stacks of all threads, "
            "a device failure with the driver's error. If it happens every hour, take the machine out of service.",
        ),
        Alert(
            "ConvoyPlanFailed",
            f"{_BY_VERSION} ({failed})",
            "",
            _TICKET,
            f"{_VERSION} serves without its TensorRT plan",
            "`why_not_others` in `/stats` and the log give the reason. Not built: the library does not support the "
            "model, or memory ran out. Not proved: the plan's output differs from the model's; export another "
            "precision. The model serves on its previous engine; check whether that is fast enough.",
        ),
        Alert(
            "ConvoyVersionRefused",
            _happened('convoy_loads_total{result="refused"}', "15m"),
            "",
            _TICKET,
            f"{_INSTANCE} refused to load a model version",
            "`/v2/repository/index` names the version and the reason. The previous version keeps serving. Export the "
            "model again, or remove the version from the store.",
        ),
    )


def _happened(counter: str, within: str) -> str:
    """Series of a counter that have risen, or that were above zero when Prometheus first saw them.

    What fails at the start is counted before the first scrape, and `increase` sees no rise there. A series counts as
    new only after a day without a scrape; otherwise one missed scrape would repeat old alerts.
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
