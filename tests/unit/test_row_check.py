"""Is the first dimension a batch: graphs whose rows depend on each other, and those where it only looks so."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import NodeProto, TensorProto, helper, numpy_helper

from convoy.app.engines.base import run_arrays
from convoy.app.engines.dimensions import check_rows
from convoy.app.engines.memory import growing_sizes
from convoy.app.engines.onnxruntime import open_session, read_signature
from convoy.app.loading.bare_model import read_bare_model
from convoy.app.loading.load import LoadedModel, LoadOptions, load
from convoy.models.errors import BundleError
from convoy.models.store import Store
from tests.support import onnx_models
from tests.support.stores import StoreFolder

node = helper.make_node
Ends = Sequence[tuple[str, str, Sequence[int | str]]]
X: Ends = [("x", "FP32", ("batch", 4))]
Y: Ends = [("y", "FP32", ("batch", 4))]


def graph(path: Path, nodes: list[NodeProto], inputs: Ends = X, outputs: Ends = Y, **constants: np.ndarray) -> Path:
    sides = [[onnx_models.tensor(*one) for one in side] for side in (inputs, outputs)]
    known = [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()]
    return onnx_models.save(path, nodes, *sides, known, opset=17)


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


Writer = Callable[[Path], Path]


def writes(*given: Any, **named: Any) -> Writer:
    """A function that writes such a graph."""
    return lambda path: graph(path, *given, **named)


def mixes_above(size: int) -> Writer:
    """Adds the batch's mean to each row, but only in batches of more than `size`."""
    nodes = [
        node("Shape", ["x"], ["shape"], start=0, end=1),
        node("Sub", ["shape", "size"], ["over"]),
        node("Clip", ["over", "zero", "one"], ["mixes"]),
        node("Cast", ["mixes"], ["factor"], to=TensorProto.FLOAT),
        node("ReduceMean", ["x"], ["mean"], axes=[0], keepdims=1),
        node("Mul", ["mean", "factor"], ["more"]),
        node("Add", ["x", "more"], ["y"]),
    ]
    return writes(nodes, size=ints(size), zero=np.array(0, np.int64), one=np.array(1, np.int64))


SLICED = [node("Slice", ["x", "first", "last", "axis", "step"], ["y"])]
MIXED: dict[str, Writer] = {
    "running-sum": writes([node("CumSum", ["x", "axis"], ["y"])], axis=np.array(0, np.int64)),
    "products": writes(
        [node("Transpose", ["x"], ["t"]), node("MatMul", ["x", "t"], ["y"])], outputs=[("y", "FP32", ("batch", "rows"))]
    ),
    "reversed": writes(SLICED, first=ints(-1), last=ints(-(1 << 40)), axis=ints(0), step=ints(-1)),
    "half": writes(SLICED, first=ints(0), last=ints(1 << 40), axis=ints(0), step=ints(2)),
    "above-3": mixes_above(3),
    "above-8": mixes_above(8),
    "at-32": mixes_above(31),
    # Values of a millionth, of which the batch's mean is taken.
    "small": writes(
        [
            node("ReduceMean", ["x"], ["mean"], axes=[0], keepdims=1),
            node("Sub", ["x", "mean"], ["rest"]),
            node("Mul", ["rest", "little"], ["y"]),
        ],
        little=np.array(1e-8, np.float32),
    ),
    "quantised": writes(
        [
            node("DynamicQuantizeLinear", ["x"], ["q", "scale", "zero"]),
            node("DequantizeLinear", ["q", "scale", "zero"], ["y"]),
        ]
    ),
    # The classes of a running sum, of which one is as good as certain for large inputs.
    "certain": writes(
        [node("CumSum", ["x", "axis"], ["sum"]), node("Softmax", ["sum"], ["y"])], axis=np.array(0, np.int64)
    ),
}

CHANCE = np.random.default_rng(5)
HALVES = {f"w{number}": (CHANCE.standard_normal((256, 256)) / 16).astype(np.float16) for number in range(6)}
INDEPENDENT: dict[str, Writer] = {
    # Sums so long that a batch of them is computed otherwise than a row, with results large and small.
    "dense": writes(
        [node("MatMul", ["x", "w"], ["y"])],
        [("x", "FP32", ("batch", 4096))],
        [("y", "FP32", ("batch", 64))],
        w=CHANCE.standard_normal((4096, 64)).astype(np.float32) * np.logspace(-3, 3, 64, dtype=np.float32),
    ),
    # The same in half precision inside, through several layers, FP32 at both ends.
    "dense_in_half": writes(
        [
            node("Cast", ["x"], ["0"], to=TensorProto.FLOAT16),
            *(
                one
                for index in range(6)
                for one in (
                    node("MatMul", [f"{index}", f"w{index}"], [f"m{index}"]),
                    node("Relu", [f"m{index}"], [f"{index + 1}"]),
                )
            ),
            node("Cast", ["6"], ["y"], to=TensorProto.FLOAT),
        ],
        [("x", "FP32", ("batch", 256))],
        [("y", "FP32", ("batch", 256))],
        **HALVES,
    ),
    # The largest channel of each pixel, where many are nearly as large.
    "best_of_map": writes(
        [node("ArgMax", ["x"], ["y"], axis=1, keepdims=0)],
        [("x", "FP32", ("batch", 8, 32, 32))],
        [("y", "INT64", ("batch", 32, 32))],
    ),
    # Rows of a table of two, so that most numbers are none of it.
    "looked_up": writes(
        [node("Gather", ["table", "x"], ["y"])],
        [("x", "INT64", ("batch", 3))],
        [("y", "FP32", ("batch", 3, 2))],
        table=np.ones((2, 2), np.float32),
    ),
    "texts": writes([node("Identity", ["x"], ["y"])], [("x", "BYTES", ("batch", 2))], [("y", "BYTES", ("batch", 2))]),
    "numbers_in_text": writes(
        [node("Cast", ["x"], ["y"], to=TensorProto.FLOAT)],
        [("x", "BYTES", ("batch", 2))],
        [("y", "FP32", ("batch", 2))],
    ),
    # An output of one number for each row, without a further dimension.
    "one_each": writes(
        [node("ReduceSum", ["x", "axis"], ["y"], keepdims=0)], outputs=[("y", "FP32", ("batch",))], axis=ints(1)
    ),
    "not_numbers": writes([node("Sub", ["x", "x"], ["zero"]), node("Div", ["zero", "zero"], ["y"])]),
    "partly_random": writes(
        [
            node("RandomNormalLike", ["x"], ["noise"]),
            node("Add", ["x", "noise"], ["z"]),
            node("Identity", ["x"], ["y"]),
        ],
        outputs=[*Y, ("z", "FP32", ("batch", 4))],
    ),
}
NOISE = writes([node("RandomNormalLike", ["x"], ["y"])])


def check(path: Path, largest: int = 32) -> str:
    return check_rows(path, read_signature(open_session(path, 1), path), 2, largest=largest).objection


@pytest.mark.parametrize("write", MIXED.values(), ids=MIXED)
def test_rows_that_depend_on_each_other_are_seen(write: Writer, tmp_path: Path) -> None:
    told = check(write(tmp_path / "model.onnx"))
    assert "batch of " in told
    assert "output 'y'" in told


@pytest.mark.parametrize("write", INDEPENDENT.values(), ids=INDEPENDENT)
@pytest.mark.parametrize("largest", [2, 3, 5, 40])
def test_rows_that_do_not_are_left_in_peace(write: Writer, largest: int, tmp_path: Path) -> None:
    assert check(write(tmp_path / "model.onnx"), largest) == ""


def test_what_is_random_throughout_or_does_not_run_alone_is_left_open(tmp_path: Path) -> None:
    noise = NOISE(tmp_path / "noise.onnx")
    found = check_rows(noise, read_signature(open_session(noise, 1), noise), 1)
    assert (found.is_open, found.objection) == (
        True,
        "its output differs from run to run, so the check of its rows is not possible",
    )
    pairs = graph(
        tmp_path / "pairs.onnx",
        [node("Reshape", ["x", "shape"], ["y"])],
        outputs=[("y", "FP32", ("rows", 8))],
        shape=ints(-1, 8),
    )
    found = check_rows(pairs, read_signature(open_session(pairs, 1), pairs), 1)
    assert found.is_open
    assert found.objection.startswith("a single row does not run (")


def test_a_batch_is_run_only_where_it_is_expected_to_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = INDEPENDENT["dense"](tmp_path / "model.onnx")
    taken = iter(range(0, 100 << 30, 1 << 30))
    monkeypatch.setattr(
        "convoy.app.engines.dimensions.growing_sizes",
        lambda largest: growing_sizes(largest, available=lambda: 2 << 30, resident=lambda: next(taken)),
    )
    with pytest.raises(BundleError, match=r"model\.onnx: max_batch_size 128 is too large for this machine"):
        check(path, 128)


# With a configuration


@pytest.fixture
def store(tmp_path: Path) -> StoreFolder:
    return StoreFolder(tmp_path / "store")


def read(store: StoreFolder, write: Writer, config: str, **given: Any) -> Any:
    write(store.root / "net" / "1" / "model.onnx")
    (store.root / "net" / "config.pbtxt").write_text(config)
    return read_bare_model(Store.at(store.root).version("net", 1), 1, **given)


OVERRULED = 'parameters { key: "convoy_rows_are_independent" value { string_value: "true" } }'


@pytest.mark.parametrize(
    "write", [MIXED["running-sum"], MIXED["products"], mixes_above(3), mixes_above(8), mixes_above(15)]
)
def test_a_configured_batch_of_rows_that_depend_is_refused_unless_it_is_meant_so(
    write: Writer, store: StoreFolder
) -> None:
    with pytest.raises(BundleError) as refused:
        read(store, write, "max_batch_size: 16")
    for words in ("max_batch_size is 16 in config.pbtxt", "set max_batch_size: 0", OVERRULED):
        assert words in str(refused.value)
    assert read(store, write, f"max_batch_size: 16 {OVERRULED}").spec.max_batch_size == 16
    assert read(store, write, "max_batch_size: 0").spec.max_batch_size == 0
    assert read(store, write, "max_batch_size: 1").spec.max_batch_size == 1, "one row depends on nothing else"
    (store.root / "net" / "config.pbtxt").unlink()
    bare = Store.at(store.root).version("net", 1)
    assert read_bare_model(bare, 1).spec.max_batch_size == 0
    with pytest.raises(BundleError, match="max_batch_size is 16 in the load request"):
        read_bare_model(bare, 1, configured_batch=16)


def test_batches_that_the_operator_does_not_allow_are_not_tried(store: StoreFolder) -> None:
    assert read(store, mixes_above(8), "max_batch_size: 16", max_batch=8).spec.max_batch_size == 16
    with pytest.raises(BundleError, match="differs from the row run alone"):
        read(store, mixes_above(8), "max_batch_size: 16", max_batch=9)


def test_what_nothing_tells_of_is_served_as_it_is_configured_with_a_warning(
    store: StoreFolder, caplog: pytest.LogCaptureFixture
) -> None:
    assert read(store, NOISE, "max_batch_size: 4").spec.max_batch_size == 4
    assert "it is unknown whether rows of a batch affect each other" in caplog.text
    (store.root / "net" / "config.pbtxt").unlink()
    assert read_bare_model(Store.at(store.root).version("net", 1), 1).spec.max_batch_size == 0


DTYPES = {"BF16": np.dtype("V2"), "FP16": np.dtype("f2")}


def loaded(store: Path) -> LoadedModel:
    return load(Store(store).versions("net")[0], LoadOptions("auto", 1, None))


def given(dtype: str, values: np.ndarray) -> np.ndarray:
    if dtype == "FP16":
        return values.astype("f2")
    return (values.astype("<f4").view("<u4") >> 16).astype("<u2").view("V2")


@pytest.mark.parametrize("dims", [("batch", 4), ("batch", 3, "height", "width")])
@pytest.mark.parametrize("dtype", DTYPES)
def test_halves_are_batched_and_each_row_is_right(tmp_path: Path, dtype: str, dims: onnx_models.Dims) -> None:
    onnx_models.in_halves(tmp_path / "net" / "1" / "model.onnx", dtype, dims)
    model = loaded(tmp_path)
    assert model.spec.max_batch_size == 32
    sides = tuple(size if isinstance(size, int) else 8 for size in dims[1:])
    rows = np.arange(5, dtype="f4").reshape(5, *(1 for _ in sides)) * np.ones(sides, "f4")
    engine = model.engines[0].engine
    answers = run_arrays(engine, {"x": given(dtype, rows)})["y"]
    assert answers.tobytes() == given(dtype, np.arange(5, dtype="f4")).tobytes()
    engine.close()


@pytest.mark.parametrize("dtype", DTYPES)
def test_halves_that_mix_their_rows_are_not(tmp_path: Path, dtype: str, caplog: pytest.LogCaptureFixture) -> None:
    onnx_models.in_halves(tmp_path / "net" / "1" / "model.onnx", dtype, mixes=True)
    with caplog.at_level("INFO", "convoy"):
        model = loaded(tmp_path)
    assert model.spec.max_batch_size == 0
    assert "differs from the row run alone" in caplog.text
    model.engines[0].engine.close()
