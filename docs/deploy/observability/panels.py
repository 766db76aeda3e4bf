"""What each dashboard shows. How Grafana writes it is known to grafana.py."""

from __future__ import annotations

from dataclasses import dataclass, field

from docs.deploy.observability.objective import DUE, NOT_DONE, Objective, bad, left, ratio, slow


@dataclass(frozen=True, slots=True)
class Panel:
    """`queries` are expressions and their legends. `unit` is Grafana's word; `wide` of 24 columns."""

    title: str
    description: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    kind: str = "timeseries"
    wide: int = 12
    high: int = 8
    is_stacked: bool = False
    most: float | None = None
    red_from: float | None = None
    red_below: float | None = None


@dataclass(frozen=True, slots=True)
class Dashboard:
    name: str
    title: str
    description: str
    variables: tuple[str, ...]
    panels: tuple[Panel, ...] = field(default=())


_SERVER = 'job=~"$job", instance=~"$instance"'
_MODEL = f'{_SERVER}, model=~"$model", version=~"$version"'
_DEVICE = f'{_SERVER}, device=~"$device"'
_RATE = "[$__rate_interval]"


def _rate(metric: str, selector: str, by: str = "") -> str:
    of = f" by ({by})" if by else ""
    return f"sum{of} (rate({metric}{{{selector}}}{_RATE}))"


def _quantile(share: float, metric: str, selector: str, by: str = "") -> str:
    return f"histogram_quantile({share:g}, {_rate(f'{metric}_bucket', selector, f'{by}, le' if by else 'le')})"


def _share_not_done(selector: str, by: str = "") -> str:
    calls = "convoy_call_duration_seconds_count"
    due = _rate(calls, f'{selector}, outcome=~"{DUE}"', by)
    return f'({_rate(calls, f"""{selector}, outcome=~"{NOT_DONE}" """.strip(), by)} or 0 * {due}) / {due}'


def dashboards(objective: Objective) -> tuple[Dashboard, ...]:
    return (_overview(), _model(), _stages(), _devices(), _objective(objective))


def _stat(title: str, description: str, unit: str, expr: str, **more: float) -> Panel:
    """One figure, small; one for each job where they are told apart."""
    legend = "{{job}}" if "by (job)" in expr else title
    return Panel(title, description, unit, ((expr, legend),), "stat", 6, 4, **more)


def _overview() -> Dashboard:
    calls, took = "convoy_call_duration_seconds_count", "convoy_call_duration_seconds"
    answered = f'{_SERVER}, outcome="answered"'
    return Dashboard(
        "overview",
        "Convoy / Overview",
        "What all servers do together, and how full they are.",
        ("job", "instance"),
        (
            _stat(
                "Servers that are ready",
                "Of those that Prometheus reaches. One that is not ready is sent no requests.",
                "percentunit",
                f"avg(convoy_ready{{{_SERVER}}})",
                most=1,
                red_below=1,
            ),
            _stat(
                "Answers",
                "Calls that were answered, per second.",
                "reqps",
                _rate(calls, answered),
            ),
            _stat(
                "Not done",
                "Of the calls that were due: failed, refused or late. What clients did wrong does not count.",
                "percentunit",
                _share_not_done(_SERVER),
                most=1,
                red_from=0.01,
            ),
            _stat(
                "p99",
                "99 of 100 answers were there so soon.",
                "s",
                _quantile(0.99, took, answered),
            ),
            Panel(
                "Calls by outcome",
                "Each call ends once, with one outcome.",
                "reqps",
                ((_rate(calls, _SERVER, "outcome"), "{{outcome}}"),),
                is_stacked=True,
            ),
            Panel(
                "Time to answer",
                "From the arrival of the headers to the answer.",
                "s",
                tuple((_quantile(share, took, answered), f"p{share * 100:g}") for share in (0.5, 0.95, 0.99)),
            ),
            Panel(
                "Refusals by reason",
                "docs/metrics.md has the reasons; the alert ConvoyRefuses says what to do.",
                "reqps",
                ((_rate("convoy_rejected_total", _SERVER, "reason"), "{{reason}}"),),
                is_stacked=True,
            ),
            Panel(
                "Utilization",
                "The part of what a server could do at most that it does. Near 1 it cannot do more.",
                "percentunit",
                ((f"convoy_utilization_ratio{{{_SERVER}}}", "{{instance}}"),),
                most=1,
                red_from=0.9,
            ),
            Panel(
                "Requests that wait",
                "On average: seconds of waiting a second, in the queue and for a decoder.",
                "none",
                (
                    (
                        _rate(
                            "convoy_stage_duration_seconds_sum", f'{_SERVER}, stage=~"decode_wait|queue"', "instance"
                        ),
                        "{{instance}}",
                    ),
                ),
            ),
            Panel(
                "Memory for requests",
                "How much of --max-inflight-mb they hold. When it is full requests are refused.",
                "percentunit",
                ((f"convoy_inflight_bytes{{{_SERVER}}} / convoy_inflight_limit_bytes{{{_SERVER}}}", "{{instance}}"),),
                most=1,
                red_from=0.9,
            ),
            Panel(
                "Cores in use",
                "CPU time of each server's process over time.",
                "none",
                ((_rate("process_cpu_seconds_total", _SERVER, "instance"), "{{instance}}"),),
            ),
            Panel(
                "Resident memory",
                "Of each server's process.",
                "bytes",
                ((f"process_resident_memory_bytes{{{_SERVER}}}", "{{instance}}"),),
            ),
        ),
    )


def _model() -> Dashboard:
    calls, took, which = "convoy_call_duration_seconds_count", "convoy_call_duration_seconds", "model, version"
    legend, answered = "{{model}} {{version}}", f'{_MODEL}, outcome="answered"'
    padded, samples = (_rate(name, _MODEL, which) for name in ("convoy_padding_samples_total", "convoy_batch_size_sum"))
    happened = (
        ("convoy_canary_runs_total", f'{_MODEL}, result!="passed"', "canary failed"),
        ("convoy_engine_losses_total", _MODEL, "engine lost"),
        ("convoy_engine_replacements_total", _MODEL, "engine replaced"),
        ("convoy_plans_total", f'{_MODEL}, result=~"not_built|not_proved"', "plan failed"),
    )
    return Dashboard(
        "model",
        "Convoy / Model",
        "What each version of a model does.",
        ("job", "instance", "model", "version"),
        (
            Panel(
                "Calls by outcome",
                "Each call ends once, with one outcome.",
                "reqps",
                ((_rate(calls, _MODEL, f"{which}, outcome"), f"{legend} {{{{outcome}}}}"),),
                is_stacked=True,
            ),
            Panel(
                "Not done",
                "Of the calls that were due: failed, refused or late.",
                "percentunit",
                ((_share_not_done(_MODEL, which), legend),),
                most=1,
                red_from=0.01,
            ),
            Panel(
                "Time to answer",
                "From the arrival of the headers to the answer.",
                "s",
                tuple((_quantile(share, took, answered, which), f"{legend} p{share * 100:g}") for share in (0.5, 0.99)),
            ),
            Panel("Samples", "A call may have several.", "cps", ((samples, legend),)),
            Panel(
                "Samples in a batch",
                "On average. Larger under load, and cheaper for each sample.",
                "none",
                ((f"{samples} / {_rate('convoy_batch_size_count', _MODEL, which)}", legend),),
            ),
            Panel(
                "Padding",
                "The share of what is computed that only fills batches to a size that the engine has.",
                "percentunit",
                ((f"{padded} / ({padded} + {samples})", legend),),
                most=1,
            ),
            Panel(
                "What went wrong with engines",
                "How often, within an hour. The alerts of each say what to do.",
                "none",
                tuple(
                    (f"sum by ({which}) (increase({name}{{{selector}}}[1h]))", f"{legend} {word}")
                    for name, selector, word in happened
                ),
            ),
            Panel(
                "Engines that serve", "And why these.", "none", ((f"convoy_engine_info{{{_MODEL}}} == 1", ""),), "table"
            ),
        ),
    )


def _stages() -> Dashboard:
    of_request, of_batch = (
        f'{_MODEL}, stage=~"{stages}"' for stages in ("decode_wait|decode|queue|encode", "copy_in|compute|copy_out")
    )
    took = "convoy_stage_duration_seconds"

    def average(selector: str) -> str:
        return f"{_rate(f'{took}_sum', selector, 'stage')} / {_rate(f'{took}_count', selector, 'stage')}"

    return Dashboard(
        "stages",
        "Convoy / Stages",
        "Where the time of calls goes.",
        ("job", "instance", "model", "version"),
        (
            Panel(
                "Average time of a request",
                "By stage; decode_wait is the wait for a decoder, queue that for an engine.",
                "s",
                ((average(of_request), "{{stage}}"),),
                is_stacked=True,
            ),
            Panel(
                "Average time of a batch",
                "By stage. All requests in it wait for all of it.",
                "s",
                ((average(of_batch), "{{stage}}"),),
                is_stacked=True,
            ),
            Panel(
                "p99 of a request's stages",
                "99 of 100 took less.",
                "s",
                ((_quantile(0.99, took, of_request, "stage"), "{{stage}}"),),
            ),
            Panel(
                "p99 of a batch's stages",
                "99 of 100 took less.",
                "s",
                ((_quantile(0.99, took, of_batch, "stage"), "{{stage}}"),),
            ),
            Panel(
                "How many are in a stage of requests",
                "On average: seconds spent a second.",
                "none",
                ((_rate(f"{took}_sum", of_request, "stage"), "{{stage}}"),),
                is_stacked=True,
            ),
            Panel(
                "How many are in a stage of batches",
                "On average: seconds spent a second.",
                "none",
                ((_rate(f"{took}_sum", of_batch, "stage"), "{{stage}}"),),
                is_stacked=True,
            ),
        ),
    )


def _devices() -> Dashboard:
    legend = "{{instance}} {{device}}"

    def gauge(name: str) -> str:
        return f"convoy_gpu_{name}{{{_DEVICE}}}"

    errors = (("ecc_uncorrected_errors", "memory errors"), ("query_failures", "failed questions"))
    calls = _rate("convoy_call_duration_seconds_count", f'{_SERVER}, outcome="answered"', "instance")
    return Dashboard(
        "devices",
        "Convoy / Devices",
        "What the CPU and the GPUs that compute say of themselves.",
        ("job", "instance", "device"),
        (
            Panel(
                "Batches at once",
                "Seconds of compute a second: above 1 where batches run beside each other.",
                "none",
                ((_rate("convoy_device_compute_seconds_total", _DEVICE, "instance, device"), legend),),
            ),
            Panel(
                "GPU: time with a kernel running",
                "An engine that is free takes what waits, so this says little of how "
                "much more it could do; see Utilization in Overview.",
                "percentunit",
                ((gauge("utilization_ratio"), legend),),
                most=1,
            ),
            Panel(
                "GPU: memory in use",
                "Of all processes.",
                "percentunit",
                ((f"{gauge('memory_used_bytes')} / {gauge('memory_total_bytes')}", legend),),
                most=1,
                red_from=0.95,
            ),
            Panel(
                "GPU: power",
                "And what is allowed.",
                "watt",
                ((gauge("power_watts"), legend), (gauge("power_limit_watts"), f"{legend} limit")),
            ),
            Panel(
                "GPU: temperature",
                "Hot GPUs are held back; see below.",
                "celsius",
                ((gauge("temperature_celsius"), legend),),
            ),
            Panel("GPU: clocks", "Of the multiprocessors.", "hertz", ((gauge("sm_clock_hertz"), legend),)),
            Panel(
                "GPU: held back",
                "1 while the clocks are below what they could be, by reason; being idle is left out.",
                "none",
                ((f'convoy_gpu_throttled{{{_DEVICE}, reason!="gpu_idle"}}', f"{legend} {{{{reason}}}}"),),
                most=1,
            ),
            Panel(
                "GPU: errors",
                "Within an hour: uncorrected errors of its memory, and questions that it did not answer.",
                "none",
                tuple(
                    (f"increase(convoy_gpu_{name}_total{{{_DEVICE}}}[1h])", f"{legend} {word}") for name, word in errors
                ),
            ),
            Panel(
                "GPU: energy of an answer",
                "Joules of all GPUs of a server by its answers.",
                "joule",
                ((f"{_rate('convoy_gpu_energy_joules_total', _SERVER, 'instance')} / {calls}", "{{instance}}"),),
            ),
        ),
    )


def _objective(objective: Objective) -> Dashboard:
    unavailable, too_late = left(objective.availability), left(objective.latency_share)
    done = f"{objective.availability:.6g} of the calls that are due are answered"
    soon = f"{objective.latency_share:.6g} of answers are there within {objective.latency_s:g} s"

    def of_job(expr: str) -> str:
        return expr.replace("{outcome", '{job=~"$job", outcome')

    def recorded(of: str, window: str) -> str:
        return f'{ratio(of, window)}{{job=~"$job"}}'

    def burn(of: str, allowed: float) -> tuple[tuple[str, str], ...]:
        return tuple(
            (f"{recorded(of, window)} / {allowed:g}", f"{{{{job}}}} {window}") for window in ("1h", "6h", "3d")
        )

    not_done, late = of_job(bad("30d")), of_job(slow("30d", objective))
    burns = "1 spends exactly what is allowed in a month. Above 14.4 over an hour, or 6 over six, somebody is paged."
    return Dashboard(
        "objective",
        "Convoy / Objective",
        f"What is promised: {done}; {soon}. make.py changes it.",
        ("job",),
        (
            _stat(
                "Done, 30 days",
                f"The objective: {done}.",
                "percentunit",
                f"1 - ({not_done})",
                most=1,
                red_below=objective.availability,
            ),
            _stat(
                "Budget left",
                "Of what may go wrong in 30 days, the part that has not yet. Below 0 the objective is missed.",
                "percentunit",
                f"1 - ({not_done}) / {unavailable:g}",
                most=1,
                red_below=0,
            ),
            _stat(
                "In time, 30 days",
                f"The objective: {soon}.",
                "percentunit",
                f"1 - ({late})",
                most=1,
                red_below=objective.latency_share,
            ),
            _stat(
                "Budget left of time",
                "Of the answers that may be late in 30 days, the part that has not been yet.",
                "percentunit",
                f"1 - ({late}) / {too_late:g}",
                most=1,
                red_below=0,
            ),
            Panel("How fast the budget is spent", burns, "none", burn("bad", unavailable), red_from=14.4),
            Panel("How fast the budget of time is spent", burns, "none", burn("slow", too_late), red_from=14.4),
            Panel("Not done", "Over five minutes.", "percentunit", ((recorded("bad", "5m"), "{{job}}"),), most=1),
            Panel("Not in time", "Over five minutes.", "percentunit", ((recorded("slow", "5m"), "{{job}}"),), most=1),
        ),
    )
