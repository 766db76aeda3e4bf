"""The options of the load test, with their defaults and limits. They are checked when they are created."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, get_args

from convoy.models.errors import UsageError
from convoy.models.option import Option
from convoy.models.tls import ClientTls

Body = Literal["auto", "image", "binary", "json"]
Arrivals = Literal["poisson", "constant", "bursts"]
Wire = Literal["auto", "http", "grpc"]

DEFAULT_URL = "http://127.0.0.1:8000"
DEFAULT_GRPC_URL = "grpc://127.0.0.1:8001"
DEFAULT_CONCURRENCY = 16
MAX_REQUESTS = 5_000_000  # 26 bytes each, which limits the memory of a run
MAX_CONNECTIONS = 10_000
MAX_PROCESSES = 64
MAX_DURATION_S = 86_400.0


@dataclass(frozen=True, slots=True)
class LoadTestOptions:
    """One load test.

    `rate` (requests per second) means an open loop: requests are sent on schedule, whether or not earlier ones were
    answered. `steps` are several such rates, each for `duration_s`. `concurrency` means a closed loop: that many
    clients, each sending its next request after the last response. `find_capacity` searches for the highest rate
    that meets `slo_ms`. Without any of them, 16 clients send in a closed loop.

    `slo_ms` is the latency objective of goodput. `warm_up_s` is left out at the start of the run and of each step; None
    means a tenth of the duration, at most one second. `connections` is the maximum of the open loop. A request without
    a response after `timeout_s` is lost. With `processes` None, rate and cores decide. Bursts alternate `burst_on_s` of
    load and `burst_off_s` without; `rate` is the mean over both. `deadline_ms` is sent with every request as
    `timeout_ms`. Raises UsageError.
    """

    url: Annotated[str, Option("URL of the server; grpc:// for gRPC.", group="Basics")] = DEFAULT_URL
    model: Annotated[str | None, Option("Model to load; optional if the server has one.", group="Basics")] = None
    rate: Annotated[float | None, Option("Open loop: requests per second.", group="Basics")] = None
    steps: Annotated[
        tuple[float, ...],
        Option("Open loop: several rates in turn, such as 100,200,400.", read=_rates_of, group="Load"),
    ] = ()
    concurrency: Annotated[
        int | None, Option("Closed loop: number of clients; 16 if no load is given.", group="Basics")
    ] = None
    find_capacity: Annotated[
        bool,
        Option("Find the highest rate with 99 % of responses within --slo-ms.", name="--find-capacity", group="Basics"),
    ] = False
    slo_ms: Annotated[float | None, Option("Latency objective in milliseconds.", group="Basics")] = None
    duration_s: Annotated[float, Option("Seconds per run, step or probe.", name="--duration", group="Load")] = 10.0
    warm_up_s: Annotated[
        float | None, Option("Seconds to leave out at the start; default: a tenth.", name="--warm-up", group="Load")
    ] = None
    protocol: Annotated[Wire, Option("Protocol; auto: from the URL.", group="Requests")] = "auto"
    body: Annotated[
        Body, Option("Kind of request; auto: images if the model takes them, else tensors.", group="Requests")
    ] = "auto"
    images: Annotated[
        Path | None,
        Option("Folder of images to send in turn, with its subfolders; default: Convoy's own.", group="Requests"),
    ] = None
    deadline_ms: Annotated[
        float | None, Option("Deadline to send with each request, in milliseconds.", group="Requests")
    ] = None
    arrivals: Annotated[Arrivals, Option("Open loop: distribution of arrivals.", group="Load")] = "poisson"
    burst_on_s: Annotated[float, Option("Seconds of each burst.", name="--burst-on", group="Load")] = 1.0
    burst_off_s: Annotated[float, Option("Seconds between bursts.", name="--burst-off", group="Load")] = 1.0
    connections: Annotated[int, Option("Open loop: most connections.", group="Load")] = 512
    processes: Annotated[
        int | None,
        Option("Processes that send requests: auto or a number.", read=_count_of, typed_default="auto", group="Load"),
    ] = None
    timeout_s: Annotated[
        float, Option("Seconds after which a request counts as lost.", name="--timeout", group="Requests")
    ] = 10.0
    seed: Annotated[int, Option("Seed of arrivals and random tensors.", group="Load")] = 0
    report_file: Annotated[Path | None, Option("HTML report to write.", name="--report", group="Output")] = None
    json_file: Annotated[Path | None, Option("JSON file for all measurements.", name="--json", group="Output")] = None
    csv_file: Annotated[
        Path | None, Option("CSV file with one row per run, step or probe.", name="--csv", group="Output")
    ] = None
    api_key: str | None = None
    tls: ClientTls | None = None

    def __post_init__(self) -> None:
        self._check_mode()
        for rate in self.rates:
            self._check_positive("--steps" if self.steps else "--rate", rate)
        self._check_positive("--slo-ms", self.slo_ms)
        self._check_positive("--deadline-ms", self.deadline_ms)
        self._check_positive("--duration", self.duration_s)
        self._check_positive("--timeout", self.timeout_s)
        self._check_positive("--burst-on", self.burst_on_s)
        self._check_positive("--burst-off", self.burst_off_s)
        self._check_choices()
        self._check_bounds()

    def _check_mode(self) -> None:
        given = {
            "--rate": self.rate is not None,
            "--steps": bool(self.steps),
            "--concurrency": self.concurrency is not None,
            "--find-capacity": self.find_capacity,
        }
        modes = [name for name, is_given in given.items() if is_given]
        if len(modes) > 1:
            raise UsageError(f"{' and '.join(modes)} are different kinds of load; give only one of them")
        if self.find_capacity and self.slo_ms is None:
            raise UsageError("--find-capacity needs --slo-ms: the latency within which an answer is good")
        if self.find_capacity and self.arrivals != "poisson":
            raise UsageError("--find-capacity sends Poisson arrivals; leave --arrivals out, or use --steps")
        if self.arrivals == "bursts" and not self.rates:
            raise UsageError("--arrivals bursts needs --rate, the mean over bursts and pauses")

    @staticmethod
    def _check_positive(name: str, value: float | None) -> None:
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise UsageError(f"{name} must be a number above 0, not {value}")

    def _check_choices(self) -> None:
        for name, value, choices in (
            ("--body", self.body, get_args(Body)),
            ("--arrivals", self.arrivals, get_args(Arrivals)),
            ("--protocol", self.protocol, get_args(Wire)),
        ):
            if value not in choices:
                raise UsageError(f"{name} must be {', '.join(choices[:-1])} or {choices[-1]}, not {value!r}")
        for name, file in (("--json", self.json_file), ("--csv", self.csv_file), ("--report", self.report_file)):
            if file is not None and not file.absolute().parent.is_dir():
                raise UsageError(f"{name} {file}: the folder does not exist; create it or choose another")
            if file is not None and file.is_dir():
                raise UsageError(f"{name} {file} is a folder; give the name of a file")
        if self.images is not None and (self.body not in ("auto", "image") or self.protocol == "grpc"):
            raise UsageError("--images are sent to /predictions over HTTP; leave --body and --protocol out")
        if self.images is not None and not self.images.is_dir():
            raise UsageError(f"--images {self.images} is not a folder; give one with images in it")
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.isprintable()):
            raise UsageError("the API key has characters that an HTTP header cannot carry; check the file it came from")

    def _check_bounds(self) -> None:
        if self.total_s > MAX_DURATION_S:
            raise UsageError(f"--duration must be at most {MAX_DURATION_S:.0f} seconds, not {self.total_s:g}")
        if self.warm_up_s is not None and not 0 <= self.warm_up_s < self.duration_s:
            raise UsageError(f"--warm-up must be at least 0 and below the duration of {self.duration_s:g} s")
        for name, value, most in (
            ("--concurrency", self.concurrency, MAX_CONNECTIONS),
            ("--connections", self.connections, MAX_CONNECTIONS),
            ("--processes", self.processes, MAX_PROCESSES),
        ):
            if value is not None and not 1 <= value <= most:
                raise UsageError(f"{name} must be from 1 to {most}, not {value}")
        if sum(self.rates) * self.duration_s > MAX_REQUESTS:
            raise UsageError(
                f"{max(self.rates):g} requests/s for {self.total_s:g} s are more than {MAX_REQUESTS} requests; "
                "lower the rate or the duration"
            )

    @property
    def rates(self) -> tuple[float, ...]:
        """The rates of the open loop in order; empty in a closed loop."""
        return self.steps or (() if self.rate is None else (self.rate,))

    @property
    def clients(self) -> int | None:
        """The number of clients of the closed loop; None in an open loop."""
        if self.rates:
            return None
        return self.concurrency or DEFAULT_CONCURRENCY

    @property
    def total_s(self) -> float:
        """The duration of all steps."""
        return self.duration_s * max(1, len(self.steps))

    @property
    def peak_rate(self) -> float | None:
        """The highest rate of the generator; None in a closed loop."""
        if not self.rates:
            return None
        is_bursty = self.arrivals == "bursts"
        return max(self.rates) * ((self.burst_on_s + self.burst_off_s) / self.burst_on_s if is_bursty else 1)

    @property
    def warm_up_cut_s(self) -> float:
        """The seconds that are left out at the start, fixed before the run."""
        if self.warm_up_s is not None:
            return self.warm_up_s
        return min(1.0, 0.1 * self.duration_s)


def _rates_of(text: str | None) -> tuple[float, ...]:
    if text is None:
        return ()
    try:
        return tuple(float(word) for word in text.split(","))
    except ValueError:
        raise UsageError(f"--steps must be rates such as 100,200,400, not {text!r}") from None


def _count_of(text: str) -> int | None:
    if text == "auto":
        return None
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"--processes must be auto or a number, not {text!r}") from None
