"""For which GPUs a library has code: read from its file, and said where engines are chosen."""

from __future__ import annotations

import struct
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from convoy.app.engines.cuda.code import Code, codes_of, has_code, in_words
from convoy.app.engines.machine import _find_onnxruntime
from convoy.app.engines.onnxruntime_cuda import PROVIDER
from convoy.app.loading.load import LoadOptions, load
from convoy.models.store import DEMO_STORE, Store
from tests.support import onnx_models
from tests.support.fake_cuda import FakeGpu
from tests.support.gpu_machine import GpuBench

PTX, MACHINE_CODE = 1, 2


def write_library(path: Path, *containers: tuple[tuple[int, int], ...], section: bytes = b".nv_fatbin") -> Path:
    """An ELF file with fat binaries, each of entries of a kind and an architecture, padded as linkers do."""
    body = b""
    for entries in containers:
        inside = b""
        for kind, architecture in entries:
            payload = b"\x7fELF code" * 3
            head = struct.pack("<HHIQ", kind, 0x101, 64, len(payload)) + bytes(12) + struct.pack("<I", architecture)
            inside += head.ljust(64, b"\0") + payload
        body += struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(inside)) + inside
        body += bytes(-len(body) % 32)
    names = b"\0.shstrtab\0" + section + b"\0"
    header = bytearray(64)
    header[:5] = b"\x7fELF\x02"
    struct.pack_into("<Q", header, 0x28, 64 + len(names) + len(body))
    struct.pack_into("<HH", header, 0x3C, 3, 1)
    table = [
        (0, 0, 0, 0, 0, 0, 0, 0, 0, 0),
        (1, 3, 0, 0, 64, len(names), 0, 0, 1, 0),
        (11, 1, 0, 0, 64 + len(names), len(body), 0, 0, 1, 0),
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes(header) + names + body + b"".join(struct.pack("<IIQQQQIIQQ", *row) for row in table))
    return path


def test_every_entry_of_every_container_counts(tmp_path: Path) -> None:
    first, second = ((MACHINE_CODE, 75), (MACHINE_CODE, 90)), ((MACHINE_CODE, 120), (PTX, 120), (7, 99))
    library = write_library(tmp_path / "lib.so", first, second)
    assert codes_of(library) == {Code(75), Code(90), Code(120), Code(120, is_ptx=True)}
    assert in_words(codes_of(library)) == "7.5, 9.0, 12.0 and later ones from 12.0 on"


@pytest.mark.parametrize(
    ("codes", "capability", "runs"),
    [
        ([Code(80)], "8.0", True),
        ([Code(80)], "8.9", True),
        ([Code(89)], "8.6", False),
        ([Code(90)], "10.0", False),
        ([Code(120)], "10.0", False),
        ([Code(90, is_ptx=True)], "10.0", True),
        ([Code(120, is_ptx=True)], "10.0", False),
        ([], "9.0", False),
    ],
)
def test_machine_code_runs_in_its_generation_and_ptx_on_what_is_later(
    codes: list[Code], capability: str, runs: bool
) -> None:
    assert has_code(codes, capability) is runs


@pytest.mark.parametrize("content", [b"", b"\x7fELF\x02", b"no library at all" * 10])
def test_a_file_that_says_nothing_is_no_objection(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "lib.so"
    path.write_bytes(content)
    assert codes_of(path) == frozenset()
    assert codes_of(tmp_path / "none.so") == frozenset()
    assert codes_of(write_library(tmp_path / "other.so", section=b".something")) == frozenset()


def machine_with(tmp_path: Path, *gpus: FakeGpu) -> GpuBench:
    bench = GpuBench.of(*gpus)
    write_library(tmp_path / "capi" / "libonnxruntime_providers_cuda.so", ((MACHINE_CODE, 80), (MACHINE_CODE, 90)))
    bench.onnxruntime.__file__ = str(tmp_path / "__init__.py")  # type: ignore[attr-defined]
    return bench


@pytest.mark.parametrize("is_there", [True, False])
def test_without_cudnn_onnxruntime_serves_on_no_gpu_and_says_what_to_install(
    is_there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = SimpleNamespace(get_available_providers=lambda: [PROVIDER], preload_dlls=lambda: print("found nothing"))
    monkeypatch.setitem(sys.modules, "onnxruntime", module)
    asked = []

    def load(name: str) -> None:
        asked.append(name)
        if not is_there:
            raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr("convoy.app.engines.machine.ctypes.CDLL", load)
    found = _find_onnxruntime()
    assert asked == ["libcudnn.so.9"]
    assert (found.module is module) == is_there
    assert is_there or "cuDNN does not load (libcudnn.so.9: cannot open" in found.reason


def test_where_one_of_two_gpus_has_code_that_one_serves(tmp_path: Path) -> None:
    bench = machine_with(tmp_path, FakeGpu("Fake B200", (10, 0)), FakeGpu("Fake H200"))
    onnx_models.shift(tmp_path / "store" / "shift" / "1" / "model.onnx", 1.0)
    options = LoadOptions("auto", 1, 4, machine=bench.machine)
    for store, name in ((DEMO_STORE, "digits"), (tmp_path / "store", "shift")):
        model = load(Store(store).versions(name)[0], options)
        assert [proved.engine.info.device for proved in model.engines] == ["cuda:1"]
        assert any("on cuda:0: " in why and "no kernels for Fake B200" in why for why in model.skipped)
