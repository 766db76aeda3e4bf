"""Where a network comes from: SOURCE on the command line, as a record.

Knows the spellings and what each of them needs. Loads nothing; the torch child does that.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

from convoy.export.sources.torch_job import SourceKind
from convoy.models import zoo
from convoy.models.errors import UsageError

_SOURCES = "use zoo:NAME, torchvision:NAME, timm:NAME, path/to/file.py:factory, model.onnx or model.pt2"


@dataclass(frozen=True, slots=True)
class ModelSource:
    """`name` is the registry's name, the factory in `file`, or the file's own name.

    `published` names the registry's weights where those are used, or says that they are random.
    """

    kind: SourceKind
    name: str
    file: Path | None = None
    published: str = ""

    @property
    def shown(self) -> str:
        """As it stands in the manifest: a user's file by its name alone, for folders are the machine's business."""
        beside = f" ({self.published})" if self.published else ""
        if self.file is None:
            return f"{self.kind}:{self.name}{beside}"
        return f"{self.file.name}:{self.name}{beside}" if self.kind == "file" else self.file.name

    @property
    def has_registry(self) -> bool:
        """Whether somebody publishes the network with weights, and says how images are prepared for them."""
        return self.kind in ("torchvision", "timm")

    @property
    def carries_weights(self) -> bool:
        """Whether graph and weights are one file."""
        return self.kind in ("onnx", "pt2")


def parse_source(text: str, *, trust: bool = False) -> ModelSource:
    """SOURCE as a record. Raises UsageError for what is not one, is not there, or needs `trust` and lacks it."""
    head, _, tail = text.rpartition(":")
    if head == "zoo":
        zoo.entry(tail)
        return ModelSource("zoo", tail)
    if head == "torchvision":
        return ModelSource("torchvision", tail)
    if head == "timm":
        if importlib.util.find_spec("timm") is None:
            raise UsageError(f"SOURCE {text!r} needs timm, which is not installed; run `pip install timm`")
        return ModelSource("timm", tail)
    if head.endswith(".py"):
        return _factory(text, head, tail)
    if text.endswith(".py"):
        raise UsageError(
            f"SOURCE {text!r} lacks its function; write {text}:factory, a function that returns the network"
        )
    if text.endswith(".onnx"):
        return ModelSource("onnx", Path(text).name, _existing(text, text))
    if text.endswith(".pt2"):
        if not trust:
            raise UsageError(
                f"SOURCE {text!r} carries pickle, which can run any code when it is read; pass --trust if you know "
                "who made it"
            )
        return ModelSource("pt2", Path(text).name, _existing(text, text))
    raise UsageError(f"SOURCE {text!r} is not understood; {_SOURCES}")


def _factory(text: str, head: str, tail: str) -> ModelSource:
    file = _existing(text, head)
    if not tail.isidentifier():
        raise UsageError(f"SOURCE {text!r}: {tail!r} is not the name of a function; write {head}:factory")
    return ModelSource("file", tail, file)


def parse_function(text: str, flag: str) -> tuple[Path, str]:
    """`file.py:function` of an option. Raises UsageError."""
    head, _, tail = text.rpartition(":")
    if not head.endswith(".py") or not tail.isidentifier():
        raise UsageError(f"{flag} {text!r} is not understood; write file.py:function")
    return _existing(text, head, flag), tail


def _existing(text: str, path: str, flag: str = "SOURCE") -> Path:
    file = Path(path)
    if not file.is_file():
        raise UsageError(f"{flag} {text!r}: there is no file {path}; check the path")
    return file.resolve()
