"""What was carried along to a machine without a network: unpacked once, and put where children find it.

A folder of wheels and of packed tars, which `pack` makes of large wheels, whole or in pieces; what comes piece by piece
may lie in folders inside it. Needs the standard library only, because it may bring everything else.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

_TARS = (".tar", ".tar.gz", ".tar.bz2", ".tar.xz")
_PIECE = re.compile(r"(.+)\.(\d+)of(\d+)")
_UNPACKED, _UNPACKING = "unpacked-", ".unpacking-"


class CarryError(Exception):
    """The folder cannot be used; the message says why."""


def unpack(folder: Path) -> Path:
    """Everything in `folder`, in one folder inside it that can stand on the path. What is unpacked already stays.

    Raises CarryError.
    """
    packed = _packed(folder)
    if not packed:
        raise CarryError(f"{folder} has no wheel and no .tar.xz in it")
    files = [(name, [one.stat().st_size for one in pieces]) for name, pieces in packed.items()]
    site = folder / f"{_UNPACKED}{hashlib.sha256(repr(files).encode()).hexdigest()[:12]}"
    if site.exists():
        return site
    aside = folder / f"{_UNPACKING}{os.getpid()}"
    try:
        for name, pieces in packed.items():
            whole = _joined(name, pieces, aside)
            _unpack_one(whole, aside)
            if len(pieces) > 1:
                whole.unlink()
        aside.rename(site)
    except (OSError, zipfile.BadZipFile, tarfile.TarError) as error:
        raise CarryError(f"{folder} cannot be unpacked ({error})") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return site


def _packed(folder: Path) -> dict[str, list[Path]]:
    """Everything by its name: a file, or its pieces in their order. Raises CarryError where one is missing."""
    own = (_UNPACKED, _UNPACKING)
    inside = [one for one in sorted(folder.glob("*")) if one.is_dir() and not one.name.startswith(own)]
    found: dict[str, dict[int, Path]] = {}
    counts: dict[str, int] = {}
    for file in (one for place in (folder, *inside) for one in sorted(place.glob("*"))):
        piece = _PIECE.fullmatch(file.name)
        name, number, count = (piece[1], int(piece[2]), int(piece[3])) if piece else (file.name, 1, 1)
        if name.endswith((".whl", *_TARS)):
            found.setdefault(name, {})[number] = file
            counts[name] = count
    for name, count in counts.items():
        missing = [number for number in range(1, count + 1) if number not in found[name]]
        if missing:
            raise CarryError(f"{name}: piece {missing[0]} of {count} is not in {folder} nor in a folder inside it")
    return {name: [pieces[number] for number in sorted(pieces)] for name, pieces in sorted(found.items())}


def _joined(name: str, pieces: list[Path], aside: Path) -> Path:
    """The one file that they are; where there are several, it lies in `aside` and is taken away with its unpacking."""
    if len(pieces) == 1:
        return pieces[0]
    aside.mkdir(parents=True, exist_ok=True)
    with (aside / name).open("wb") as whole:
        for piece in pieces:
            with piece.open("rb") as part:
                shutil.copyfileobj(part, whole)
    return aside / name


def _unpack_one(packed: Path, site: Path) -> None:
    if not packed.name.endswith(".whl"):
        with tarfile.open(packed) as tar:
            tar.extractall(site, filter="data")
        return
    with zipfile.ZipFile(packed) as wheel:
        wheel.extractall(site)
    # What an installer would spread over the environment.
    for data in site.glob("*.data"):
        for kind in ("purelib", "platlib"):
            if (data / kind).is_dir():
                shutil.copytree(data / kind, site, dirs_exist_ok=True)
        shutil.rmtree(data)


def environment(site: Path | None) -> dict[str, str]:
    """What a child's environment needs besides ours, so that it finds the carried libraries, and CUDA's.

    CUDA's are the ones that came with pip, with torch for instance: `nvidia/*/lib` wherever Python looks.
    """
    libraries = [str(one) for one in _nvidia_libraries(site)]
    found: dict[str, str] = {}
    if libraries:
        found["LD_LIBRARY_PATH"] = os.pathsep.join([*libraries, *_given("LD_LIBRARY_PATH")])
    if site is not None:
        found["PYTHONPATH"] = os.pathsep.join([str(site.resolve()), *_given("PYTHONPATH")])
    return found


def _given(name: str) -> list[str]:
    return [value] if (value := os.environ.get(name)) else []


def _nvidia_libraries(site: Path | None) -> Iterator[Path]:
    spec = importlib.util.find_spec("nvidia")
    roots = [Path(one) for one in (spec.submodule_search_locations or ())] if spec is not None else []
    for root in ([site / "nvidia"] if site is not None else []) + roots:
        yield from sorted(one for one in root.resolve().glob("*/lib") if one.is_dir())
