"""One build: configuration, network, kernels, and the inspection of the result."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from convoy.app.engines.tensorrt_library import collecting_logger, explained
from convoy.export.tensorrt.audit import check_audit, read_audit, read_listing, says_nothing
from convoy.export.tensorrt.network import add_profiles, parse
from convoy.export.tensorrt.watch import BuildWatch, progress_monitor
from convoy.models.errors import JobError
from convoy.models.plans import BuildOptions, PlanAudit


@dataclass(frozen=True, slots=True)
class Tuned:
    """The result of a build: the engine's bytes, or why there are none; and all known kernel times.

    `layers` is the builder's list of the engine's layers; empty if it gives none.
    """

    data: bytes | None
    problem: str
    timing: bytes | None
    shapes: dict[str, tuple[int, ...]]
    warnings: tuple[str, ...] = ()
    layers: str = ""


@dataclass(frozen=True, slots=True)
class Inspected:
    """The finished engine's description of itself; `scratch_bytes` is per profile, empty without a device."""

    scratch_bytes: tuple[int, ...]
    audit: PlanAudit | None


def tune(
    trt: Any,
    onnx: Path,
    options: BuildOptions,
    capabilities: tuple[str, ...],
    timing: bytes | None,
    watch: BuildWatch,
    *,
    workspace_mb: int | None = None,
) -> Tuned:
    """Let TensorRT choose and time kernels. `timing` has the times of earlier builds, or is empty; None measures
    nothing.

    Kernels may use `workspace_mb` MiB of scratch memory; None means all there is. `capabilities` are for a library that
    builds for devices that are not here; empty leaves the choice to the library. A failed build is returned and not
    raised, so that its measurements can be kept.

    Raises JobError if the network cannot be built at all.
    """
    logger = collecting_logger(trt)
    builder = _builder(trt, logger)
    watch.start("parse ONNX", None, 1)
    network, parser = parse(trt, builder, logger, onnx)
    watch.finish("parse ONNX")
    watch.check()
    config = _configured(trt, builder, options, workspace_mb)
    _name_targets(trt, config, capabilities)
    shapes = add_profiles(builder, config, network, options)
    monitor = progress_monitor(trt, watch)
    config.progress_monitor = monitor
    times = _use_timing(config, timing, watch) if timing is not None else None
    memory = builder.build_serialized_network(network, config)
    data = None if memory is None else bytes(memory)
    kept = None if times is None else bytes(config.get_timing_cache().serialize())
    # The builder does not keep these alive.
    del parser, monitor, times
    warnings = tuple(dict.fromkeys(logger.warnings))
    return Tuned(data, explained(logger.errors), kept, shapes, warnings, logger.layers)


def inspect(trt: Any, data: bytes, options: BuildOptions, shapes: dict[str, tuple[int, ...]], name: str) -> Inspected:
    """Load the engine and count its layers. Raises JobError if it is not what `options` ask for."""
    logger = collecting_logger(trt)
    runtime = trt.Runtime(logger)
    engine = runtime.deserialize_cuda_engine(data)
    if engine is None:
        raise JobError(f"{name}: the finished engine does not load: {explained(logger.errors)}")
    inspector = engine.create_engine_inspector()
    audit = read_audit(inspector.get_engine_information(trt.LayerInformationFormat.JSON))
    if says_nothing(audit):
        audit = _audit_with_shapes(trt, engine, inspector, options.batch_sizes[0], shapes)
    check_audit(audit, options.precision, name)
    profiles = range(len(options.batch_sizes) if options.profiles == "each" else 1)
    return Inspected(tuple(engine.get_device_memory_size_for_profile_v2(index) for index in profiles), audit)


def as_listed(layers: str, options: BuildOptions, name: str) -> Inspected:
    """The same from the builder's list, without a device to load the engine on. Raises JobError as well."""
    audit = read_listing(layers)
    if audit is not None:
        check_audit(audit, options.precision, name)
    return Inspected((), audit)


def _builder(trt: Any, logger: Any) -> Any:
    try:
        return trt.Builder(logger)
    except (RuntimeError, TypeError) as error:  # what the bindings make of a null pointer: no driver, no device
        raise JobError(f"TensorRT cannot start on this GPU: {explained(logger.errors)}") from error


def _configured(trt: Any, builder: Any, options: BuildOptions, workspace_mb: int | None) -> Any:
    config = builder.create_builder_config()
    # On by default, and only nominally FP32: what the accuracy gate proved in FP32 must run in FP32.
    config.clear_flag(trt.BuilderFlag.TF32)
    # Without it the inspector only reports names, and the audit nothing.
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    if workspace_mb is not None:
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, workspace_mb << 20)
    if options.hardware_compatibility == "same_compute_capability":
        config.hardware_compatibility_level = trt.HardwareCompatibilityLevel.SAME_COMPUTE_CAPABILITY
    return config


def _name_targets(trt: Any, config: Any, capabilities: tuple[str, ...]) -> None:
    """Raise JobError if the library does not accept this combination."""
    if not capabilities:
        return
    config.num_compute_capabilities = len(capabilities)
    for index, capability in enumerate(capabilities):
        named = getattr(trt.ComputeCapability, f"SM{capability.replace('.', '')}")
        if not config.set_compute_capability(named, index):
            raise JobError(f"TensorRT does not build for {', '.join(capabilities)} in one plan; ask for fewer targets")


def _use_timing(config: Any, known: bytes, watch: BuildWatch) -> Any:
    """The timing cache in use, from known times or empty; None if TensorRT accepts neither."""
    for times in dict.fromkeys((known, b"")):
        cache = config.create_timing_cache(times)
        if cache is not None and config.set_timing_cache(cache, False):
            return cache
        if times:
            watch.note("the timing cache is from another TensorRT or device; a new one is begun")
    watch.note("TensorRT takes no timing cache; the next build will be no faster")
    return None


def _audit_with_shapes(
    trt: Any, engine: Any, inspector: Any, batch: int, shapes: dict[str, tuple[int, ...]]
) -> PlanAudit:
    # A context without memory: it only gives the inspector the first profile's shapes.
    context = engine.create_execution_context(trt.ExecutionContextAllocationStrategy.USER_MANAGED)
    for name, shape in shapes.items():
        context.set_input_shape(name, (batch, *shape[1:]))
    inspector.execution_context = context
    return read_audit(inspector.get_engine_information(trt.LayerInformationFormat.JSON))
