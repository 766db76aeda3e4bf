"""What is carried to a GPU machine: only that GPU's machine code, never too much, joined again when it was cut."""

from __future__ import annotations

import struct
import zipfile
from pathlib import Path

import pytest

from tests.gpu.proof.__main__ import unpack
from tests.gpu.proof.pack import PROVIDER, cut, pack_wheel, prune

CODE = 256


def piece(kind: int, architecture: int) -> bytes:
    """One piece of a container: a header of 64 bytes, then code that tells its architecture."""
    header = bytearray(struct.pack("<HHIQ", kind, 0, 64, CODE).ljust(64, b"\0"))
    struct.pack_into("<I", header, 28, architecture)
    return bytes(header) + bytes([architecture]) * CODE


def container(*pieces: bytes) -> bytes:
    body = b"".join(pieces)
    return struct.pack("<I", 0xBA55ED50) + struct.pack("<HHQ", 1, 16, len(body)) + body


COMMON = container(piece(2, 80), piece(2, 90), piece(2, 120))
LIBRARY = b"ELF" + COMMON + b"between" + container(piece(2, 90), piece(2, 120)) + container(piece(1, 90)) + b"end"


def left(library: bytes | bytearray, architecture: int) -> int:
    return bytes(library).count(bytes([architecture]) * CODE)


@pytest.mark.parametrize(("keeps_special", "count"), [(True, 3), (False, 2)])
def test_the_code_of_other_gpus_becomes_zeros(keeps_special: bool, count: int) -> None:
    library = bytearray(LIBRARY)
    prune(library, 90, keeps_special=keeps_special)
    assert (left(library, 80), left(library, 90), left(library, 120)) == (0, count, 0)
    assert len(library) == len(LIBRARY)
    assert library.startswith(b"ELF")
    assert library.endswith(b"end")


def wheel(folder: Path) -> Path:
    path = folder / "onnxruntime_gpu-1.0-cp312-cp312-linux_x86_64.whl"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr(f"onnxruntime/capi/{PROVIDER}", LIBRARY)
        file.writestr("onnxruntime/capi/libonnxruntime_providers_tensorrt.so", b"left out")
        file.writestr("onnxruntime/__init__.py", "NAME = 'carried'\n")
    return path


@pytest.mark.parametrize("halves", [False, True])
def test_what_was_packed_is_there_again_on_the_other_machine(tmp_path: Path, halves: bool) -> None:
    out, site = tmp_path / "carried", tmp_path / "there" / "site"
    out.mkdir()
    site.mkdir(parents=True)
    packed = out / "onnxruntime.tar.xz"
    pack_wheel(wheel(tmp_path), packed, 90, keeps_special=False)
    if halves:
        cut(packed)
        assert not packed.exists()
        with pytest.raises(SystemExit, match=r"onnxruntime\.tar\.xz: only piece \[2\] of 2 is there"):
            unpack([out / "2of2"], site)
    unpack([out], site)
    assert left((site / "onnxruntime" / "capi" / PROVIDER).read_bytes(), 90) == 2
    assert (site / "onnxruntime" / "__init__.py").exists()
    assert not list(site.rglob("*tensorrt*"))
