"""What is carried to a machine without a network: packed small, unpacked once, found by children."""

from __future__ import annotations

import importlib.util
import io
import os
import struct
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.gpu.proof import carry, pack
from tests.gpu.proof.fat_binaries import architectures, keep_only

PTX, CUBIN = 1, 2


def piece(kind: int, architecture: int, code: bytes) -> bytes:
    header = struct.pack("<HHIQ", kind, 1, 64, len(code)) + bytes(12) + struct.pack("<I", architecture)
    return header.ljust(64, b"\0") + code


def fat_binary(*pieces: bytes) -> bytes:
    body = b"".join(pieces)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


CODE = b"\x7fELF" + b"k" * 124
LIBRARY = b"".join(
    [
        b"host code" * 9,
        fat_binary(piece(CUBIN, 80, CODE), piece(CUBIN, 90, CODE), piece(PTX, 90, CODE)),
        b"more host code",
        fat_binary(piece(CUBIN, 90, CODE), piece(CUBIN, 120, CODE)),
        # The four bytes by chance, and at the very end.
        struct.pack("<IHHQ", 0xBA55ED50, 1, 16, 1 << 40),
        struct.pack("<I", 0xBA55ED50),
    ]
)


def test_only_the_wanted_machine_code_stays_and_nothing_moves() -> None:
    assert architectures(LIBRARY) == {"sm_80": 1, "sm_90": 2, "sm_120": 1, "ptx_90": 1}
    pruned = bytearray(LIBRARY)
    assert keep_only(pruned, 90) == 2 * len(CODE)
    assert architectures(pruned) == {"sm_90": 2, "ptx_90": 1}
    assert len(pruned) == len(LIBRARY)
    assert pruned.count(CODE) == 3
    changed = [index for index, (old, new) in enumerate(zip(LIBRARY, pruned, strict=True)) if old != new]
    assert len(changed) == 2 * len(CODE)


def wheel(path: Path, **members: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as file:
        for name, content in members.items():
            file.writestr(name, content)
    return path


def gpu_wheel(folder: Path) -> Path:
    return wheel(
        folder / "onnxruntime_gpu-9.9-cp312-cp312-linux_x86_64.whl",
        **{
            "onnxruntime/__init__.py": b"__version__ = '9.9'\n",
            "onnxruntime/capi/libonnxruntime_providers_cuda.so": LIBRARY,
            "onnxruntime/capi/libonnxruntime_providers_tensorrt.so": b"not needed",
            "onnxruntime/capi/libonnxruntime.so.9.9": b"not needed",
            "onnxruntime/tools/big.py": b"not needed",
            "onnxruntime_gpu-9.9.dist-info/METADATA": b"Name: onnxruntime-gpu\nVersion: 9.9\n",
        },
    )


def test_a_packed_wheel_is_unpacked_and_imported_before_what_is_installed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    carried = tmp_path / "carried"
    assert pack.main([str(gpu_wheel(tmp_path)), "9.0", str(carried)]) == 0
    assert "sm_90.tar.xz: " in capsys.readouterr().out
    extra = {"extra.py": b"x = 1\n", "extra-1.data/purelib/spread.py": b"y = 2\n"}
    wheel(carried / "extra-1-py3-none-any.whl", **extra)
    site = carry.unpack(carried)
    library = (site / "onnxruntime" / "capi" / "libonnxruntime_providers_cuda.so").read_bytes()
    assert architectures(library) == {"sm_90": 2, "ptx_90": 1}
    assert not [one for one in site.rglob("*") if one.is_file() and one.read_bytes() == b"not needed"]
    said = subprocess.run(
        [sys.executable, "-c", "import onnxruntime, extra, spread; print(onnxruntime.__version__, extra.x, spread.y)"],
        env={**os.environ, **carry.environment(site)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert said.stdout == "9.9 1 2\n"


def test_what_is_cut_into_pieces_may_come_folder_by_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    carried = tmp_path / "carried"
    whole = wheel(tmp_path / "large-1-py3-none-any.whl", **{"large.py": b"x = 1\n", "large.so": LIBRARY})
    assert pack.main([str(whole), "all", str(carried), "--pieces", "3"]) == 0
    assert capsys.readouterr().out.count("of3: ") == 3
    pieces = sorted(carried.glob("*/*"))
    assert [one.name for one in pieces] == [f"large-1-py3-none-any.tar.xz.{number}of3" for number in (1, 2, 3)]
    last = pieces[2].rename(tmp_path / "last")
    with pytest.raises(carry.CarryError, match="piece 3 of 3 is not in"):
        carry.unpack(carried)
    last.rename(carried / pieces[2].name)
    site = carry.unpack(carried)
    assert sorted(one.name for one in site.iterdir()) == ["large.py", "large.so"]
    assert (site / "large.so").read_bytes() == LIBRARY
    assert carry.unpack(carried) == site


def test_it_is_unpacked_once_and_again_when_something_comes(tmp_path: Path) -> None:
    wheel(tmp_path / "a-1-py3-none-any.whl", **{"a.py": b""})
    first = carry.unpack(tmp_path)
    (first / "mark").touch()
    assert carry.unpack(tmp_path) == first
    assert (first / "mark").exists()
    wheel(tmp_path / "b-1-py3-none-any.whl", **{"b.py": b""})
    second = carry.unpack(tmp_path)
    assert second != first
    assert (second / "a.py").exists()


@pytest.mark.parametrize("name", ["a-1-py3-none-any.whl", "a.tar.xz"])
def test_what_is_broken_or_leads_outside_is_refused_and_leaves_nothing(tmp_path: Path, name: str) -> None:
    packed = tmp_path / "carried" / name
    packed.parent.mkdir()
    packed.write_bytes(b"rubbish")
    with pytest.raises(carry.CarryError, match="cannot be unpacked"):
        carry.unpack(packed.parent)
    with tarfile.open(packed.with_name("b.tar"), "w") as tar:
        tar.addfile(tarfile.TarInfo("../outside"), io.BytesIO())
    packed.unlink()
    with pytest.raises(carry.CarryError, match="outside"):
        carry.unpack(packed.parent)
    assert [one.name for one in packed.parent.iterdir()] == ["b.tar"]
    assert not (tmp_path / "outside").exists()


def test_a_wheel_without_code_for_the_gpu_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert pack.main([str(gpu_wheel(tmp_path)), "10.0", str(tmp_path / "carried")]) == 1
    assert "no machine code for sm_100, only for sm_120, sm_80, sm_90" in capsys.readouterr().err
    assert list((tmp_path / "carried").iterdir()) == []


def test_cudas_libraries_are_found_where_pip_put_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("cu13", "cudnn"):
        (tmp_path / "nvidia" / name / "lib").mkdir(parents=True)
    (tmp_path / "nvidia" / "other").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("LD_LIBRARY_PATH", "/given")
    importlib.invalidate_caches()
    libraries = carry.environment(None)["LD_LIBRARY_PATH"].split(os.pathsep)
    assert libraries[:2] == [str(tmp_path / "nvidia" / name / "lib") for name in ("cu13", "cudnn")]
    assert libraries[-1] == "/given"
    assert "PYTHONPATH" not in carry.environment(None)
