"""The panels of each dashboard; grafana.py writes them as Grafana's JSON."""

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
        "Traffic, errors, latency and saturation of all servers.",
        ("job", "instance"),
        (
            _stat(
                "Ready servers",
                "Share of the servers that Prometheus scrapes. A server that is not ready gets no requests.",
                "percentunit",
                f"avg(convoy_ready{{{_SERVER}}})",
                most=1,
                red_below=1,
            ),
            _stat(
                "Responses",
                "Successful requests per second.",
                "reqps",
                _rate(calls, answered),
            ),
            _stat(
                "Error rate",
                "Share of requests that failed, were refused or were late. Client errors do not count.",
                "percentunit",
                _share_not_done(_SERVER),
                most=1,
                red_from=0.01,
            ),
            _stat(
                "p99",
                "99 % of responses took less time.",
                "s",
                _quantile(0.99, took, answered),
            ),
            Panel(
                "Requests by outcome",
                "Requests per second; each has one outcome.",
                "reqps",
                ((_rate(calls, _SERVER, "outcome"), "{{outcome}}"),),
                is_stacked=True,
            ),
            Panel(
                "Latency",
                "From the arrival of the headers to the response.",
                "s",
                tuple((_quantile(share, took, answered), f"p{share * 100:g}") for share in (0.5, 0.95, 0.99)),
            ),
            Panel(
                "Refused requests by reason",
                "docs/metrics.md explains the reasons; the alert ConvoyRefuses says what to do.",
                "reqps",
                ((_rate("convoy_rejected_total", _SERVER, "reason"), "{{reason}}"),),
                is_stacked=True,
            ),
            Panel(
                "Utilization",
                "Share of each server's capacity in use. Near 1 the server is saturated.",
                "percentunit",
                ((f"convoy_utilization_ratio{{{_SERVER}}}", "{{instance}}"),),
                most=1,
                red_from=0.9,
            ),
            Panel(
                "Waiting requests",
                "Average number of requests that wait in the queue or for a decoder.",
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
                "Request memory",
                "Share of --max-inflight-mb in use. When it is full, requests are refused.",
                "percentunit",
                ((f"convoy_inflight_bytes{{{_SERVER}}} / convoy_inflight_limit_bytes{{{_SERVER}}}", "{{instance}}"),),
                most=1,
                red_from=0.9,
            ),
            Panel(
                "CPU cores in use",
                "CPU time of each server process per second.",
                "none",
                ((_rate("process_cpu_seconds_total", _SERVER, "instance"), "{{instance}}"),),
            ),
            Panel(
                "Resident memory",
                "Resident memory of each server process.",
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
        "Traffic, latency, batches and engines of each model version.",
        ("job", "instance", "model", "version"),
        (
            Panel(
                "Requests by outcome",
                "Requests per second; each has one outcome.",
                "reqps",
                ((_rate(calls, _MODEL, f"{which}, outcome"), f"{legend} {{{{outcome}}}}"),),
                is_stacked=True,
            ),
            Panel(
                "Error rate",
                "Share of requests that failed, were refused or were late.",
                "percentunit",
                ((_share_not_done(_MODEL, which), legend),),
                most=1,
                red_from=0.01,
            ),
            Panel(
                "Latency",
                "From the arrival of the headers to the response.",
                "s",
                tuple((_quantile(share, took, answered, which), f"{legend} p{share * 100:g}") for share in (0.5, 0.99)),
            ),
            Panel("Samples", "Samples per second; a request may hold several.", "cps", ((samples, legend),)),
            Panel(
                "Batch size",
                "Average samples per batch. Under load batches grow, and each sample costs less.",
                "none",
                ((f"{samples} / {_rate('convoy_batch_size_count', _MODEL, which)}", legend),),
            ),
            Panel(
                "Padding",
                "Share of computed samples that only pad batches to a size that the engine supports.",
                "percentunit",
                ((f"{padded} / ({padded} + {samples})", legend),),
                most=1,
            ),
            Panel(
                "Engine failures",
                "Failures within an hour. The alert for each says what to do.",
                "none",
                tuple(
                    (f"sum by ({which}) (increase({name}{{{selector}}}[1h]))", f"{legend} {word}")
                    for name, selector, word in happened
                ),
            ),
            Panel(
                "Active engines",
                "The engines that serve, and the reason for each.",
                "none",
                ((f"convoy_engine_info{{{_MODEL}}} == 1", ""),),
                "table",
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
        "Where requests and batches spend their time.",
        ("job", "instance", "model", "version"),
        (
            Panel(
                "Average time per request",
                "By stage. decode_wait: waiting for a decoder; queue: waiting for an engine.",
                "s",
                ((average(of_request), "{{stage}}"),),
                is_stacked=True,
            ),
            Panel(
                "Average time per batch",
                "By stage. Each request waits for its whole batch.",
                "s",
                ((average(of_batch), "{{stage}}"),),
                is_stacked=True,
            ),
            Panel(
                "p99 of each request stage",
                "99 % of requests took less time in the stage.",
                "s",
                ((_quantile(0.99, took, of_request, "stage"), "{{stage}}"),),
            ),
            Panel(
                "p99 of each batch stage",
                "99 % of batches took less time in the stage.",
                "s",
                ((_quantile(0.99, took, of_batch, "stage"), "{{stage}}"),),
            ),
            Panel(
                "Requests in each stage",
                "Average number of requests in the stage.",
                "none",
                ((_rate(f"{took}_sum", of_request, "stage"), "{{stage}}"),),
                is_stacked=True,
            ),
            Panel(
                "Batches in each stage",
                "Average number of batches in the stage.",
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

    errors = (("ecc_uncorrected_errors", "memory errors"), ("query_failures", "failed queries"))
    calls = _rate("convoy_call_duration_seconds_count", f'{_SERVER}, outcome="answered"', "instance")
    return Dashboard(
        "devices",
        "Convoy / Devices",
        "Load and health of the CPU and the GPUs.",
        ("job", "instance", "device"),
        (
            Panel(
                "Concurrent batches",
                "Average number of batches that compute; above 1 when batches overlap.",
                "none",
                ((_rate("convoy_device_compute_seconds_total", _DEVICE, "instance, device"), legend),),
            ),
            Panel(
                "GPU: utilization",
                "Share of time with a kernel running. An idle engine takes any waiting request, so this does not show "
                "the spare capacity; see Utilization in Overview.",
                "percentunit",
                ((gauge("utilization_ratio"), legend),),
                most=1,
            ),
            Panel(
                "GPU: memory in use",
                "Share of memory in use, by all processes.",
                "percentunit",
                ((f"{gauge('memory_used_bytes')} / {gauge('memory_total_bytes')}", legend),),
                most=1,
                red_from=0.95,
            ),
            Panel(
                "GPU: power",
                "Power draw and its limit.",
                "watt",
                ((gauge("power_watts"), legend), (gauge("power_limit_watts"), f"{legend} limit")),
            ),
            Panel(
                "GPU: temperature",
                "Hot GPUs are throttled; see below.",
                "celsius",
                ((gauge("temperature_celsius"), legend),),
            ),
            Panel("GPU: clocks", "Clock of the multiprocessors.", "hertz", ((gauge("sm_clock_hertz"), legend),)),
            Panel(
                "GPU: throttling",
                "1 while the clocks are reduced, by reason; idle is left out.",
                "none",
                ((f'convoy_gpu_throttled{{{_DEVICE}, reason!="gpu_idle"}}', f"{legend} {{{{reason}}}}"),),
                most=1,
            ),
            Panel(
                "GPU: errors",
                "Uncorrected memory errors and failed NVML queries within an hour.",
                "none",
                tuple(
                    (f"increase(convoy_gpu_{name}_total{{{_DEVICE}}}[1h])", f"{legend} {word}") for name, word in errors
                ),
            ),
            Panel(
                "GPU: energy per response",
                "Energy of all GPUs of a server, divided by its responses.",
                "joule",
                ((f"{_rate('convoy_gpu_energy_joules_total', _SERVER, 'instance')} / {calls}", "{{instance}}"),),
            ),
        ),
    )


def _objective(objective: Objective) -> Dashboard:
    unavailable, too_late = left(objective.availability), left(objective.latency_share)
    done = f"{100 * objective.availability:.6g} % of requests succeed"
    soon = f"{100 * objective.latency_share:.6g} % of responses take at most {objective.latency_s:g} s"

    def of_job(expr: str) -> str:
        return expr.replace("{outcome", '{job=~"$job", outcome')

    def recorded(of: str, window: str) -> str:
        return f'{ratio(of, window)}{{job=~"$job"}}'

    def burn(of: str, allowed: float) -> tuple[tuple[str, str], ...]:
        return tuple(
            (f"{recorded(of, window)} / {allowed:g}", f"{{{{job}}}} {window}") for window in ("1h", "6h", "3d")
        )

    not_done, late = of_job(bad("30d")), of_job(slow("30d", objective))
    burns = "Burn rate: 1 uses exactly the monthly error budget. An alert pages above 14.4 over 1 h or 6 over 6 h."
    return Dashboard(
        "objective",
        "Convoy / Objective",
        f"The SLOs: {done}; {soon}. Change them with make.py.",
        ("job",),
        (
            _stat(
                "Availability, 30 days",
                f"SLO: {done}.",
                "percentunit",
                f"1 - ({not_done})",
                most=1,
                red_below=objective.availability,
            ),
            _stat(
                "Error budget left",
                "Share of the error budget of 30 days that is left. Below 0 the SLO is missed.",
                "percentunit",
                f"1 - ({not_done}) / {unavailable:g}",
                most=1,
                red_below=0,
            ),
            _stat(
                "Fast responses, 30 days",
                f"SLO: {soon}.",
                "percentunit",
                f"1 - ({late})",
                most=1,
                red_below=objective.latency_share,
            ),
            _stat(
                "Latency budget left",
                "Share of the slow responses allowed in 30 days that is left.",
                "percentunit",
                f"1 - ({late}) / {too_late:g}",
                most=1,
                red_below=0,
            ),
            Panel("Error budget burn rate", burns, "none", burn("bad", unavailable), red_from=14.4),
            Panel("Latency budget burn rate", burns, "none", burn("slow", too_late), red_from=14.4),
            Panel("Error rate", "Over 5 minutes.", "percentunit", ((recorded("bad", "5m"), "{{job}}"),), most=1),
            Panel(
                "Slow responses", "Share over 5 minutes.", "percentunit", ((recorded("slow", "5m"), "{{job}}"),), most=1
            ),
        ),
    )
