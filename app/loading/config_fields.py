"""Every field of Triton's ModelConfig, and its effect in a `config.pbtxt`.

Unknown fields, such as those of a newer protobuf, are refused, because their meaning is unknown.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

# "honoured": it is followed, and values that cannot be followed are refused. "harmless": no answer depends on it, and
# the debug log says that it has no effect. "refused": the model would answer differently than its author intends.
Use = Literal["honoured", "harmless", "refused"]


@dataclass(frozen=True, slots=True)
class FieldRow:
    """Fields of one message, "" for the configuration itself, with the same use for the same reason."""

    inside: str
    names: str
    use: Use
    why: str

    @property
    def paths(self) -> tuple[str, ...]:
        """The fields, each by its full path."""
        return tuple(f"{self.inside}.{name}" if self.inside else name for name in self.names.split())


ROWS: tuple[FieldRow, ...] = (
    FieldRow("", "name", "honoured", "must be the name of the model's folder, or left out"),
    FieldRow("", "platform backend", "honoured", "`onnxruntime_onnx`, `onnxruntime`, or left out"),
    FieldRow("", "runtime", "refused", "Convoy loads no backend libraries; remove it"),
    FieldRow(
        "",
        "version_policy version_policy.latest version_policy.latest.num_versions version_policy.all "
        "version_policy.specific version_policy.specific.versions",
        "honoured",
        "takes precedence over `--version-policy`, also for bundles; a load request takes precedence over both",
    ),
    FieldRow(
        "",
        "max_batch_size",
        "honoured",
        "0 if it is left out, which turns batching off",
    ),
    FieldRow("", "input output", "honoured", "must be in the graph; its other tensors are served, too"),
    FieldRow(
        "",
        "input.name input.data_type input.dims output.name output.data_type output.dims",
        "honoured",
        "must agree with the graph; -1 takes the graph's size",
    ),
    FieldRow(
        "",
        "input.reshape input.reshape.shape output.reshape output.reshape.shape",
        "honoured",
        "must equal `dims`; otherwise remove it and set `dims` to the graph's shape",
    ),
    FieldRow("output", "label_filename", "honoured", "labels of this output, from a file in the model's folder"),
    FieldRow("input", "format", "harmless", "the layout follows from `dims`"),
    FieldRow("input", "optional", "refused", "requests must contain every input; remove it"),
    FieldRow("input", "allow_ragged_batch", "refused", "only requests of equal shapes share a batch; remove it"),
    FieldRow(
        "",
        "input.is_shape_tensor input.is_non_linear_format_io output.is_shape_tensor output.is_non_linear_format_io",
        "refused",
        "only for TensorRT plans; remove it",
    ),
    FieldRow(
        "",
        "batch_input batch_input.kind batch_input.target_name batch_input.data_type batch_input.source_input",
        "refused",
        "the server computes no inputs; compute it in the graph",
    ),
    FieldRow(
        "",
        "batch_output batch_output.target_name batch_output.kind batch_output.source_input",
        "refused",
        "outputs are split by rows; give each row its own output in the graph",
    ),
    FieldRow(
        "",
        "optimization optimization.graph optimization.graph.level optimization.priority optimization.cuda "
        "optimization.cuda.graphs optimization.cuda.busy_wait_events optimization.cuda.graph_spec "
        "optimization.cuda.graph_spec.batch_size optimization.cuda.graph_spec.input "
        "optimization.cuda.graph_spec.input.dim optimization.cuda.graph_spec.graph_lower_bound "
        "optimization.cuda.graph_spec.graph_lower_bound.batch_size "
        "optimization.cuda.graph_spec.graph_lower_bound.input optimization.cuda.graph_spec.graph_lower_bound.input.dim "
        "optimization.cuda.output_copy_stream optimization.execution_accelerators "
        "optimization.execution_accelerators.gpu_execution_accelerator "
        "optimization.execution_accelerators.gpu_execution_accelerator.name "
        "optimization.execution_accelerators.gpu_execution_accelerator.parameters "
        "optimization.execution_accelerators.cpu_execution_accelerator "
        "optimization.execution_accelerators.cpu_execution_accelerator.name "
        "optimization.execution_accelerators.cpu_execution_accelerator.parameters optimization.input_pinned_memory "
        "optimization.input_pinned_memory.enable optimization.output_pinned_memory "
        "optimization.output_pinned_memory.enable optimization.gather_kernel_buffer_threshold "
        "optimization.eager_batching",
        "harmless",
        "the server picks the fastest correct engine; see `--engine`",
    ),
    FieldRow("", "dynamic_batching", "honoured", "batching is always dynamic, with or without it"),
    FieldRow(
        "dynamic_batching", "priority_levels default_priority_level", "honoured", "see [priority](protocol.md#priority)"
    ),
    FieldRow(
        "dynamic_batching",
        "preferred_batch_size max_queue_delay_microseconds",
        "harmless",
        "the scheduler decides from measured latencies",
    ),
    FieldRow(
        "dynamic_batching",
        "preserve_ordering",
        "harmless",
        "responses on a stream always keep the order of its requests",
    ),
    FieldRow(
        "dynamic_batching",
        "default_queue_policy default_queue_policy.timeout_action default_queue_policy.default_timeout_microseconds "
        "default_queue_policy.allow_timeout_override default_queue_policy.max_queue_size priority_queue_policy "
        "priority_queue_policy.timeout_action priority_queue_policy.default_timeout_microseconds "
        "priority_queue_policy.allow_timeout_override priority_queue_policy.max_queue_size",
        "harmless",
        "set `default_timeout_ms` and `max_queue` of the server or under `models`",
    ),
    FieldRow(
        "",
        "sequence_batching sequence_batching.direct sequence_batching.direct.max_queue_delay_microseconds "
        "sequence_batching.direct.minimum_slot_utilization sequence_batching.oldest "
        "sequence_batching.oldest.max_candidate_sequences sequence_batching.oldest.preferred_batch_size "
        "sequence_batching.oldest.max_queue_delay_microseconds sequence_batching.oldest.preserve_ordering "
        "sequence_batching.max_sequence_idle_microseconds sequence_batching.control_input "
        "sequence_batching.control_input.name sequence_batching.control_input.control "
        "sequence_batching.control_input.control.kind sequence_batching.control_input.control.int32_false_true "
        "sequence_batching.control_input.control.fp32_false_true "
        "sequence_batching.control_input.control.bool_false_true "
        "sequence_batching.control_input.control.data_type sequence_batching.state sequence_batching.state.input_name "
        "sequence_batching.state.output_name sequence_batching.state.data_type sequence_batching.state.dims "
        "sequence_batching.state.initial_state sequence_batching.state.initial_state.data_type "
        "sequence_batching.state.initial_state.dims sequence_batching.state.initial_state.zero_data "
        "sequence_batching.state.initial_state.data_file sequence_batching.state.initial_state.name "
        "sequence_batching.state.use_same_buffer_for_input_output sequence_batching.state.use_growable_memory "
        "sequence_batching.iterative_sequence",
        "refused",
        "models keep no state between requests; return the state as an output and take it as an input",
    ),
    FieldRow(
        "",
        "ensemble_scheduling ensemble_scheduling.step ensemble_scheduling.step.model_name "
        "ensemble_scheduling.step.model_version ensemble_scheduling.step.input_map ensemble_scheduling.step.output_map "
        "ensemble_scheduling.step.model_namespace ensemble_scheduling.max_inflight_requests",
        "refused",
        "models are not chained; join the graphs into one ONNX file (onnx.compose), or export with --preprocess, which "
        "decodes and normalises images",
    ),
    FieldRow(
        "",
        "instance_group instance_group.name instance_group.kind instance_group.count instance_group.rate_limiter "
        "instance_group.rate_limiter.resources instance_group.rate_limiter.resources.name "
        "instance_group.rate_limiter.resources.global instance_group.rate_limiter.resources.count "
        "instance_group.rate_limiter.priority instance_group.gpus instance_group.secondary_devices "
        "instance_group.secondary_devices.kind instance_group.secondary_devices.device_id instance_group.profile "
        "instance_group.passive instance_group.host_policy",
        "harmless",
        "every GPU serves; set `instances` under `models`",
    ),
    FieldRow("", "default_model_filename", "honoured", "file in the version's folder; `model.onnx` by default"),
    FieldRow(
        "",
        "cc_model_filenames",
        "refused",
        "one file serves on every device; name it with `default_model_filename`",
    ),
    FieldRow(
        "",
        "parameters parameters.string_value",
        "honoured",
        "`convoy_rows_are_independent` (above); those of other backends are ignored",
    ),
    FieldRow(
        "",
        "model_warmup model_warmup.name model_warmup.batch_size model_warmup.inputs model_warmup.inputs.data_type "
        "model_warmup.inputs.dims model_warmup.inputs.zero_data model_warmup.inputs.random_data "
        "model_warmup.inputs.input_data_file model_warmup.count",
        "harmless",
        "every batch size is run before a model serves",
    ),
    FieldRow(
        "",
        "model_operations model_operations.op_library_filename",
        "refused",
        "Convoy loads no custom operator libraries; use ONNX operators",
    ),
    FieldRow("", "model_transaction_policy", "honoured", "one response per request"),
    FieldRow("model_transaction_policy", "decoupled", "refused", "each request has one response; remove it"),
    FieldRow(
        "",
        "model_repository_agents model_repository_agents.agents model_repository_agents.agents.name "
        "model_repository_agents.agents.parameters",
        "honoured",
        "`checksum`: each `MD5:FILE` is verified before loading; other agents are refused",
    ),
    FieldRow("", "response_cache response_cache.enable", "harmless", "there is no cache; every request is computed"),
    FieldRow(
        "",
        "metric_tags model_metrics model_metrics.metric_control model_metrics.metric_control.metric_identifier "
        "model_metrics.metric_control.metric_identifier.family model_metrics.metric_control.histogram_options "
        "model_metrics.metric_control.histogram_options.buckets",
        "harmless",
        "metrics have Convoy's own labels and buckets",
    ),
)

FIELDS: dict[str, FieldRow] = {path: row for row in ROWS for path in row.paths}


def _set_fields(message: Any, inside: str = "") -> Iterator[str]:
    """The fields that are set, by their full paths; not those inside a field that is not honoured."""
    for field, value in message.ListFields():
        path = f"{inside}{field.name}"
        yield path
        row = FIELDS.get(path)
        if field.message_type is None or row is None or row.use != "honoured":
            continue
        is_map = field.message_type.GetOptions().map_entry
        values = value.values() if is_map else value if field.is_repeated else [value]
        for one in values:
            if hasattr(one, "ListFields"):
                yield from _set_fields(one, f"{path}.")


def refused(message: Any) -> Iterator[str]:
    """What is wrong with fields that cannot be served as intended, once per field."""
    for path in dict.fromkeys(_set_fields(message)):
        if path not in FIELDS:
            yield f"{path}: Convoy does not know this field; remove it"
        elif FIELDS[path].use == "refused":
            yield f"{path}: {FIELDS[path].why.replace('`', '')}"


def harmless(message: Any) -> Iterator[str]:
    """The fields that are set and have no effect."""
    for path in dict.fromkeys(_set_fields(message)):
        if path in FIELDS and FIELDS[path].use == "harmless":
            yield f"{path} has no effect: {FIELDS[path].why}"
