"""This process: CPU time, memory, descriptors, as Linux counts them.

`process_*`, which every Prometheus client has, and `convoy_process_*` have the same figures; the latter are older and
stay for one version.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


class ProcessMetrics(Collector):
    """`dropped_lines` are those of the log that were not read in time."""

    def __init__(self, dropped_lines: Callable[[], int]) -> None:
        self._dropped_lines = dropped_lines

    def collect(self) -> Iterable[Metric]:
        yield from ProcessCollector(registry=None).collect()
        told = "Lines of the log that were dropped, because nobody read the earlier ones"
        yield CounterMetricFamily("convoy_log_lines_dropped", told, value=self._dropped_lines())
        for own in ProcessCollector("convoy", registry=None).collect():
            kind = CounterMetricFamily if own.type == "counter" else GaugeMetricFamily
            (sample,) = own.samples
            told = f"Older, and stays for one version: {sample.name.removeprefix('convoy_')} is the same"
            family = kind(own.name, told, labels=("process",))
            family.add_sample(sample.name, {"process": "core"}, sample.value)
            yield family
