"""An ONNX file as a TensorRT network, and its batch sizes as profiles.

The network is strongly typed: every type comes from the graph.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from convoy.app.engines.tensorrt_library import explained
from convoy.models.errors import FileRefused
from convoy.models.plans import BuildOptions

_MOST_ERRORS = 10


def parse(trt: Any, builder: Any, logger: Any, onnx: Path) -> tuple[Any, Any]:
    """The network, and the parser, which owns its weights and must live as long.

    Parsed by path, because external data is relative to it. Raises FileRefused with one line per problem.
    """
    network = builder.create_network(_flags(trt))
    parser = trt.OnnxParser(network, logger)
    if not parser.parse_from_file(str(onnx)):
        raise FileRefused(_problems(parser, logger, onnx))
    return network, parser


def add_profiles(builder: Any, config: Any, network: Any, options: BuildOptions) -> dict[str, tuple[int, ...]]:
    """Add one profile per batch size, min = opt = max, so that kernels are chosen for that size; or one for all.

    Returns the inputs' shapes, with -1 for the batch. Raises FileRefused for a shape that cannot be batched.
    """
    batch_sizes = options.batch_sizes
    shapes = {tensor.name: _batched(tensor) for tensor in map(network.get_input, range(network.num_inputs))}
    for name, shape in shapes.items():
        if shape[0] >= 0 and batch_sizes != (shape[0],):
            raise FileRefused(
                f"the first size of input {name!r} is fixed at {shape[0]}, where a plan needs batches of "
                f"{', '.join(map(str, batch_sizes))}; make it a dynamic one in the ONNX file"
            )
    for least, likely, most in _ranges(options):
        profile = builder.create_optimization_profile()
        for name, shape in shapes.items():
            rest = shape[1:]
            profile.set_shape(name, (least, *rest), (likely, *rest), (most, *rest))
        config.add_optimization_profile(profile)
    return shapes


def _ranges(options: BuildOptions) -> list[tuple[int, int, int]]:
    """The smallest, the likeliest and the largest batch of each profile."""
    sizes = options.batch_sizes
    if options.profiles == "each":
        return [(size, size, size) for size in sizes]
    return [(sizes[0], sizes[len(sizes) // 2], sizes[-1])]


def _flags(trt: Any) -> int:
    # 10.x must be told; 11.x has no other mode, and may drop the name.
    flag = getattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)
    return 0 if flag is None else 1 << int(flag)


def _batched(tensor: Any) -> tuple[int, ...]:
    shape = tuple(tensor.shape)
    if tensor.is_shape_tensor or not shape:
        raise FileRefused(f"input {tensor.name!r} is not a batch of samples; TensorRT plans need inputs of [N, ...]")
    if any(size < 0 for size in shape[1:]):
        raise FileRefused(
            f"input {tensor.name!r} has shape {list(shape)}; fix all sizes but the first and export again, heights and "
            "widths by --input, as in --input 3x224x224"
        )
    return shape


def _problems(parser: Any, logger: Any, onnx: Path) -> str:
    errors = [parser.get_error(index) for index in range(parser.num_errors)]
    if not errors:
        return f"TensorRT cannot read {onnx}: {explained(logger.errors)}"
    if all(error.node() < 0 for error in errors):  # it failed before it reached a node
        why = _flat(errors[0].desc())
        return f"TensorRT cannot read {onnx} ({why}): it is damaged or lacks a file of its own; export it again"
    lines = [f"TensorRT cannot take {onnx}; change these operators in the network and export it again:"]
    lines += [_problem(parser, error) for error in errors[:_MOST_ERRORS]]
    if len(errors) > _MOST_ERRORS:
        lines.append(f"  and {len(errors) - _MOST_ERRORS} more")
    return "\n".join(lines)


def _problem(parser: Any, error: Any) -> str:
    operator = error.node_operator()
    where = f"node {error.node_name() or error.node()} ({operator})" if operator else "the graph"
    unknown = bool(operator) and not parser.supports_operator(operator)
    return f"  {where}: {'TensorRT has no such operator' if unknown else explained([_flat(error.desc())])}"


def _flat(text: str) -> str:
    return " ".join(text.split())
