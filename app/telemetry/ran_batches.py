"""What is counted of batches that ran: a record of each, and those of a version together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from convoy.app.batch import StageTimes


@dataclass(slots=True, eq=False)
class BatchRecord:
    """`samples` were wanted, `padded` were computed on the device. `queued_ns` has how long each request waited.

    `total_ns` is the sum over all of them since they arrived, until `ended_ns`, when their answers were there, on the
    clock of `time.monotonic_ns`.
    """

    device: str
    samples: int
    padded: int
    times: StageTimes
    queued_ns: list[int]
    total_ns: int
    ended_ns: int


@dataclass(slots=True, eq=False)
class StageSums:
    """Nanoseconds in each stage, of `count` batches; or of `count` requests, for each of which its batch counts."""

    count: int = 0
    copy_in_ns: int = 0
    compute_ns: int = 0
    copy_out_ns: int = 0

    def add(self, times: StageTimes, count: int) -> None:
        """So many took that long each."""
        self.count += count
        self.copy_in_ns += times.copy_in_ns * count
        self.compute_ns += times.compute_ns * count
        self.copy_out_ns += times.copy_out_ns * count


class RanBatches:
    """Some batches of one version: in lists what each of them took, and sums.

    `for_requests` counts a batch once for each of its requests, `by_size` once.
    """

    def __init__(self, records: Sequence[BatchRecord]) -> None:
        self.samples: list[int] = []
        self.copy_in_ns: list[int] = []
        self.compute_ns: list[int] = []
        self.copy_out_ns: list[int] = []
        self.queued_ns: list[int] = []  # of each request
        self.padding = self.total_ns = self.ended_ns = 0
        self.for_requests = StageSums()
        self.by_size: dict[int, StageSums] = {}
        self.compute_ns_by_device: dict[str, int] = {}
        for one in records:
            samples, times, device = one.samples, one.times, one.device
            self.samples.append(samples)
            self.copy_in_ns.append(times.copy_in_ns)
            self.compute_ns.append(times.compute_ns)
            self.copy_out_ns.append(times.copy_out_ns)
            self.queued_ns.extend(one.queued_ns)
            self.padding += one.padded - samples
            self.total_ns += one.total_ns
            self.ended_ns = max(self.ended_ns, one.ended_ns)
            self.for_requests.add(times, len(one.queued_ns))
            self.by_size.setdefault(samples, StageSums()).add(times, 1)
            self.compute_ns_by_device[device] = self.compute_ns_by_device.get(device, 0) + times.compute_ns
