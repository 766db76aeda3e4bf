"""The variants of `convoy train --compare`: devices, precisions, layouts and ways to run the network, one after the
other.

Parses their names; needs no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, get_args

from convoy.models.errors import UsageError
from convoy.models.train_options import Layout, TrainOptions, TrainPrecision

DEVICES = ("cpu", "cuda")
# Defaults for what a variant does not name.
ALL = "all"
RUNS = ("eager", "compiled")
_ASPECTS: dict[str, tuple[str, ...]] = {
    "precision": get_args(TrainPrecision),
    "layout": get_args(Layout),
    "run": RUNS,
}
_GRAMMAR = (
    f"use {' or '.join(DEVICES)}, and after colons "
    + ", ".join("|".join(words) for words in _ASPECTS.values())
    + f" or {ALL}, such as cpu,cpu:bf16:channels_last"
)


@dataclass(frozen=True, slots=True)
class TrainingVariant:
    """One training of a comparison. Fields that are None are as in the command's other options."""

    device: str
    precision: str | None = None
    layout: str | None = None
    run: str | None = None

    def __str__(self) -> str:
        return ":".join(filter(None, (self.device, self.precision, self.layout, self.run)))

    def options(self, options: TrainOptions) -> TrainOptions:
        """The options of this training, from the command's `options`."""
        changes: dict[str, Any] = {"device": self.device}
        if self.precision is not None:
            changes |= {"precision": self.precision, "amp": None}
        if self.layout is not None:
            changes["channels_last"] = self.layout == "channels_last"
        if self.run is not None:
            changes["compile"] = self.run == "compiled"
        return replace(options, **changes)


def parse_variants(texts: Sequence[str]) -> tuple[TrainingVariant, ...]:
    """Parse names such as `cpu:bf16:channels_last`, each once, in this order.

    Raises UsageError with the allowed words for an unknown variant.
    """
    if not texts:
        raise UsageError(f"--compare needs variants; {_GRAMMAR}")
    return tuple(dict.fromkeys(variant for text in texts for variant in _parse(text)))


def _parse(text: str) -> Iterator[TrainingVariant]:
    device, *words = text.strip().split(":")
    if device not in DEVICES:
        raise UsageError(f"--compare {text} names no device; {_GRAMMAR}")
    said: dict[str, str] = {}
    for word in words:
        aspect = next((name for name, known in _ASPECTS.items() if word in known), None)
        if aspect is None and word != ALL:
            raise UsageError(f"--compare {text}: {word or 'nothing after a colon'} is not known; {_GRAMMAR}")
        if aspect is not None and said.setdefault(aspect, word) != word:
            raise UsageError(f"--compare {text} has both {said[aspect]} and {word}; use one of them")
    choices: list[tuple[str | None, ...]] = [
        (said[name],) if name in said else known if ALL in words else (None,) for name, known in _ASPECTS.items()
    ]
    for precision, layout, run in product(*choices):
        yield TrainingVariant(device, precision, layout, run)
