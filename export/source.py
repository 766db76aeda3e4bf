"""Where a network comes from: SOURCE on the command line, as a record.

Knows the spellings and which of them this version can do. Loads nothing; the torch child does that.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from export.torch_job import SourceKind
from models import zoo
from models.errors import UsageError

_SOURCES = "use zoo:NAME, torchvision:NAME or path/to/file.py:factory"


@dataclass(frozen=True, slots=True)
class Source:
    """`name` is the registry's name, or the factory in `file`."""

    kind: SourceKind
    name: str
    file: Path | None = None

    @property
    def shown(self) -> str:
        """As it stands in the manifest: a user's file by its name alone, for folders are the machine's business."""
        return f"{self.file.name}:{self.name}" if self.file else f"{self.kind}:{self.name}"


def parse_source(text: str) -> Source:
    """SOURCE as a record. Raises UsageError for what is not one, or not in this version."""
    head, _, tail = text.rpartition(":")
    if head == "zoo":
        zoo.entry(tail)
        return Source("zoo", tail)
    if head == "torchvision":
        return Source("torchvision", tail)
    if head.endswith(".py"):
        file = Path(head)
        if not file.is_file():
            raise UsageError(f"SOURCE {text!r}: there is no file {head}; check the path")
        if not tail.isidentifier():
            raise UsageError(f"SOURCE {text!r}: {tail!r} is not the name of a function; write {head}:factory")
        return Source("file", tail, file.resolve())
    if text.endswith(".py"):
        raise UsageError(
            f"SOURCE {text!r} lacks its function; write {text}:factory, a function that returns the network"
        )
    if head == "timm" or text.endswith((".onnx", ".pt2")):
        raise UsageError(f"SOURCE {text!r} is not supported by this version; {_SOURCES}")
    raise UsageError(f"SOURCE {text!r} is not understood; {_SOURCES}")
