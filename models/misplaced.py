"""Find files and folders in a store that are not models or versions, and say where they should be.

Uses names and kinds only; no file is read. The same for a local store and one behind a URL.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from convoy.models.bundle import MANIFEST
from convoy.models.store import BARE_MODEL, Store, is_name, is_version, shown_name

# Maps names to whether they are folders.
Entries = Mapping[str, bool]
# Lists a folder by its relative path. Raises OSError.
Look = Callable[[str], Entries]

_NAME_RULE = "up to 128 letters, digits, '.', '_' and '-', starting with a letter or digit"
_VERSION_RULE = "a number of up to nine digits, from 1 on and without leading zeros"
# Created by file systems at the root of a disk.
_NOBODYS = frozenset({"lost+found"})


def misplaced_in(store: Store) -> list[str]:
    """A sentence for each thing in a local store that cannot be a model. Raises OSError."""
    if store.only is not None:
        return []
    return [*misplaced_models(str(store.root), _entries(store.root)), *_broken_links(store.root)]


def misplaced_of(store: Store, name: str) -> list[str]:
    """The same for one of its models, and for what cannot be a version. Raises OSError."""
    if store.is_flat or store.only not in (None, name):
        return []
    folder = store.root if store.only is not None else store.root / name
    try:
        if broken := _broken_links(folder):
            return broken
        return misplaced_versions(str(folder), _entries(folder), lambda path: _entries(folder / path))
    except (FileNotFoundError, NotADirectoryError):  # it was just removed
        return []


def _entries(folder: Path) -> Entries:
    """The folder's entries. Raises OSError."""
    with os.scandir(folder) as entries:
        return {entry.name: _is_folder(entry) for entry in entries}


def _is_folder(entry: os.DirEntry[str]) -> bool:
    """Whether it is a folder; true if that cannot be determined."""
    try:
        return entry.is_dir()
    except OSError:
        return True


def _broken_links(folder: Path) -> list[str]:
    """A sentence for each broken link. Raises OSError."""
    with os.scandir(folder) as entries:
        names = sorted(entry.name for entry in entries if entry.is_symlink() and not entry.name.startswith("."))
    broken = [name for name in names if not os.path.lexists(os.path.realpath(folder / name))]
    return [f"{folder}/{_part(name)} is not served: the link is broken; fix or remove it" for name in broken]


def misplaced_models(store: str, entries: Entries) -> list[str]:
    """A sentence for each entry of a folder of models that cannot be a model."""
    return [
        *(_no_name(store, name, entries) for name in _folders(entries) if not is_name(name)),
        *(_loose_file(store, name) for name in _graphs(entries)),
    ]


def misplaced_versions(folder: str, entries: Entries, look: Look) -> list[str]:
    """A sentence for each entry of a model's folder that is meant as a version and is not one.

    If there is nothing else, a sentence on what the folder lacks. `look` lists folders in it that are not versions.
    Raises OSError.
    """
    others = [name for name in _folders(entries) if not is_version(name)]
    meant = [name for name in others if _is_meant_as_version(name, look(name))]
    told = [_no_version(folder, name, entries) for name in meant]
    if told or any(is_version(name) for name in _folders(entries)):
        return told
    return [f"{folder} is not served: {_what_it_lacks(folder, entries, others, look)}"]


def _folders(entries: Entries) -> list[str]:
    """Visible folders, sorted."""
    return sorted(
        name for name, is_folder in entries.items() if is_folder and not name.startswith(".") and name not in _NOBODYS
    )


def _graphs(entries: Entries) -> list[str]:
    return sorted(
        name
        for name, is_folder in entries.items()
        if not is_folder and name.endswith(".onnx") and not name.startswith(".")
    )


def _no_name(store: str, name: str, entries: Entries) -> str:
    near = re.sub(r"[^A-Za-z0-9._-]+", "-", name).lstrip("._-")[:128].rstrip("-")
    hint = f", such as {near}" if is_name(near) and near not in entries else ""
    why = f"{shown_name(name)} cannot be a model's name"
    return f"{store}/{_part(name)} is not served: {why}; rename the folder{hint}: {_NAME_RULE}"


def _loose_file(store: str, name: str) -> str:
    model = name.removesuffix(".onnx")
    return (
        f"{store}/{_part(name)} is not served: it is not in a model's folder; "
        f"move it to {store}/{model if is_name(model) else 'NAME'}/1/{BARE_MODEL}"
    )


def _is_meant_as_version(name: str, inside: Entries) -> bool:
    """Whether it is meant as a version; other folders, such as assets and notes, may lie beside versions."""
    return _holds_model(inside) or re.fullmatch(r"[vV]?[0-9]+", name) is not None


def _holds_model(entries: Iterable[str]) -> bool:
    return MANIFEST in entries or BARE_MODEL in entries


def _no_version(folder: str, name: str, entries: Entries) -> str:
    digits = re.findall(r"[0-9]+", name)
    near = str(int(digits[0])) if len(digits) == 1 else ""
    hint = f" to {near}" if is_version(near) and near not in entries else ""
    return f"{folder}/{_part(name)} is not served: a version's folder is named {_VERSION_RULE}; rename it{hint}"


def _what_it_lacks(folder: str, entries: Entries, others: Iterable[str], look: Look) -> str:
    if MANIFEST in entries:
        return f"a bundle must be in a version's folder; move its files to {folder}/1"
    graphs = _graphs(entries)
    if graphs:
        file = BARE_MODEL if BARE_MODEL in graphs else graphs[0]
        return f"{file} is not in a version's folder; move it to {folder}/1/{BARE_MODEL}"
    for name in others:
        if any(is_version(one) for one in _folders(look(name))):
            return f"it is a folder of models; move them up into the store, or serve --store {folder}"
    return f"it has no version; put the model into {folder}/1, as {MANIFEST} with its files or as {BARE_MODEL}"


def _part(name: str) -> str:
    """A name in a path, with control characters escaped, cut to a line."""
    return shown_name(name)[1:-1]
