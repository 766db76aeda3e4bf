"""INT8 for the CPU: the fp32 graph with quantise-dequantise pairs and ranges measured on real images.

Knows onnxruntime's quantiser and what suits x86: asymmetric U8 activations with S8 weights per channel, the
pairing whose kernels are tuned. Knows nothing of accuracy; `verify` and `assemble` judge the result.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from app.engines.cpu import has_int8_dot_product
from export.data import ImageSet
from export.progress import Progress
from export.torch_job import INPUT_NAME, one_line
from models.errors import JobError

_CHUNK_IMAGES = 16
# The front is arithmetic on bytes that came in as bytes: rounding its results again would only lose.
_FRONT_OPS = frozenset({"Transpose", "Cast", "Mul", "Add"})


def quantize_for_cpu(fp32: Path, target: Path, calibration: ImageSet, progress: Progress) -> None:
    """Write `target`, the U8S8 form of `fp32`, with ranges from min-max calibration.

    Without 8-bit dot products x86 adds pairs of products in 16 bits, which saturates; there, weights
    get 7 bits. Raises JobError when the graph cannot be quantised or the disk is full.
    """
    prepared = target.with_suffix(".prepared.onnx")
    with _quiet(), progress.step("calibrate int8", len(calibration.samples)) as step:
        chunks = ({INPUT_NAME: chunk.images} for chunk in calibration.chunks(step, _CHUNK_IMAGES))
        try:
            _quantize(fp32, prepared, target, chunks)
        except (OSError, JobError):
            raise
        except Exception as error:  # onnxruntime's and onnx's errors share no base class
            raise JobError(
                f"int8 cannot be made of this network ({one_line(str(error))}); pass --precisions fp32"
            ) from error
        finally:
            prepared.unlink(missing_ok=True)


def _quantize(fp32: Path, prepared: Path, target: Path, chunks: Iterator[dict[str, np.ndarray]]) -> None:
    import onnx
    from onnxruntime import quantization
    from onnxruntime.quantization.shape_inference import quant_pre_process

    # Folds and fuses first, so that a range is measured where a rounding will be. The shapes are already known.
    quant_pre_process(str(fp32), str(prepared), skip_symbolic_shape=True)
    quantization.quantize_static(
        str(prepared),
        str(target),
        _reader(chunks),
        quant_format=quantization.QuantFormat.QDQ,
        activation_type=quantization.QuantType.QUInt8,
        weight_type=quantization.QuantType.QInt8,
        per_channel=True,
        reduce_range=not has_int8_dot_product(),
        calibrate_method=quantization.CalibrationMethod.MinMax,
        nodes_to_exclude=front_nodes(onnx.load(str(prepared)).graph),
        extra_options={
            "ActivationSymmetric": False,
            "WeightSymmetric": True,
            # Logits in 256 steps tie and swap; the kernel gives them in float at the same price.
            "OpTypesToExcludeOutputQuantization": ["Gemm"],
        },
    )


def front_nodes(graph: Any) -> list[str]:
    """The names of the nodes between the uint8 input and the network proper, in order.

    They are the chain from the input through operators of the front, each the only reader of the one
    before. Empty for a graph whose input is float already.
    """
    import onnx

    if graph.input[0].type.tensor_type.elem_type != onnx.TensorProto.UINT8:
        return []
    names: list[str] = []
    tensor = graph.input[0].name
    while True:
        readers = [node for node in graph.node if tensor in node.input]
        if len(readers) != 1 or readers[0].op_type not in _FRONT_OPS:
            return names
        names.append(readers[0].name)
        tensor = readers[0].output[0]


def _reader(chunks: Iterator[dict[str, np.ndarray]]) -> Any:
    """The chunks as onnxruntime wants them: one at a time, so that only one is ever in memory."""
    from onnxruntime.quantization import CalibrationDataReader

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        def get_next(self) -> dict[str, np.ndarray] | None:
            return next(chunks, None)

    return Reader()


@contextmanager
def _quiet() -> Iterator[None]:
    """Hold back the quantiser's advice, which goes to the root logger and is about calls the user did not make."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
