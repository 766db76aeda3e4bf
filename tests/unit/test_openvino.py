"""OpenVINO as an engine of the table: what it takes, when it serves, and what it does not do behind one's back."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from convoy.app.engines.base import run_arrays
from convoy.app.engines.batch import EngineFailure
from convoy.app.engines.machine import CPU_ONLY, Library, Machine
from convoy.app.engines.openvino import OpenVinoEngine, load_openvino
from convoy.app.loading.load import LoadedModel, LoadOptions, load
from convoy.export.variants.precision import select
from convoy.models.bundle import Precision
from convoy.models.errors import BundleError
from convoy.models.spec import TensorSpec
from convoy.models.store import DEMO_STORE, Store
from tests.support import onnx_models

IS_HERE = importlib.util.find_spec("openvino") is not None
needs_openvino = pytest.mark.skipif(not IS_HERE, reason="OpenVINO is not installed")
X, Y = TensorSpec("x", "FP32", (4,)), TensorSpec("y", "FP32", (4,))
MISSING = Library(None, "OpenVINO is not installed; run pip install 'convoy-serve[openvino]'")


def with_openvino() -> Machine:
    return replace(CPU_ONLY, openvino=Library(load_openvino()))


def loaded(store: Path, name: str = "digits", **given: Any) -> LoadedModel:
    options = LoadOptions("auto", threads=1, max_batch=4, machine=with_openvino())
    return load(Store(store).versions(name)[0], replace(options, **given))


def takes(monkeypatch: pytest.MonkeyPatch, **engines_ms: float) -> None:
    """How long every batch takes in each engine."""
    monkeypatch.setattr(
        "convoy.app.engines.measure.Probe.run_ms", lambda probe: engines_ms[probe.engine.info.engine.replace("-", "_")]
    )


def opened(path: Path, y: TensorSpec = Y, precision: Precision = "fp32") -> OpenVinoEngine:
    return OpenVinoEngine(path, inputs=(X,), outputs=(y,), max_batch_size=4, precision=precision, threads=1)


def identity(folder: Path) -> Path:
    return onnx_models.identity(folder / "model.onnx", dims=("batch", 4))


@needs_openvino
@pytest.mark.parametrize(
    ("openvino_ms", "serves"), [(1.0, "openvino"), (2.0, "onnxruntime-cpu"), (4.0, "onnxruntime-cpu")]
)
def test_on_a_cpu_the_faster_engine_serves_and_it_is_told_why_the_other_does_not(monkeypatch, openvino_ms, serves):
    takes(monkeypatch, onnxruntime_cpu=2.0, openvino=openvino_ms)
    model = loaded(DEMO_STORE)
    (proved,) = model.engines
    assert (proved.engine.info.engine, proved.engine.info.precision) == (serves, "fp32")
    other = ({"onnxruntime-cpu", "openvino"} - {serves}).pop()
    assert f"{other} on cpu: fp32.onnx: it is not faster than {serves} in fp32" in model.skipped
    assert proved.platform == {"openvino": "openvino", "onnxruntime-cpu": "onnxruntime_onnx"}[serves]
    proved.canary.run(proved.engine)


def test_where_it_is_not_installed_everything_is_as_without_it_and_the_extra_is_named():
    machine = Machine(no_gpu="no GPU", openvino=MISSING)
    model = loaded(DEMO_STORE, machine=machine)
    assert [one.engine.info.engine for one in model.engines] == ["onnxruntime-cpu"]
    assert f"openvino: {MISSING.reason}" in model.skipped
    with pytest.raises(BundleError, match=r"--engine openvino: .*convoy-serve\[openvino\].*--engine auto"):
        loaded(DEMO_STORE, machine=machine, engine="openvino")


@needs_openvino
def test_a_bare_model_is_served_by_it_where_it_agrees_and_by_the_other_where_it_would_narrow_numbers(
    tmp_path, monkeypatch
):
    takes(monkeypatch, onnxruntime_cpu=2.0, openvino=1.0)
    onnx_models.shift(tmp_path / "shift" / "1" / "model.onnx", 1.0)
    onnx_models.identity(tmp_path / "wide" / "1" / "model.onnx", "INT64", ("batch", 4))
    assert [one.engine.info.engine for one in loaded(tmp_path, "shift").engines] == ["openvino"]
    wide = loaded(tmp_path, "wide")
    assert [one.engine.info.engine for one in wide.engines] == ["onnxruntime-cpu"]
    assert any("openvino on cpu" in why and "'x' is i64" in why for why in wide.skipped)
    with pytest.raises(BundleError, match="'x' is i64, which OpenVINO does not support as is"):
        loaded(tmp_path, "wide", engine="openvino")


@needs_openvino
@pytest.mark.parametrize("engine", ["auto", "openvino"])
def test_a_bare_model_that_the_other_engine_refuses_is_not_served_unchecked(tmp_path, engine, monkeypatch, caplog):
    monkeypatch.setattr("convoy.app.engines.openvino._unchecked_lookup", lambda graph: None)
    onnx_models.lookup(tmp_path / "lookup" / "1" / "model.onnx")
    with pytest.raises(BundleError, match="its output cannot be verified, because onnxruntime-cpu") as refused:
        loaded(tmp_path, "lookup", engine=engine)
    assert "out of data bounds" in str(refused.value)
    assert "GPU" not in caplog.text


@needs_openvino
@pytest.mark.parametrize("operator", ["Gather", "GatherND"])
def test_a_model_that_looks_up_rows_by_numbers_of_a_request_is_left_to_who_checks_them(tmp_path, operator):
    indices, y = (
        TensorSpec("x", "INT32", (4, 1)),
        TensorSpec("y", "FP32", (4, 1, 2) if operator == "Gather" else (4, 2)),
    )
    path = onnx_models.lookup(tmp_path / "model.onnx", operator)
    with pytest.raises(BundleError, match="'y' indexes with values of a request"):
        OpenVinoEngine(path, inputs=(indices,), outputs=(y,), max_batch_size=0, precision="fp32", threads=1)


@needs_openvino
def test_what_a_model_looks_up_by_its_own_numbers_is_served(tmp_path):
    engine = opened(onnx_models.last_column(tmp_path / "model.onnx"), TensorSpec("y", "FP32", (1,)))
    assert run_arrays(engine, {"x": np.arange(8, dtype=np.float32).reshape(2, 4)})["y"].tolist() == [[3.0], [7.0]]


@needs_openvino
def test_free_sizes_are_refused_because_those_that_do_not_fit_together_would_be_answered(tmp_path):
    with pytest.raises(BundleError, match="tensor 'y' has no fixed size"):
        opened(onnx_models.identity(tmp_path / "model.onnx"), TensorSpec("y", "FP32", (-1,)))


@needs_openvino
def test_an_output_of_fewer_rows_than_were_asked_is_a_failure_and_the_next_batch_works(tmp_path):
    engine = opened(onnx_models.every_other_row(tmp_path / "model.onnx"))
    for _ in range(2):
        with pytest.raises(EngineFailure, match=r"'y' has the shape \[2, 4\], but the model declares \[3, 4\]"):
            run_arrays(engine, {"x": np.ones((3, 4), np.float32)})
        assert run_arrays(engine, {"x": np.ones((1, 4), np.float32)})["y"].tolist() == [[1.0] * 4]


@needs_openvino
def test_bf16_is_refused_where_the_processor_has_none_and_named_where_it_has(tmp_path, monkeypatch):
    ov = load_openvino()
    compile_model, get_property, asked = ov.Core.compile_model, ov.Core.get_property, []
    has_bf16 = True

    def capabilities(core: object, *names: str) -> object:
        found = get_property(core, *names)
        others = [one for one in found if one != "BF16"]
        return [*others, "BF16"] if has_bf16 else others

    def watched(core: object, graph: object, device: str, options: dict[str, object]) -> object:
        asked.append(options["INFERENCE_PRECISION_HINT"])
        return compile_model(core, graph, device, options)

    monkeypatch.setattr(ov.Core, "get_property", capabilities)
    monkeypatch.setattr(ov.Core, "compile_model", watched)
    monkeypatch.setattr("convoy.app.engines.cpu.has_bf16", lambda: multiplies)
    path = identity(tmp_path)
    multiplies = True
    opened(path, precision="bf16")
    for has_bf16, multiplies in ((False, True), (True, False)):  # noqa: B007 - both are read above
        with pytest.raises(BundleError, match="this processor does not support BF16"):
            opened(path, precision="bf16")
    assert asked == ["bf16"]


@pytest.mark.parametrize("processor_has_it", [False, True])
@pytest.mark.parametrize("library", [Library(None), Library(SimpleNamespace(__version__="2026.1"))])
def test_bf16_is_made_where_it_can_run_or_where_it_is_asked_for(monkeypatch, processor_has_it, library):
    monkeypatch.setattr("convoy.export.variants.precision.has_bf16", lambda: processor_has_it)
    monkeypatch.setattr("convoy.export.variants.precision.find_cpu", lambda: Machine(openvino=library))
    by_default = {recipe.file for recipe in select(None, can_calibrate=True)}
    assert ("bf16.onnx" in by_default) == (processor_has_it and library.module is not None)
    assert [recipe.file for recipe in select("bf16", can_calibrate=True)] == ["fp32.onnx", "bf16.onnx"]


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (None, "OpenVINO is not installed; run .venv/bin/pip install"),
        (
            "import no_such_dependency",
            "OpenVINO does not load (No module named 'no_such_dependency'); run .venv/bin/pip install",
        ),
    ],
)
def test_a_module_that_it_needs_and_does_not_find_is_named(tmp_path, content, told):
    if content is not None:
        (tmp_path / "openvino").mkdir()
        (tmp_path / "openvino" / "__init__.py").write_text(content)
    code = (
        "import sys\n"
        "from convoy.app.engines.openvino import load_openvino\n"
        "from convoy.models.errors import JobError\n"
        f"sys.path[:] = [one for one in sys.path if 'site-packages' not in one] + [{str(tmp_path)!r}]\n"
        "try:\n"
        "    load_openvino()\n"
        "except JobError as error:\n"
        "    print(error)\n"
    )
    run = subprocess.run([sys.executable, "-c", code], check=True, timeout=60, capture_output=True, text=True)
    assert run.stdout.startswith(told)


@needs_openvino
def test_importing_it_tells_nobody_and_leaves_nothing_at_home(tmp_path):
    code = (
        "import sys\n"
        "from convoy.app.engines.openvino import load_openvino\n"
        "load_openvino().Core()\n"
        "assert not [name for name in sys.modules if 'telemetry' in name and 'openvino' in name]\n"
        "import openvino.tools\n"
        "assert 'openvino.tools.ovc' not in sys.modules\n"
    )
    environment = {**os.environ, "HOME": str(tmp_path)}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, timeout=60)
    assert list(tmp_path.iterdir()) == []
