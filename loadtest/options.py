"""What a run of the load test is asked to do, checked once, at birth.

Knows the options' meanings, defaults and limits. Knows nothing of the command line they come from or of
the network.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from models.errors import UsageError

Body = Literal["auto", "image", "binary", "json"]
Arrivals = Literal["poisson", "constant"]

DEFAULT_CONCURRENCY = 16
MAX_REQUESTS = 5_000_000  # 26 bytes of record each, so that a run's memory has a bound
MAX_CONNECTIONS = 10_000
MAX_DURATION_S = 86_400.0


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """One load test.

    `rate` (requests per second) makes an open loop: requests are sent when the schedule says so, whether
    or not earlier ones were answered. `concurrency` makes a closed loop: that many clients, each sending
    its next request when the last one was answered. Neither given: closed, with 16 clients.

    `slo_ms` is the latency within which an answer counts as good for goodput. `warm_up_s` is cut off the
    front of the measurement; None means a tenth of the duration, at most one second. `connections` is the
    open loop's limit of open connections. `timeout_s` is how long a request may take before it counts as
    lost. Raises UsageError.
    """

    url: str = "http://127.0.0.1:8000"
    model: str | None = None
    rate: float | None = None
    concurrency: int | None = None
    slo_ms: float | None = None
    duration_s: float = 10.0
    warm_up_s: float | None = None
    body: Body = "auto"
    json_file: Path | None = None
    api_key: str | None = None
    connections: int = 512
    timeout_s: float = 10.0
    arrivals: Arrivals = "poisson"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.rate is not None and self.concurrency is not None:
            raise UsageError("give --rate (open loop) or --concurrency (closed loop), not both")
        self._check_positive("--rate", self.rate)
        self._check_positive("--slo-ms", self.slo_ms)
        self._check_positive("--duration", self.duration_s)
        self._check_positive("--timeout", self.timeout_s)
        self._check_choices()
        self._check_bounds()

    @staticmethod
    def _check_positive(name: str, value: float | None) -> None:
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise UsageError(f"{name} must be a number above 0, not {value}")

    def _check_choices(self) -> None:
        if self.body not in ("auto", "image", "binary", "json"):
            raise UsageError(f"--body must be auto, image, binary or json, not {self.body!r}")
        if self.arrivals not in ("poisson", "constant"):
            raise UsageError(f"--arrivals must be poisson or constant, not {self.arrivals!r}")
        if self.json_file is not None and not self.json_file.absolute().parent.is_dir():
            raise UsageError(f"--json {self.json_file}: the folder does not exist; create it or choose another")
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.isprintable()):
            raise UsageError("the API key has characters that an HTTP header cannot carry; check the file it came from")

    def _check_bounds(self) -> None:
        if self.duration_s > MAX_DURATION_S:
            raise UsageError(f"--duration must be at most {MAX_DURATION_S:.0f} seconds, not {self.duration_s:g}")
        if self.warm_up_s is not None and not 0 <= self.warm_up_s < self.duration_s:
            raise UsageError(f"--warm-up must be at least 0 and below the duration of {self.duration_s:g} s")
        for name, value in (("--concurrency", self.concurrency), ("--connections", self.connections)):
            if value is not None and not 1 <= value <= MAX_CONNECTIONS:
                raise UsageError(f"{name} must be from 1 to {MAX_CONNECTIONS}, not {value}")
        if self.rate is not None and self.rate * self.duration_s > MAX_REQUESTS:
            raise UsageError(
                f"--rate {self.rate:g} for {self.duration_s:g} s is more than {MAX_REQUESTS} requests; "
                "lower the rate or the duration"
            )

    @property
    def clients(self) -> int | None:
        """The closed loop's number of clients; None in an open loop."""
        if self.rate is not None:
            return None
        return self.concurrency or DEFAULT_CONCURRENCY

    @property
    def warm_up_cut_s(self) -> float:
        """How much is cut off the front, fixed before anything is measured."""
        if self.warm_up_s is not None:
            return self.warm_up_s
        return min(1.0, 0.1 * self.duration_s)
