"""One build as plain as can be, with the installed TensorRT for RTX or the fake one: what is logged and told."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any


def collecting(trt: Any) -> Any:
    class Logger(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.heard: list[tuple[str, str]] = []

        def log(self, severity: Any, msg: str) -> None:
            self.heard.append((severity.name, msg))

        def errors(self) -> list[str]:
            return [text for severity, text in self.heard if severity == "ERROR"]

    logger = Logger()
    _kept.append(logger)
    return logger


# For good: the real library goes on telling the first one that it was given, and does not keep it alive.
_kept: list[Any] = []


class Build:
    """Builds one graph and keeps what the monitor is told; `stops_at` is the step at which it says no."""

    def __init__(
        self,
        trt: Any,
        onnx: Path,
        stops_at: int | None = None,
        verbosity: str = "DETAILED",
        configure: Callable[[Any, Any], None] = lambda trt, config: None,
    ) -> None:
        self.told: list[tuple[Any, ...]] = []
        self.logger = collecting(trt)
        builder = trt.Builder(self.logger)
        network = builder.create_network(0)
        parser = trt.OnnxParser(network, self.logger)
        assert parser.parse_from_file(str(onnx))
        config = builder.create_builder_config()
        config.profiling_verbosity = getattr(trt.ProfilingVerbosity, verbosity)
        configure(trt, config)
        profile = builder.create_optimization_profile()
        for index in range(network.num_inputs):
            tensor = network.get_input(index)
            rest = tuple(tensor.shape)[1:]
            profile.set_shape(tensor.name, (1, *rest), (8, *rest), (8, *rest))
        config.add_optimization_profile(profile)
        monitor = self._monitor(trt, stops_at)
        config.progress_monitor = monitor
        self.plan = builder.build_serialized_network(network, config)

    def _monitor(self, trt: Any, stops_at: int | None) -> Any:
        told = self.told

        class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
            def __init__(self) -> None:
                trt.IProgressMonitor.__init__(self)

            def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
                told.append(("start", phase_name, parent_phase, num_steps))

            def step_complete(self, phase_name: str, step: int) -> bool:
                told.append(("step", phase_name, step))
                return sum(event[0] == "step" for event in told) != stops_at

            def phase_finish(self, phase_name: str) -> None:
                told.append(("finish", phase_name))

        return Monitor()
