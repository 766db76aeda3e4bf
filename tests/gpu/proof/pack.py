"""`python -m tests.gpu.proof.pack WHEEL CAPABILITY DIR`: a large wheel, small enough to carry.

Of ONNX Runtime's GPU build (some 200 MB packed) it takes what a session with the CUDA provider needs, without the
machine code of other GPUs: about 60 MB. CAPABILITY is the GPU's, such as 9.0; the wheel must be one for the Python of
that machine. With "all" nothing is left out, and where that is still too large, `--pieces 2` cuts it in two, each in a
folder of its own: TensorRT for RTX's libraries, 95 MB, become two pieces of 32 MB.
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


def pack(wheel: Path, architecture: int | None, folder: Path, pieces: int = 1) -> list[Path]:
    """What was written. Raises ValueError where the wheel has no code for the architecture; None takes it whole."""
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / (f"{wheel.stem}.tar.xz" if architecture is None else f"{wheel.stem}-sm_{architecture}.tar.xz")
    aside = target.with_suffix(".part")
    try:
        _write(wheel, architecture, aside)
        return [aside.replace(target)] if pieces == 1 else _cut(aside, target, pieces)
    finally:
        aside.unlink(missing_ok=True)


def _cut(whole: Path, target: Path, pieces: int) -> list[Path]:
    """Pieces as `carry` joins them."""
    written = []
    content = whole.read_bytes()
    size = -(-len(content) // pieces)
    for number in range(pieces):
        name = f"{number + 1}of{pieces}"
        piece = target.parent / name / f"{target.name}.{name}"
        piece.parent.mkdir(exist_ok=True)
        piece.write_bytes(content[number * size : (number + 1) * size])
        written.append(piece)
    return written


def _write(wheel: Path, architecture: int | None, target: Path) -> None:
    with (
        zipfile.ZipFile(wheel) as source,
        lzma.open(target, "wb", format=lzma.FORMAT_XZ, filters=list(_FILTERS)) as stream,
        tarfile.open(fileobj=stream, mode="w") as tar,
    ):
        for member in source.infolist():
            if member.is_dir() or any(part in member.filename for part in _LEFT_OUT):
                continue
            content = source.read(member)
            if architecture is not None and member.filename.endswith(_PROVIDER):
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
    parser = argparse.ArgumentParser(prog="pack", description="Pack a large wheel to be carried.")
    parser.add_argument("wheel", type=Path)
    parser.add_argument("capability", help="the GPU's compute capability, such as 9.0; all: for every GPU")
    parser.add_argument("folder", type=Path, help="the folder that will be carried; CARRY=DIR names it there")
    parser.add_argument("--pieces", type=int, default=1, help="into how many files, each in a folder of its own")
    options = parser.parse_args(arguments)
    try:
        architecture = None if options.capability == "all" else int(options.capability.replace(".", ""))
        written = pack(options.wheel, architecture, options.folder, options.pieces)
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        print(f"pack: {error}", file=sys.stderr)
        return 1
    for target in written:
        print(f"{target}: {target.stat().st_size / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
