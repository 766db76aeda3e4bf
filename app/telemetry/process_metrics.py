"""The processes of this server: CPU time, memory, descriptors, as Linux counts them.

`process_*`, which every Prometheus client has, is the process that answers: the core's. `convoy_process_*` has the same
figures of every process, by its part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial

from prometheus_client import ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


class ProcessMetrics(Collector):
    """`processes` gives their numbers (PIDs) by name; one that has just ended has no series.

    `dropped_lines` are those of this process's log that nobody read in time.
    """

    def __init__(self, processes: Callable[[], Mapping[str, int]], dropped_lines: Callable[[], int]) -> None:
        self._processes, self._dropped_lines = processes, dropped_lines

    def collect(self) -> Iterable[Metric]:
        yield from ProcessCollector(registry=None).collect()
        told = "Lines of the log that were dropped, because nobody read the earlier ones"
        yield CounterMetricFamily("convoy_log_lines_dropped", told, value=self._dropped_lines())
        found: dict[str, Metric] = {}
        for process, pid in self._processes().items():
            for own in ProcessCollector("convoy", partial(str, pid), registry=None).collect():
                kind = CounterMetricFamily if own.type == "counter" else GaugeMetricFamily
                family = found.setdefault(own.name, kind(own.name, own.documentation, labels=("process",)))
                family.add_sample(own.samples[0].name, {"process": process}, own.samples[0].value)
        yield from found.values()
