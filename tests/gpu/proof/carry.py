"""What was carried along to a machine without a network: unpacked once, and put where children find it.

A folder of wheels and of packed tars (`pack` makes one of ONNX Runtime's GPU build). Needs the standard library only,
because it may bring everything else.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

_TARS = (".tar", ".tar.gz", ".tar.bz2", ".tar.xz")


class CarryError(Exception):
    """The folder cannot be used; the message says why."""


def unpack(folder: Path) -> Path:
    """Everything in `folder`, in one folder inside it that can stand on the path. What is unpacked already stays.

    Raises CarryError.
    """
    packed = [one for one in sorted(folder.glob("*")) if one.name.endswith((".whl", *_TARS))]
    if not packed:
        raise CarryError(f"{folder} has no wheel and no .tar.xz in it")
    seen = hashlib.sha256(repr([(one.name, one.stat().st_size) for one in packed]).encode()).hexdigest()[:12]
    site = folder / f"unpacked-{seen}"
    if site.exists():
        return site
    aside = folder / f".unpacking-{os.getpid()}"
    try:
        for one in packed:
            _unpack_one(one, aside)
        aside.rename(site)
    except (OSError, zipfile.BadZipFile, tarfile.TarError) as error:
        raise CarryError(f"{folder} cannot be unpacked ({error})") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return site


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
