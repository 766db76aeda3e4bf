"""`python -m tests.gpu.proof.pack WHEEL CAPABILITY DIR`: ONNX Runtime's GPU build, small enough to carry.

Of its wheel (some 200 MB packed) it takes what a session with the CUDA provider needs, without the machine code of
other GPUs: about 60 MB. CAPABILITY is the GPU's, such as 9.0; the wheel must be one for the Python of that machine.
"""

from __future__ import annotations

import argparse
import io
import lzma
import sys
import tarfile
import zipfile
from pathlib import Path

from tests.gpu.proof.fat_binaries import architectures, keep_only

_PROVIDER = "libonnxruntime_providers_cuda.so"
# Other providers, the library for programs that are not Python, tools and sample networks.
_LEFT_OUT = (
    *("libonnxruntime.so", "libonnxruntime_providers_tensorrt.so", "onnxruntime/tools/"),
    *("onnxruntime/transformers/models/", "onnxruntime/datasets/", "onnxruntime/backend/"),
)
_FILTERS = (
    {"id": lzma.FILTER_X86},
    {"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": 1 << 26},
)


def pack(wheel: Path, architecture: int, folder: Path) -> Path:
    """Raises ValueError where the wheel has no code for it."""
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"{wheel.stem}-sm_{architecture}.tar.xz"
    aside = target.with_suffix(".part")
    try:
        _write(wheel, architecture, aside)
        return aside.replace(target)
    finally:
        aside.unlink(missing_ok=True)


def _write(wheel: Path, architecture: int, target: Path) -> None:
    with (
        zipfile.ZipFile(wheel) as source,
        lzma.open(target, "wb", format=lzma.FORMAT_XZ, filters=list(_FILTERS)) as stream,
        tarfile.open(fileobj=stream, mode="w") as tar,
    ):
        for member in source.infolist():
            if member.is_dir() or any(part in member.filename for part in _LEFT_OUT):
                continue
            content = source.read(member)
            if member.filename.endswith(_PROVIDER):
                content = _pruned(content, architecture)
            entry = tarfile.TarInfo(member.filename)
            entry.size, entry.mode = len(content), 0o755 if member.filename.endswith(".so") else 0o644
            tar.addfile(entry, io.BytesIO(content))


def _pruned(library: bytes, architecture: int) -> bytes:
    held = architectures(library)
    if f"sm_{architecture}" not in held:
        others = ", ".join(name for name in held if name.startswith("sm_"))
        raise ValueError(f"this wheel has no machine code for sm_{architecture}, only for {others}")
    whole = bytearray(library)
    keep_only(whole, architecture)
    return bytes(whole)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="pack", description="Pack ONNX Runtime's GPU wheel to be carried.")
    parser.add_argument("wheel", type=Path)
    parser.add_argument("capability", help="the GPU's compute capability, such as 9.0")
    parser.add_argument("folder", type=Path, help="the folder that will be carried; CARRY=DIR names it there")
    options = parser.parse_args(arguments)
    try:
        target = pack(options.wheel, int(options.capability.replace(".", "")), options.folder)
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        print(f"pack: {error}", file=sys.stderr)
        return 1
    print(f"{target}: {target.stat().st_size / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
