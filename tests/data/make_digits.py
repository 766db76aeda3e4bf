"""Writes the digit images that ship: clear ones for the tests and the README, varied ones for the load tester.

All are from the test part, so no bundled model has learned from them. Run from the repository's root:
`python -m tests.data.make_digits`.
"""

from __future__ import annotations

from pathlib import Path

from convoy.models.datasets import load
from convoy.models.samples import Sample

CLEAR = {
    "zero": "digit-0030",
    "one": "digit-1436",
    "two": "digit-0371",
    "three": "digit-0063",
    "four": "digit-1525",
    "five": "digit-1101",
    "six": "digit-0468",
    "seven": "digit-0862",
    "eight": "digit-0296",
    "nine": "digit-0924",
}
VARIED_INDICES = (
    *(276, 571, 1590, 558, 1081, 2, 865, 1644, 1767, 1137, 671, 327),
    *(1449, 58, 1368, 1019, 96, 462, 1424, 644, 1509, 1340, 235, 1111),
)
ROOT = Path(__file__).parents[2]


def shipped_images() -> dict[Path, Sample]:
    """Every image that ships, by its path from the root, and the sample that it shows."""
    samples = {sample.name: sample for sample in load("digits").part("test")}
    clear = {Path("tests/data") / f"{word}.png": samples[name] for word, name in CLEAR.items()}
    varied = [samples[f"digit-{index:04}"] for index in VARIED_INDICES]
    return clear | {Path("loadtest/data") / f"{sample.name}-is-{sample.label}.png": sample for sample in varied}


if __name__ == "__main__":
    for path, sample in shipped_images().items():
        (ROOT / path).write_bytes(sample.encoded())
