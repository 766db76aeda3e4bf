"""One contract, kept by every engine: what is promised in `app/engines/base.py`."""

from __future__ import annotations

import importlib.util
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from convoy.app.engines import cpu, tensorrt
from convoy.app.engines.base import Engine, run_arrays
from convoy.app.engines.batch import BatchResult, EngineFailure, FailureScope
from convoy.app.engines.onnxruntime import OnnxRuntimeCpuEngine
from convoy.app.engines.openvino import OpenVinoEngine
from convoy.app.engines.parts import Part
from convoy.app.engines.staged import StagedEngine
from convoy.app.loading.proving import CanaryCheck
from convoy.export.proof.outcomes import relative_errors
from convoy.export.proof.verify import relative_error
from convoy.models.bundle import Canary, Precision, Variant
from convoy.models.errors import BundleError
from convoy.models.spec import NUMPY_DTYPES, TensorSpec
from convoy.models.tensors import pack, random_values, unpack
from tests.support import onnx_models
from tests.support.fake_engine import Arrays, FakeEngine
from tests.support.gpu_engines import (
    onnxruntime_on_fake,
    onnxruntime_on_gpu,
    rtx_on_fake,
    rtx_on_gpu,
    tensorrt_on_fake,
    tensorrt_on_gpu,
)
from tests.support.onnx_models import LENGTHENS, SHORTENS

MAX_BATCH = 8
NOT_IN_OPENVINO = {"INT64", "UINT64", "UINT32", "FP64", "BF16", "BYTES"}


@dataclass(frozen=True)
class Model:
    """A model in two tellings: nodes of a graph, or what `writes` its file, and the same rows in numpy."""

    name: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    nodes: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...]
    rows: Callable[[Arrays], Sequence[np.ndarray]]
    max_batch_size: int = MAX_BATCH
    writes: Callable[[Path], Path] | None = None


def echo(dtype: str, shape: tuple[int, ...] = (3,), *, max_batch_size: int = MAX_BATCH) -> Model:
    return Model(
        f"echo_{dtype}_{'x'.join(map(str, shape))}",
        (TensorSpec("x", dtype, shape),),
        (TensorSpec("y", dtype, shape),),
        (("Identity", ("x",), ("y",)),),
        lambda arrays: [arrays[0]],
        max_batch_size,
    )


ADD_SUB = Model(
    "add_sub",
    (TensorSpec("a", "INT32", (16,)), TensorSpec("b", "INT32", (16,))),
    (TensorSpec("sum", "INT32", (16,)), TensorSpec("difference", "INT32", (16,))),
    (("Add", ("a", "b"), ("sum",)), ("Sub", ("a", "b"), ("difference",))),
    lambda arrays: [arrays[0] + arrays[1], arrays[0] - arrays[1]],
)
# Its output's size is known only after the run: rows of the input's own free length, doubled.
DOUBLED = Model(
    "doubled",
    (TensorSpec("x", "FP32", (-1,)),),
    (TensorSpec("y", "FP32", (-1,)),),
    (("Concat", ("x", "x"), ("y",)),),
    lambda arrays: [np.concatenate([arrays[0], arrays[0]], axis=1)],
)
# No batch dimension: the mean over dimension 0, whatever its length.
MEAN = Model(
    "mean",
    (TensorSpec("x", "FP32", (-1, 4)),),
    (TensorSpec("y", "FP32", (1, 4)),),
    (("ReduceMean", ("x", "axes"), ("y",)),),
    lambda arrays: [arrays[0].mean(axis=0, keepdims=True)],
    max_batch_size=0,
)
# A small CNN, whose sums a kernel may order by the size of its batch.
KERNEL, WEIGHTS = (
    np.random.default_rng(seed).normal(0, 0.3, shape).astype(np.float32)
    for seed, shape in enumerate([(8, 3, 3, 3), (8, 10)])
)


def _convolved(arrays: Arrays) -> list[np.ndarray]:
    windows = np.lib.stride_tricks.sliding_window_view(arrays[0], (3, 3), axis=(2, 3))
    maps = np.maximum(np.einsum("nchwij,ocij->nohw", windows, KERNEL), 0)
    return [maps.mean(axis=(2, 3)) @ WEIGHTS]


CNN = Model(
    "cnn",
    (TensorSpec("x", "FP32", (3, 16, 16)),),
    (TensorSpec("logits", "FP32", (10,)),),
    (
        ("Conv", ("x", "kernel"), ("maps",)),
        ("Relu", ("maps",), ("positive",)),
        ("GlobalAveragePool", ("positive",), ("means",)),
        ("Flatten", ("means",), ("features",)),
        ("MatMul", ("features", "weights"), ("logits",)),
    ),
    _convolved,
)
# An embedding table: an index outside it makes the batch fail while it runs.
GATHER = Model(
    "gather",
    (TensorSpec("index", "INT64", ()),),
    (TensorSpec("row", "FP32", (4,)),),
    (("Gather", ("table", "index"), ("row",)),),
    lambda arrays: [np.arange(40, dtype=np.float32).reshape(10, 4)[arrays[0]]],
)


def varying(*, text: bool = False, gives: str = "FP32", columns: int = 10) -> Model:
    """What a row of it says decides how long all rows of its answer are."""

    def rows(arrays: Arrays) -> list[np.ndarray]:
        x, *texts = arrays
        shortens, lengthens = x.max(initial=0) > SHORTENS, x.min(initial=0) < LENGTHENS
        answer = np.concatenate([x, x], axis=1)[:, : 20 if lengthens else 4 if shortens else 10]
        return [as_text(answer) if gives == "BYTES" else answer, *texts]

    strings = (TensorSpec("text", "BYTES", (1,)),) if text else ()
    same = (TensorSpec("same", "BYTES", (1,)),) if text else ()
    return Model(
        f"varying_{text}_{gives}_{columns}",
        (TensorSpec("x", "FP32", (10,)), *strings),
        (TensorSpec("y", gives, (columns,)), *same),
        (),
        rows,
        writes=lambda path: onnx_models.varying(
            path, text=text, gives=gives, columns="columns" if columns < 0 else columns
        ),
    )


def as_text(numbers: np.ndarray) -> np.ndarray:
    texts = np.empty(numbers.shape, object)
    texts.reshape(-1)[:] = [b"%d" % int(number) for number in numbers.flat]
    return texts


def make_fake(model: Model, folder: Path) -> FakeEngine:
    engine = FakeEngine(model.inputs, model.outputs, max_batch_size=model.max_batch_size, run_rows=model.rows)
    if model is GATHER:
        engine.is_poisonous = lambda arrays: bool((arrays[0] >= 10).any())
    return engine


Opened = TypeVar("Opened", bound=StagedEngine)


def open_on_cpu(kind: type[Opened], model: Model, folder: Path, precision: Precision = "fp32") -> Opened:
    return kind(
        write_onnx(model, folder),
        inputs=model.inputs,
        outputs=model.outputs,
        max_batch_size=model.max_batch_size,
        precision=precision,
        threads=1,
    )


def make_onnxruntime(model: Model, folder: Path) -> OnnxRuntimeCpuEngine:
    return open_on_cpu(OnnxRuntimeCpuEngine, model, folder)


def make_openvino(model: Model, folder: Path) -> OpenVinoEngine:
    if importlib.util.find_spec("openvino") is None:
        pytest.skip("OpenVINO is not installed")
    specs = (*model.inputs, *model.outputs)
    if {spec.dtype for spec in specs} & NOT_IN_OPENVINO or any(spec.sample_bytes is None for spec in specs):
        pytest.skip("OpenVINO would narrow such tensors, or has no place for them")
    return open_on_cpu(OpenVinoEngine, model, folder)


def write_onnx(model: Model, folder: Path) -> Path:
    from onnx import ValueInfoProto, helper, numpy_helper

    path = folder / f"{model.name}.onnx"
    if model.writes is not None:
        return model.writes(path)

    def declared(spec: TensorSpec) -> ValueInfoProto:
        shape = tuple(f"free_{spec.name}" if size < 0 else size for size in spec.shape)
        return onnx_models.tensor(spec.name, spec.dtype, ("batch", *shape) if model.max_batch_size else shape)

    constants = {
        "axes": np.array([0], np.int64),
        "table": np.arange(40, dtype=np.float32).reshape(10, 4),
        "kernel": KERNEL,
        "weights": WEIGHTS,
    }
    used = {name for _, taken, _ in model.nodes for name in taken}
    return onnx_models.save(
        path,
        [
            helper.make_node(op, taken, given, **({"axis": 1} if op == "Concat" else {}))
            for op, taken, given in model.nodes
        ],
        [declared(spec) for spec in model.inputs],
        [declared(spec) for spec in model.outputs],
        [numpy_helper.from_array(array, name) for name, array in constants.items() if name in used],
        opset=18,
    )


def make_on_gpu(make: Callable[..., Engine], *, detects_poison: bool = True) -> Callable[[Model, Path], Engine]:
    """A maker of GPU engines, which take only what has a place in memory that is allocated once."""

    def make_engine(model: Model, folder: Path) -> Engine:
        specs = (*model.inputs, *model.outputs)
        if not tensorrt.supports(specs) and make in (tensorrt_on_fake, rtx_on_fake, tensorrt_on_gpu, rtx_on_gpu):
            pytest.skip("TensorRT has no such tensors")
        if any(spec.sample_bytes is None for spec in specs) or any(spec.dtype == "BF16" for spec in specs):
            pytest.skip("a GPU engine has no place for tensors of free size")
        if model.writes is not None:
            pytest.skip("a graph is captured, and a plan's outputs are placed, for sizes that no value changes")
        if model is GATHER and not detects_poison:
            pytest.skip("a kernel does not check its indices")
        poison = {"poisoned": True} if model is GATHER else {}
        return make(write_onnx(model, folder), model.inputs, model.outputs, model.max_batch_size, **poison)

    return make_engine


ENGINES: dict[str, Callable[[Model, Path], Engine]] = {
    "fake": make_fake,
    "onnxruntime-cpu": make_onnxruntime,
    "openvino": make_openvino,
    "onnxruntime-cuda": make_on_gpu(onnxruntime_on_fake),
    "tensorrt": make_on_gpu(tensorrt_on_fake),
    "tensorrt-rtx": make_on_gpu(rtx_on_fake),
    "onnxruntime-cuda on a GPU": make_on_gpu(onnxruntime_on_gpu, detects_poison=False),
    "tensorrt on a GPU": make_on_gpu(tensorrt_on_gpu, detects_poison=False),
    "rtx on a GPU": make_on_gpu(rtx_on_gpu, detects_poison=False),
}
NEEDS_GPU = {"onnxruntime-cuda on a GPU", "tensorrt on a GPU", "rtx on a GPU"}
Make = Callable[[Model], Engine]


@pytest.fixture(params=[pytest.param(name, marks=pytest.mark.gpu if name in NEEDS_GPU else ()) for name in ENGINES])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Make]:
    made: list[Engine] = []

    def make_engine(model: Model) -> Engine:
        made.append(ENGINES[request.param](model, tmp_path))
        made[-1].warm_up()
        return made[-1]

    yield make_engine
    for engine in made:
        engine.close()


def random_rows(model: Model, samples: int, seed: int, *, free: int = 5) -> list[np.ndarray]:
    chance = np.random.default_rng(seed)
    arrays = []
    for spec in model.inputs:
        shape = tuple(free if size < 0 else size for size in spec.shape)
        whole = (samples, *shape) if model.max_batch_size else shape
        high = 2 if spec.dtype == "BOOL" else 10
        numbers = chance.integers(0, high, whole)
        own = spec.dtype in ("BYTES", "BF16")
        arrays.append(random_values(chance, spec, whole) if own else np.asarray(numbers.astype(spec.numpy_dtype)))
    return arrays


def part_of(
    arrays: Sequence[np.ndarray], wanted: tuple[int, ...], destinations: tuple[memoryview | None, ...], samples: int
) -> Part:
    return Part(
        samples=samples,
        shapes=tuple(array.shape for array in arrays),
        inputs=tuple(memoryview(bytes_of(array)) for array in arrays),
        wanted=wanted,
        destinations=destinations,
    )


def bytes_of(array: np.ndarray) -> bytes:
    return bytes(pack(array.flat)) if array.dtype == object else array.tobytes()


def spilled_part(model: Model, arrays: Sequence[np.ndarray], wanted: tuple[int, ...] | None = None) -> Part:
    """A part whose answers go into the engine's own memory."""
    wanted = tuple(range(len(model.outputs))) if wanted is None else wanted
    samples = len(arrays[0]) if model.max_batch_size else 1
    return part_of(arrays, wanted, (None,) * len(wanted), samples)


def answers_of(model: Model, result: BatchResult, part: int, wanted: Sequence[int]) -> list[np.ndarray]:
    return [
        np.frombuffer(answer.data, model.outputs[index].numpy_dtype).reshape(answer.shape)
        for index, answer in zip(wanted, result.answers[part], strict=True)
    ]


def test_an_engine_says_what_it_is(make: Make) -> None:
    engine = make(ADD_SUB)
    assert engine.batched
    assert engine.inputs == ADD_SUB.inputs
    assert engine.outputs == ADD_SUB.outputs
    sizes = engine.info.batch_sizes
    assert (sizes[0], sizes[-1]) == (1, MAX_BATCH)
    assert all(one < other for one, other in pairwise(sizes))
    assert engine.info.slots >= 1
    assert all((engine.info.engine, engine.info.device, engine.info.device_fingerprint, engine.info.library))
    whole = make(echo("FP32", (4,), max_batch_size=0))
    assert not whole.batched
    assert whole.info.batch_sizes == (1,)


@pytest.mark.parametrize("sizes", [(1,), (MAX_BATCH,), (1, 1, 1), (3, 1, 2), (2, 5, 1)])
def test_every_part_gets_its_own_rows_at_its_own_place(make: Make, sizes: tuple[int, ...]) -> None:
    engine = make(ADD_SUB)
    parts, expected, places = [], [], []
    for number, samples in enumerate(sizes):
        arrays = random_rows(ADD_SUB, samples, seed=number)
        # The destination lies inside a larger slot, whose other bytes must stay as they are.
        slots = [np.full(samples * 64 + 32, 0xEE, np.uint8) for _ in ADD_SUB.outputs]
        views = tuple(slot.data[16 : 16 + samples * 64] for slot in slots)
        parts.append(part_of(arrays, (0, 1), views, samples))
        expected.append(ADD_SUB.rows(tuple(arrays)))
        places.append(slots)
    result = engine.run(parts)
    for number, samples in enumerate(sizes):
        for index in (0, 1):
            slot, answer = places[number][index], result.answers[number][index]
            assert answer.shape == (samples, 16)
            assert answer.data.nbytes == samples * 64
            assert slot[16:-16].tobytes() == expected[number][index].tobytes() == answer.data.tobytes()
            assert (slot[:16] == 0xEE).all()
            assert (slot[-16:] == 0xEE).all()
    assert min(result.times.copy_in_ns, result.times.compute_ns, result.times.copy_out_ns) >= 0


def test_parts_may_want_different_outputs_in_any_order(make: Make) -> None:
    engine = make(ADD_SUB)
    wishes: list[tuple[int, ...]] = [(1,), (), (1, 0), (0,)]
    arrays = [random_rows(ADD_SUB, 2, seed) for seed in range(len(wishes))]
    result = engine.run([spilled_part(ADD_SUB, a, wanted) for a, wanted in zip(arrays, wishes, strict=True)])
    for number, wanted in enumerate(wishes):
        expected = ADD_SUB.rows(tuple(arrays[number]))
        got = answers_of(ADD_SUB, result, number, wanted)
        assert len(got) == len(wanted)
        for index, answer in zip(wanted, got, strict=True):
            np.testing.assert_array_equal(answer, expected[index])


def test_some_answers_in_place_and_others_apart(make: Make) -> None:
    engine = make(ADD_SUB)
    arrays = random_rows(ADD_SUB, 3, 0)
    place = np.zeros(3 * 64, np.uint8)
    result = engine.run([part_of(arrays, (0, 1), (place.data, None), 3)])
    expected = ADD_SUB.rows(tuple(arrays))
    assert place.tobytes() == expected[0].tobytes()
    assert result.answers[0][1].data.tobytes() == expected[1].tobytes()


@pytest.mark.parametrize("dtype", NUMPY_DTYPES)
def test_every_dtype_passes_unchanged(make: Make, dtype: str) -> None:
    model = echo(dtype)
    engine = make(model)
    arrays = random_rows(model, 5, 1)
    if np.issubdtype(arrays[0].dtype, np.floating):
        arrays[0].reshape(-1)[:3] = [np.nan, np.inf, -np.inf]
    result = engine.run([spilled_part(model, [arrays[0][:2]]), spilled_part(model, [arrays[0][2:]])])
    assert b"".join(answers[0].data.tobytes() for answers in result.answers) == bytes_of(arrays[0])


TEXTS = ["", "a", "\0", "ends with \0", "é 漢 😀", "x" * 5000]


def test_strings_of_any_length_keep_their_places(make: Make) -> None:
    model = echo("BYTES", (-1,))
    engine = make(model)
    texts = np.array([text.encode() for text in TEXTS], object).reshape(3, 2)
    result = engine.run([spilled_part(model, [texts[:1]]), spilled_part(model, [texts[1:]])])
    assert [answers[0].shape for answers in result.answers] == [(1, 2), (2, 2)]
    assert [text for answers in result.answers for text in unpack(answers[0].data)] == list(texts.flat)
    empty = engine.run([spilled_part(model, [np.empty((2, 0), object)])])
    assert (empty.answers[0][0].shape, bytes(empty.answers[0][0].data)) == ((2, 0), b"")


@pytest.mark.parametrize("data", [b"\1\0\0", b"\5\0\0\0abc"])
def test_bytes_that_are_no_strings_fail_and_the_next_run_does_not(make: Make, data: bytes) -> None:
    model = echo("BYTES", (1,))
    engine = make(model)
    with pytest.raises(EngineFailure, match="strings"):
        engine.run([Part(1, ((1, 1),), (memoryview(data),), (0,), (None,))])
    good = np.array([[b"good"]], object)
    assert run_arrays(engine, {"x": good})["y"].tolist() == [[b"good"]]


def test_strings_beside_numbers(make: Make) -> None:
    model = Model(
        "both",
        (TensorSpec("text", "BYTES", (1,)), TensorSpec("x", "FP32", (2,))),
        (TensorSpec("same", "BYTES", (1,)), TensorSpec("y", "FP32", (2,))),
        (("Identity", ("text",), ("same",)), ("Neg", ("x",), ("y",))),
        lambda arrays: [arrays[0], -arrays[1]],
    )
    engine = make(model)
    text, x = np.array([[b"one"], [b"two"]], object), np.array([[1, 2], [3, 4]], np.float32)
    answers = run_arrays(engine, {"text": text, "x": x})
    assert answers["same"].tolist() == text.tolist()
    assert answers["y"].tolist() == (-x).tolist()


@pytest.mark.parametrize("dtype", ["FP32", "BYTES", "BF16"])
def test_a_scalar_without_a_batch(make: Make, dtype: str) -> None:
    engine = make(echo(dtype, (), max_batch_size=0))
    value = random_values(np.random.default_rng(5), engine.inputs[0], ())
    answer = run_arrays(engine, {"x": value})["y"]
    assert answer.shape == ()
    assert bytes_of(answer) == bytes_of(value)


def test_outputs_whose_size_only_the_run_knows(make: Make) -> None:
    engine = make(DOUBLED)
    for free in (1, 7, 300, 2):
        arrays = [random_rows(DOUBLED, samples, samples, free=free) for samples in (2, 1)]
        result = engine.run([spilled_part(DOUBLED, a) for a in arrays])
        for number, a in enumerate(arrays):
            (answer,) = answers_of(DOUBLED, result, number, (0,))
            np.testing.assert_array_equal(answer, DOUBLED.rows(tuple(a))[0])


def test_without_a_batch_dimension_shapes_are_whole(make: Make) -> None:
    engine = make(MEAN)
    for length in (1, 6, 200, 3):
        arrays = random_rows(MEAN, 1, length, free=length)
        place = np.zeros(16, np.uint8)
        result = engine.run([part_of(arrays, (0,), (place.data,), 1)])
        assert result.answers[0][0].shape == (1, 4)
        np.testing.assert_allclose(place.view(np.float32), arrays[0].mean(axis=0), rtol=1e-6)


@pytest.mark.parametrize("free", [0, 4])
def test_empty_and_scalar_samples(make: Make, free: int) -> None:
    empty = echo("FP32", (-1,))
    arrays = random_rows(empty, 2, 0, free=free)
    result = make(empty).run([spilled_part(empty, arrays)])
    assert result.answers[0][0].shape == (2, free)
    scalar = echo("INT64", ())
    arrays = random_rows(scalar, 3, 0)
    result = make(scalar).run([spilled_part(scalar, arrays)])
    assert result.answers[0][0].shape == (3,)
    assert result.answers[0][0].data.tobytes() == arrays[0].tobytes()


@pytest.mark.parametrize("model", [ADD_SUB, DOUBLED], ids=lambda model: model.name)
def test_later_runs_do_not_touch_earlier_answers(make: Make, model: Model) -> None:
    engine = make(model)
    kept = []
    for seed in range(20):
        arrays = random_rows(model, 1 + seed % MAX_BATCH, seed)
        result = engine.run([spilled_part(model, arrays)])
        kept.append((model.rows(tuple(arrays)), answers_of(model, result, 0, range(len(model.outputs)))))
    for expected, got in kept:
        for one, other in zip(expected, got, strict=True):
            np.testing.assert_array_equal(one, other)


def test_a_smaller_batch_sees_nothing_of_a_larger_one_before(make: Make) -> None:
    engine = make(ADD_SUB)
    for samples in (MAX_BATCH, 1, 3, MAX_BATCH, 2):
        arrays = random_rows(ADD_SUB, samples, samples)
        outputs = run_arrays(engine, {"a": arrays[0], "b": arrays[1]})
        np.testing.assert_array_equal(outputs["sum"], arrays[0] + arrays[1])
        assert outputs["difference"].shape == (samples, 16)


COMPANY = pytest.mark.parametrize("company", [1.0, 1e4, np.nan], ids=["alike", "large", "nan"])
BESIDE = pytest.mark.parametrize("samples", [2, 3, 5, MAX_BATCH])


@COMPANY
@BESIDE
def test_an_answer_does_not_depend_on_its_company(make: Make, samples: int, company: float) -> None:
    stays_in_any_company(make(CNN), samples, company, tolerance_of(max_relative_error=0.0))


@COMPANY
@BESIDE
def test_nor_does_it_in_bf16(tmp_path: Path, samples: int, company: float) -> None:
    if importlib.util.find_spec("openvino") is None or not cpu.has_bf16():
        pytest.skip("nothing here computes in BF16")
    with closing(open_on_cpu(OpenVinoEngine, CNN, tmp_path, precision="bf16")) as engine:
        engine.warm_up()
        pictures = normal_pictures(MAX_BATCH, seed=MAX_BATCH)
        error = relative_error(run_arrays(engine, {"x": pictures})["logits"], CNN.rows((pictures,))[0])
        assert error > 1e-4, "this was computed in fp32"
        stays_in_any_company(engine, samples, company, tolerance_of(error))


def tolerance_of(max_relative_error: float) -> float:
    """How far from its canary a bundle lets a variant be whose manifest states this error."""
    variant = Variant("model.onnx", "fp32", "cpu", True, "", max_relative_error, None, None)
    return CanaryCheck.of_variant(Canary({}, {}), variant).tolerance


def normal_pictures(samples: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 1, (samples, 3, 16, 16)).astype(np.float32)


def stays_in_any_company(engine: Engine, samples: int, company: float, tolerance: float) -> None:
    """One picture alone, and as first, middle and last of a batch: as a row of one request, and as a request."""
    own, others = 2 * normal_pictures(1, seed=0), normal_pictures(samples - 1, seed=samples)
    others[:, :, ::3] *= company
    alone = run_arrays(engine, {"x": own})["logits"]
    assert relative_error(alone, CNN.rows((own,))[0]) < tolerance
    # Else the answer of a neighbour would do as well.
    assert relative_errors(CNN.rows((others,))[0], np.repeat(alone, len(others), axis=0)).min() > 10 * tolerance
    for place in sorted({0, samples // 2, samples - 1}):
        batch = np.concatenate([others[:place], own, others[place:]])
        whole = run_arrays(engine, {"x": batch})["logits"]
        assert relative_error(whole[place : place + 1], alone) < tolerance
        requests = [one for one in (others[:place], own, others[place:]) if len(one)]
        result = engine.run([spilled_part(CNN, [one]) for one in requests])
        (apart,) = answers_of(CNN, result, min(place, 1), (0,))
        assert relative_error(apart, alone) < tolerance


def test_whole_arrays_may_be_of_any_layout_and_the_results_are_the_callers(make: Make) -> None:
    engine = make(ADD_SUB)
    wide = np.arange(96, dtype=np.int32).reshape(16, 6)
    first = run_arrays(engine, {"a": wide.T[:3], "b": wide.T[3:]})["sum"]
    run_arrays(engine, {"a": wide.T[3:], "b": wide.T[3:]})
    np.testing.assert_array_equal(first, wide.T[:3] + wide.T[3:])


def test_a_failing_batch_says_so_and_the_next_one_works(make: Make) -> None:
    engine = make(GATHER)
    good, bad = [np.array([3, 1])], [np.array([2, 99])]
    for _ in range(3):
        with pytest.raises(EngineFailure) as failed:
            engine.run([spilled_part(GATHER, good), spilled_part(GATHER, bad)])
        assert failed.value.scope is FailureScope.BATCH
        assert "\n" not in str(failed.value)
        result = engine.run([spilled_part(GATHER, good)])
        np.testing.assert_array_equal(answers_of(GATHER, result, 0, (0,))[0], GATHER.rows(tuple(good))[0])
        # Three samples run as four where sizes are padded: what made the last batch fail must not be among them.
        three = [np.array([4, 5, 6])]
        result = engine.run([spilled_part(GATHER, three)])
        np.testing.assert_array_equal(answers_of(GATHER, result, 0, (0,))[0], GATHER.rows(tuple(three))[0])


ORDINARY, SHORTER, LONGER = 1.0, 2 * SHORTENS, 2 * LENGTHENS
VARYING = [varying(), varying(text=True), varying(text=True, gives="BYTES"), varying(columns=-1)]
VARYING.append(varying(text=True, columns=-1))


@pytest.mark.parametrize("model", VARYING, ids=lambda model: model.name)
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    batches=st.lists(
        st.lists(st.tuples(st.integers(1, 3), st.sampled_from([ORDINARY, ORDINARY, SHORTER, LONGER])), min_size=1),
        min_size=1,
        max_size=4,
    )
)
def test_an_answer_has_the_declared_shape_or_there_is_none(
    make: Make, model: Model, opened: dict[str, Engine], batches: list[list[tuple[int, float]]]
) -> None:
    """Nothing of what lay in its place before, of another client, ever goes out with an answer that is shorter."""
    engine = opened.get(model.name) or opened.setdefault(model.name, make(model))
    for batch in batches:
        while sum(samples for samples, _ in batch) > MAX_BATCH:
            batch = batch[1:]
        parts, x = [], []
        for number, (samples, first) in enumerate(batch):
            arrays = random_rows(model, samples, number)
            arrays[0][0, 0] = first
            places = [
                None if spec.sample_bytes is None else secret(samples * spec.sample_bytes) for spec in model.outputs
            ]
            parts.append(part_of(arrays, tuple(range(len(places))), tuple(places), samples))
            x.append(arrays[0])
        expected = model.rows((np.concatenate(x),))[0]
        if expected.shape[1:] != model.outputs[0].shape != (-1,):
            with pytest.raises(
                EngineFailure, match=r"'y' has the shape .*, but the model declares \[\d+, 10\]"
            ) as failed:
                engine.run(parts)
            assert failed.value.scope is FailureScope.BATCH
            continue
        start = 0
        for part, answers in zip(parts, engine.run(parts).answers, strict=True):
            rows = expected[start : start + part.samples]
            assert answers[0].shape == rows.shape
            assert bytes(answers[0].data) == bytes_of(rows)
            start += part.samples


SECRET = b"ANOTHER CLIENT'S"


def secret(nbytes: int) -> memoryview:
    return memoryview(bytearray(SECRET * (nbytes // len(SECRET) + 1))[:nbytes])


@pytest.fixture
def opened() -> dict[str, Engine]:
    """Engines that are there already, by their model's name: one for all examples."""
    return {}


@pytest.mark.parametrize("model", [ADD_SUB, DOUBLED, MEAN, GATHER, echo("FP16")], ids=lambda model: model.name)
def test_warm_up_covers_what_will_come_and_may_be_repeated(make: Make, model: Model) -> None:
    engine = make(model)
    for _ in range(2):
        engine.warm_up()
        for samples in engine.info.batch_sizes:
            arrays = random_rows(model, samples, samples)
            result = engine.run([spilled_part(model, arrays)])
            for one, other in zip(
                model.rows(tuple(arrays)), answers_of(model, result, 0, range(len(model.outputs))), strict=True
            ):
                np.testing.assert_allclose(one, other, rtol=1e-6)


def test_an_engine_that_rested_answers_as_before(make: Make) -> None:
    engine = make(ADD_SUB)
    for samples in (2, MAX_BATCH, 1):
        arrays = random_rows(ADD_SUB, samples, samples)
        engine.rest()
        result = engine.run([spilled_part(ADD_SUB, arrays)])
        np.testing.assert_array_equal(answers_of(ADD_SUB, result, 0, (0, 1))[0], arrays[0] + arrays[1])


def test_closing_twice_is_harmless(make: Make) -> None:
    engine = make(ADD_SUB)
    engine.close()
    engine.close()


def test_answers_outlive_their_engine(make: Make) -> None:
    engine = make(ADD_SUB)
    arrays = random_rows(ADD_SUB, 2, 0)
    result = engine.run([spilled_part(ADD_SUB, arrays)])
    engine.close()
    np.testing.assert_array_equal(answers_of(ADD_SUB, result, 0, (0, 1))[0], arrays[0] + arrays[1])


# On the CPU: what can be wrong with a file, and what a run may allocate.


@pytest.fixture(params=[OnnxRuntimeCpuEngine, OpenVinoEngine])
def on_cpu(request: pytest.FixtureRequest) -> type[StagedEngine]:
    if request.param is OpenVinoEngine and importlib.util.find_spec("openvino") is None:
        pytest.skip("OpenVINO is not installed")
    kind: type[StagedEngine] = request.param
    return kind


@pytest.mark.parametrize(
    "inputs",
    [
        (TensorSpec("other", "FP32", (3,)),),
        (TensorSpec("x", "INT64", (3,)),),
        (TensorSpec("x", "FP32", (3,)), TensorSpec("z", "FP32", (3,))),
    ],
)
def test_a_file_that_is_not_what_was_said_is_refused(
    on_cpu: type[StagedEngine], tmp_path: Path, inputs: tuple[TensorSpec, ...]
) -> None:
    with pytest.raises(BundleError, match="export the model again"):
        open_on_cpu(
            on_cpu,
            replace(echo("FP32"), inputs=inputs, writes=lambda path: onnx_models.identity(path, dims=("batch", 3))),
            tmp_path,
        )


@pytest.mark.parametrize("content", [b"", b"not a graph", b"\x08\x09" * 100, None])
def test_what_is_not_an_onnx_file_is_refused_by_name(
    on_cpu: type[StagedEngine], tmp_path: Path, content: bytes | None
) -> None:
    path = tmp_path / "model.onnx"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(BundleError, match=r"^[^\n]*model\.onnx[^\n]*$"):
        open_on_cpu(on_cpu, replace(echo("FP32"), writes=lambda _: path), tmp_path)


def test_a_thousand_batches_allocate_no_tensor(tmp_path: Path) -> None:
    samples, width = MAX_BATCH, 8192
    model = echo("FP32", (width,))
    engine = make_onnxruntime(model, tmp_path)
    engine.warm_up()
    source, place = np.ones((samples // 2, width), np.float32), np.empty(samples * width * 4, np.uint8)
    half = len(place) // 2
    parts = [
        part_of([source], (0,), (place.data[:half],), samples // 2),
        part_of([source], (0,), (place.data[half:],), samples // 2),
    ]
    engine.run(parts)
    # Threads of other tests may allocate meanwhile; what a batch allocates shows in every round, what they do does not.
    rounds = [_traced(lambda: engine.run(parts), runs=200) for _ in range(5)]
    one_tensor = width * 4  # of one sample, an eighth of what a copy of the batch would show
    assert min(peak for _, peak in rounds) < one_tensor
    assert min(kept for kept, _ in rounds) < one_tensor // 4


def _traced(job: Callable[[], object], runs: int) -> tuple[int, int]:
    """How many bytes `runs` of a job kept, and how many they held at once."""
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(runs):
            job()
        kept, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return kept - before, peak - before
