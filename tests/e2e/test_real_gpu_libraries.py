"""The GPU libraries as they are shipped, held against what our code asks of them; no GPU and no driver is needed.

The fakes can only be as right as who wrote them. Here pip fetches the very versions that are pinned, and a child
process imports each and says what it has: every name that our source uses, how each is called, what each number means,
and every option string, which must stand in the library that reads it.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import get_args

import pytest

from convoy.app.engines import machine, onnx_session, onnxruntime_cuda
from convoy.app.engines.cuda import driver
from convoy.app.engines.cuda.code import Code, codes_of, in_words
from convoy.app.engines.onnxruntime_cuda import PROVIDER, ConvolutionSearch
from convoy.app.telemetry import nvml
from tests.support import used_names
from tests.support.used_names import Use

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

ROOT = Path(__file__).resolve().parents[2]
# cuda-bindings asks cuda-pathfinder where libraries lie when it is imported.
DISTRIBUTIONS = ("onnxruntime-gpu", "cuda-bindings", "cuda-pathfinder", "nvidia-ml-py")
ENGINE, SESSIONS, DRIVER, NVML, MACHINE = (
    Path(one.__file__ or "") for one in (onnxruntime_cuda, onnx_session, driver, nvml, machine)
)

# Says of every use why it is wrong. The library comes from the folder that is named first, or it is wrong as well.
CHILD = r"""
import importlib, inspect, json, sys

def parameters(doc, name):
    # Of a signature in the first line of a docstring.
    depth, found, text = 0, [], doc.splitlines()[0].removeprefix(name + "(")
    for letter in text:
        if letter == ")" and not depth:
            break
        depth += (letter in "[(") - (letter in ")]")
        if not found or (letter == "," and not depth):
            found.append("")
        found[-1] += letter
    return [one for one in found if one.strip(" ,") and "self" not in one.split(":")[0]]

def why_wrong(module, use):
    found = module
    for part in use["path"].split("."):
        if not inspect.isdatadescriptor(found) and not hasattr(found, part):
            return "does not exist"
        if inspect.isdatadescriptor(found):
            found = getattr(owner(), found.__name__)  # what is there only in an object
            if not hasattr(found, part):
                return "does not exist"
        owner, found = found, getattr(found, part)
    if use["value"] is not None and int(found) != use["value"]:
        return f"is {int(found)}, not {use['value']}"
    if use["positional"] is None:
        return None
    try:
        signature = inspect.signature(found)
    except (TypeError, ValueError):
        doc, name = found.__doc__ or "", use["path"].rpartition(".")[2]
        if not doc.startswith(name + "("):
            return None
        takes = parameters(doc, name)
        given = use["positional"] + len(use["keywords"])
        fits = sum("=" not in one for one in takes) <= given <= len(takes)
        return None if fits else f"takes other arguments than our {given}: {doc.splitlines()[0]}"
    given = [None] * use["positional"]
    if inspect.isclass(owner) and not inspect.isclass(found):
        given.append(None)  # itself
    try:
        signature.bind(*given, **dict.fromkeys(use["keywords"]))
    except TypeError as error:
        return f"is called wrongly: {error}; it is {signature}"

name, folder, uses = sys.argv[1], sys.argv[2], json.load(sys.stdin)
module = importlib.import_module(name)
problems = [] if module.__file__.startswith(folder) else [f"{name} was imported from {module.__file__}"]
for use in uses:
    wrong = why_wrong(module, use)
    if wrong:
        problems.append(f"{name}.{use['path']} (line {use['line']} of ours) {wrong}")
version = getattr(module, "__version__", "")
providers = module.get_available_providers() if hasattr(module, "get_available_providers") else []
errors = sorted(map(int, module.cudaError_t)) if hasattr(module, "cudaError_t") else []
print(json.dumps({"problems": problems, "version": version, "providers": providers, "errors": errors}))
"""


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the pinned versions, as pip unpacks them for this Python."""
    folder = tmp_path_factory.mktemp("gpu-libraries")
    pins = dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    missing = [name for name in DISTRIBUTIONS if name not in pins]
    assert not missing, f"constraints.txt does not pin {', '.join(missing)}"
    wanted = [f"{name}=={pins[name]}" for name in DISTRIBUTIONS]
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    done = subprocess.run([*command, "--target", folder, *wanted], capture_output=True, text=True, check=False)
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or [done.stderr]
        pytest.fail(f"pip cannot install {', '.join(wanted)} for this Python: {' '.join(said)}")
    return folder


def ask(folder: Path, module: str, uses: Iterable[Use]) -> dict[str, object]:
    """What a child process says of the library. Fails with every use that is wrong."""
    command = [sys.executable, "-c", CHILD, module, str(folder)]
    environment = os.environ | {"PYTHONPATH": str(folder)}
    told = json.dumps([asdict(use) for use in uses])
    done = subprocess.run(command, input=told, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{module} does not import: {done.stderr}"
    answer: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    assert answer["problems"] == [], "\n".join(answer["problems"])  # type: ignore[arg-type]
    return answer


def absent(names: Iterable[str], library: Path) -> list[str]:
    """Those that do not stand in the library's file; a linker puts one at the end of a longer one where it can."""
    data = library.read_bytes()
    return sorted({name for name in names if name.encode() + b"\0" not in data})


def only(folder: Path, pattern: str) -> Path:
    (found,) = folder.glob(pattern)
    return found


def test_what_is_wrong_is_found(libraries: Path) -> None:
    provider = libraries / "onnxruntime/capi/libonnxruntime_providers_cuda.so"
    assert absent(["use_tf32", "use_tf", "use_tf33"], provider) == ["use_tf", "use_tf33"]
    for module, use, why in (
        ("cuda.bindings.runtime", Use("cudaMallok", 7), r"runtime\.cudaMallok \(line 7 of ours\) does not exist"),
        ("cuda.bindings.runtime", Use("cudaMalloc", 7, 2), "is called wrongly: too many positional arguments"),
        ("cuda.bindings.runtime", Use("cudaMemcpyAttributes", 7, 2), "takes other arguments than our 2"),
        ("cuda.bindings.runtime", Use("cudaEventBlockingSync", 7, value=2), "is 1, not 2"),
        ("cuda.bindings.runtime", Use("cudaDeviceProp.uuid.digits", 7), "does not exist"),
        ("onnxruntime", Use("IOBinding.bind_input", 7, 5), "is called wrongly: missing a required argument"),
        ("onnxruntime", Use("OrtEpAssignedNode.operator", 7), "does not exist"),
    ):
        with pytest.raises(AssertionError, match=why):
            ask(libraries, module, [use])


def test_every_option_string_stands_in_the_provider(libraries: Path) -> None:
    options = [text for text in used_names.strings(ENGINE, "_provider_options") if not text.isdigit()]
    assert {"use_tf32", "user_compute_stream", "kSameAsRequested"} <= set(options), "the source is not read rightly"
    expected = {*options, *get_args(ConvolutionSearch), PROVIDER}
    assert absent(expected, libraries / "onnxruntime/capi/libonnxruntime_providers_cuda.so") == []


def test_every_session_and_run_entry_stands_in_the_runtime(libraries: Path) -> None:
    entries = [
        *used_names.first_arguments(ENGINE, "add_session_config_entry"),
        *used_names.first_arguments(SESSIONS, "add_session_config_entry"),
        *used_names.first_arguments(ENGINE, "add_run_config_entry"),
    ]
    assert len(set(entries)) >= 4, "the source is not read rightly"
    assert absent(entries, only(libraries, "onnxruntime/capi/onnxruntime_pybind11_state*.so")) == []


def test_onnxruntime_has_every_name_that_is_used_of_it(libraries: Path) -> None:
    stands_for = {
        "self._runtime": "",
        "session": "InferenceSession",
        "bound.session": "InferenceSession",
        "self._sessions[size]": "InferenceSession",
        "binding": "IOBinding",
        "part": "OrtEpAssignedSubgraph",
    }
    uses = [*used_names.attributes(ENGINE, stands_for), *used_names.attributes(SESSIONS, {"runtime": ""})]
    options = [use for use in uses if use.path in ("SessionOptions", "RunOptions")]
    assert len(options) == 2
    entries = [
        Use(f"{kind}.{method}", 0)
        for kind, method in (("SessionOptions", "add_session_config_entry"), ("RunOptions", "add_run_config_entry"))
    ]
    node = used_names.attributes(ENGINE, {"node": "OrtEpAssignedNode"})
    answer = ask(libraries, "onnxruntime", [*uses, *entries, *(use for use in node if "sees_values" not in use.path)])
    assert len({use.path for use in uses}) > 10, "the source is not read rightly"
    assert PROVIDER in answer["providers"]  # type: ignore[operator]
    ask(libraries, "onnxruntime", used_names.attributes(MACHINE, {"module": ""}))


def test_cuda_bindings_have_every_name_call_and_number_that_is_used_of_them(libraries: Path) -> None:
    through = ("_call", "_ask", "_ask_all", "_invoke", "_again", "_beside_captures")
    calls = used_names.calls_by_name(DRIVER, through, "cuda")
    stands_for = {"runtime": "", "self._runtime": "", "found": "cudaDeviceProp", "attributes": "cudaMemcpyAttributes"}
    uses = [use for use in used_names.attributes(DRIVER, stands_for) if "_" not in use.path.partition(".")[0]]
    assert len({use.path for use in calls}) > 20, "the source is not read rightly"
    assert {use.path for use in uses} > {"cudaMemcpyKind.cudaMemcpyHostToDevice", "cudaDeviceProp.totalGlobalMem"}
    constants = used_names.commented_constants(DRIVER)
    assert {use.path for use in constants} > {"cudaErrorStreamCaptureInvalidated", "cudaEventBlockingSync"}
    named = [
        Use(f"cudaError_t.{use.path}" if use.path.startswith("cudaError") else use.path, use.line, value=use.value)
        for use in constants
    ]
    answer = ask(libraries, "cuda.bindings.runtime", [*calls, *uses, *named])
    assert set(answer["errors"]) >= driver._STICKY  # type: ignore[call-overload]


def test_nvml_has_every_name_call_and_number_that_is_used_of_it(libraries: Path) -> None:
    calls = used_names.calls_by_name(NVML, ("_ask",), "nvml", before=1)
    uses = used_names.attributes(NVML, {"library": "", "self._library": ""})
    assert len(calls) > 9, "the source is not read rightly"
    assert {"nvmlDeviceGetMigMode", "NVMLError_NotFound"} <= {use.path for use in uses}
    reasons = [
        Use(f"nvmlClocksThrottleReason{_camel(name)}", 0, value=bit) for name, bit in nvml.THROTTLE_REASONS.items()
    ]
    constants = used_names.commented_constants(NVML)
    assert len(constants) >= 5
    ask(libraries, "pynvml", [*calls, *uses, *constants, *reasons])


def _camel(name: str) -> str:
    """As NVML writes it, where what holds the clocks is a setting."""
    camel = "".join(word.capitalize() for word in name.split("_"))
    return {"ApplicationsClocks": "ApplicationsClocksSetting", "DisplayClocks": "DisplayClockSetting"}.get(camel, camel)


def test_the_provider_has_code_for_the_gpus_that_the_documents_name(libraries: Path) -> None:
    codes = codes_of(libraries / "onnxruntime/capi/libonnxruntime_providers_cuda.so")
    assert Code(90) in codes
    told = " ".join((ROOT / "docs/serving.md").read_text().split())
    assert f"compute capability {in_words(codes)}" in told, f"docs/serving.md does not say {in_words(codes)}"
