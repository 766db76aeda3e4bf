"""`python -m tests.gpu.proof.pack --out carried`: what a GPU machine without a network needs beside the checkout.

Downloads the wheels of the HTTP server and ONNX Runtime's GPU build with pip, and makes the latter small: it leaves out
the machine code of other GPUs, other providers and tools. Refuses to pack more than can be carried.
"""

from __future__ import annotations

import argparse
import io
import lzma
import re
import struct
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[3]
MOST_BYTES = 62 << 20
# What the server imports and a machine with torch, ONNX Runtime and pytest lacks.
HTTP_PACKAGES = (
    *("fastapi", "starlette", "uvicorn", "httptools", "msgspec", "orjson", "pydantic", "pydantic-core"),
    *("pydantic-settings", "python-multipart", "pysimdjson", "simplejpeg", "annotated-types", "typing-inspection"),
    *("python-dotenv", "fastapi-offline", "python-json-logger", "opentelemetry-api"),
)
PROVIDER = "libonnxruntime_providers_cuda.so"
_LEFT_OUT = (
    *("libonnxruntime.so", "libonnxruntime_providers_tensorrt.so", "onnxruntime/tools/", "onnxruntime/datasets/"),
    *("onnxruntime/transformers/models/", "onnxruntime/backend/"),
)
_FILTERS = [
    {"id": lzma.FILTER_X86},
    {"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": 1 << 26},
]
_PLATFORMS = ("manylinux_2_28", "manylinux_2_27", "manylinux_2_17", "manylinux2014", "manylinux_2_5", "manylinux1")

# The container that nvcc writes ("fat binary"): a header, then pieces of code, each with a header of its own.
_MAGIC = struct.pack("<I", 0xBA55ED50)
_CONTAINER, _PIECE = struct.Struct("<HHQ"), struct.Struct("<HHIQ")
_KINDS, _CUBIN, _ARCHITECTURE_AT = (1, 2, 4, 8, 16), 2, 28


class _Cubin(NamedTuple):
    architecture: int
    start: int
    end: int


def prune(library: bytearray, architecture: int, *, keeps_special: bool) -> None:
    """Zero the machine code of other architectures in place; zeros pack to nothing and the file stays loadable.

    Containers without code for the oldest architecture of the library are zeroed as well, unless `keeps_special`. In
    ONNX Runtime they are kernels for attention and quantised language models, which a CNN does not launch. Raises
    ValueError where the library has no code for the architecture.
    """
    containers = [list(one) for one in _containers(library)]
    held = {cubin.architecture for cubins in containers for cubin in cubins}
    if architecture not in held:
        raise ValueError(f"no machine code for sm_{architecture}, only for {sorted(held)}")
    for cubins in containers:
        is_special = min(held) not in {cubin.architecture for cubin in cubins}
        for cubin in cubins:
            if cubin.architecture != architecture or (is_special and not keeps_special):
                library[cubin.start : cubin.end] = bytes(cubin.end - cubin.start)


def _containers(library: bytearray) -> Iterator[Iterator[_Cubin]]:
    position = library.find(_MAGIC)
    while position >= 0:
        if position + 16 <= len(library):
            _, header_bytes, total_bytes = _CONTAINER.unpack_from(library, position + 4)
            end = position + header_bytes + total_bytes
            if end <= len(library):  # else the four bytes stand there by chance
                yield _cubins(library, position + header_bytes, end)
        position = library.find(_MAGIC, position + 4)


def _cubins(library: bytearray, at: int, end: int) -> Iterator[_Cubin]:
    while at + 64 <= end:
        kind, _, header_bytes, nbytes = _PIECE.unpack_from(library, at)
        if kind not in _KINDS or not 32 <= header_bytes <= 4096:
            return
        start = at + header_bytes
        if kind == _CUBIN:
            (architecture,) = struct.unpack_from("<I", library, at + _ARCHITECTURE_AT)
            yield _Cubin(architecture, start, min(start + nbytes, end))
        at = start + nbytes


def pack_wheel(wheel: Path, target: Path, architecture: int | None, *, keeps_special: bool = True) -> None:
    """A wheel as a small .tar.xz, ONNX Runtime's without other GPUs' code.

    Raises ValueError where it is not for this architecture; None keeps all.
    """
    with (
        zipfile.ZipFile(wheel) as source,
        lzma.open(target, "wb", format=lzma.FORMAT_XZ, filters=_FILTERS) as stream,
        tarfile.open(fileobj=stream, mode="w") as tar,
    ):
        for member in source.infolist():
            if member.is_dir() or any(part in member.filename for part in _LEFT_OUT):
                continue
            content = source.read(member)
            if architecture is not None and member.filename.endswith(PROVIDER):
                library = bytearray(content)
                prune(library, architecture, keeps_special=keeps_special)
                content = bytes(library)
            entry = tarfile.TarInfo(member.filename)
            entry.size, entry.mode = len(content), 0o755 if member.filename.endswith(".so") else 0o644
            tar.addfile(entry, io.BytesIO(content))


def cut(whole: Path) -> list[Path]:
    """Cut a file in two, each half in a folder of its own, to be carried one after the other."""
    content = whole.read_bytes()
    half = -(-len(content) // 2)
    pieces = []
    for number, start in ((1, 0), (2, half)):
        piece = whole.parent / f"{number}of2" / f"{whole.name}.{number}of2"
        piece.parent.mkdir(exist_ok=True)
        piece.write_bytes(content[start : start + half])
        pieces.append(piece)
    whole.unlink()
    return pieces


def tree_bytes(root: Path = ROOT) -> int:
    """The size of the checkout: tracked files, and new ones that git does not ignore."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout.split("\0")
    files = (root / name for name in names if name)
    return sum(file.lstat().st_size for file in files if file.is_file() and not file.is_symlink())


def check_size(tree: int, carried: dict[str, int]) -> None:
    """Raise ValueError where a load is too large; `carried` are the bytes of each load, by its name."""
    for name, nbytes in carried.items():
        if (whole := tree + nbytes) > MOST_BYTES:
            raise ValueError(
                f"{name} and the checkout are {whole / 2**20:.1f} MiB ({tree / 2**20:.1f} of them the checkout); "
                f"{MOST_BYTES >> 20} MiB can be carried. Remove untracked files from the checkout, or leave out --whole"
            )


def loads(out: Path) -> dict[str, int]:
    """The bytes of each load in the folder: the whole folder, or each half beside what belongs to both."""
    common = sum(file.stat().st_size for file in out.glob("*") if file.is_file())
    halves = {folder.name: sum(f.stat().st_size for f in folder.glob("*")) for folder in sorted(out.glob("?of2"))}
    if not halves:
        return {out.name: common}
    # The wheels travel with the first half only.
    return {f"{out.name}/{name}": nbytes + (common if name == "1of2" else 0) for name, nbytes in halves.items()}


def _download(packages: list[str], python: str, folder: Path) -> None:
    platforms = [word for one in _PLATFORMS for word in ("--platform", f"{one}_x86_64")]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", "--implementation", "cp", "--python-version", python, *platforms]
    subprocess.run([*command, "--dest", str(folder), *packages], check=True)


def pinned(packages: tuple[str, ...], constraints: Path = ROOT / "constraints.txt") -> list[str]:
    """The packages with the versions that this checkout is tested with."""
    versions = dict(re.findall(r"^([\w.-]+)==(\S+)", constraints.read_text(), re.MULTILINE))
    normal = {name.lower().replace("_", "-"): version for name, version in versions.items()}
    return [f"{name}=={normal[name]}" if name in normal else name for name in packages]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.proof.pack", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="an empty folder for what is packed")
    parser.add_argument("--python", default="3.12", help="the GPU machine's Python [3.12]")
    parser.add_argument("--capability", default="9.0", help="the GPU's compute capability [9.0: H100 and H200]")
    parser.add_argument("--whole", action="store_true", help="keep every kernel for that GPU, in two pieces")
    parser.add_argument("--rtx", action="store_true", help="pack TensorRT for RTX instead, in two pieces")
    options = parser.parse_args(arguments)
    out: Path = options.out
    try:
        if out.exists() and any(out.iterdir()):
            raise ValueError(f"{out} is not empty; name another folder or remove it")
        out.mkdir(parents=True, exist_ok=True)
        if options.rtx:
            _pack_rtx(out, options.python)
        else:
            _pack_onnxruntime(out, options.python, int(options.capability.replace(".", "")), options.whole)
        check_size(tree_bytes(), loads(out))
    except (OSError, ValueError, zipfile.BadZipFile, subprocess.CalledProcessError) as error:
        print(f"pack: {error}", file=sys.stderr)
        return 1
    for name, nbytes in loads(out).items():
        print(f"{name}: {nbytes / 2**20:.1f} MiB, and the checkout {tree_bytes() / 2**20:.1f} MiB")
    return 0


def _pack_onnxruntime(out: Path, python: str, architecture: int, is_whole: bool) -> None:
    _download(pinned(HTTP_PACKAGES), python, out)
    with tempfile.TemporaryDirectory() as folder:
        _download(pinned(("onnxruntime-gpu",)), python, Path(folder))
        (wheel,) = Path(folder).glob("*.whl")
        target = out / f"{wheel.stem}-sm_{architecture}.tar.xz"
        pack_wheel(wheel, target, architecture, keeps_special=is_whole)
    if is_whole:
        cut(target)


def _pack_rtx(out: Path, python: str) -> None:
    """The package is one that pip makes a wheel of, the bindings for a Python, and the libraries."""
    (version,) = re.findall(r"^tensorrt-rtx\S*==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)[:1]
    package = ["pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(out), f"tensorrt-rtx-cu13=={version}"]
    subprocess.run([sys.executable, "-m", *package], check=True)
    _download([f"tensorrt-rtx-cu13-bindings=={version}"], python, out)
    with tempfile.TemporaryDirectory() as folder:
        _download([f"tensorrt-rtx-cu13-libs=={version}"], python, Path(folder))
        (wheel,) = Path(folder).glob("*.whl")
        target = out / f"{wheel.stem}.tar.xz"
        pack_wheel(wheel, target, None)
    cut(target)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
