"""Is the reference itself right? Its answers held against chance, against what is said of it, and against the labels.

The gate compares variants with fp32, which says nothing where fp32 is wrong: with the labels in another order, with
another preprocessing than in training, with weights that were never trained. Knows answers, labels and claims; measures
nothing and knows no files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import linear_sum_assignment

from export.proof.bound import at_least, at_most
from export.proof.outcomes import Outcomes

# One of a hundred networks that answer at random is let through, and one of a hundred that are as good as said refused.
LEVEL = 0.01
_FEWEST_OF_CLASS = 5
_MOST_CLASSES = 2000
_SHOWN_CLASSES = 4
_CHECK = "; check --preprocess and --input first, then the weights and the order of --labels"
_LABELS_FIRST = "check that --labels lists the classes in the order of the network's outputs"


@dataclass(frozen=True, slots=True)
class Claim:
    """A top-1 that `who` states, in percent; `same_images`: of the very images that were evaluated."""

    percent: float
    who: str
    same_images: bool = False


@dataclass(frozen=True, slots=True)
class Expectations:
    """What is expected of the reference's top-1.

    `min_percent` is the least that is good enough. A claim may be missed by `margin_points`. `untrained`: the weights
    are random on purpose, so that chance is all that can be expected.
    """

    min_percent: float | None = None
    claims: tuple[Claim, ...] = ()
    margin_points: float = 1.0
    untrained: bool = False


@dataclass(frozen=True, slots=True)
class Sanity:
    """What was found, and what of it speaks against publishing; both for people."""

    findings: tuple[str, ...] = ()
    objections: tuple[str, ...] = ()


NOTHING_FOUND = Sanity()


def judge_reference(
    outcomes: Outcomes, labels: Sequence[str], expected: Expectations, *, is_sample: bool = False
) -> Sanity:
    """The verdict on fp32's answers. `is_sample`: more images follow, so that only what is sure by now counts."""
    right, count = int(outcomes.right.sum()), len(outcomes.labels)
    shown = f"{100 * right / count:.2f} % of {count:,} images are right"
    findings: list[str] = []
    objections: list[str] = []
    mixed_up = _mixed_up(outcomes, labels)
    if not expected.untrained and mixed_up:
        objections.append(f"{shown}; {mixed_up}")
    elif not expected.untrained:
        _against_chance(outcomes, shown, findings, objections, is_sample=is_sample)
    for claim in expected.claims:
        _against_claim(
            claim, right, count, shown, expected.margin_points, findings, objections, "" if mixed_up else _CHECK
        )
    least = expected.min_percent
    if least is not None and not is_sample:
        (findings if 100 * right >= least * count else objections).append(f"{shown}; --min-accuracy wants {least:g} %")
    return Sanity(tuple(findings), tuple(objections))


def chance_of(outcomes: Outcomes) -> float:
    """The share of the images that these very answers would get right if they had nothing to do with the images.

    That is what a network that always gives the same answer gets, too, however uneven the classes are; the agreement by
    chance of Cohen (Educational and Psychological Measurement 20, 1960).
    """
    classes = int(max(outcomes.labels.max(), outcomes.top1.max())) + 1
    of_labels, of_answers = (np.bincount(own, minlength=classes) for own in (outcomes.labels, outcomes.top1))
    return float((of_labels * of_answers).sum() / len(outcomes.labels) ** 2)


def _against_chance(
    outcomes: Outcomes, shown: str, findings: list[str], objections: list[str], *, is_sample: bool
) -> None:
    """One-sided exact binomial test."""
    right, count, chance = int(outcomes.right.sum()), len(outcomes.labels), chance_of(outcomes)
    told = f"{shown}, where guessing would get {100 * chance:.2f} %"
    perfect = float(((np.bincount(outcomes.labels) / count) ** 2).sum())
    if perfect**count > LEVEL:
        findings.append(f"{told}; too few images to tell a network from a guess")
    elif at_least(right, count, chance) > LEVEL and not (is_sample and _may_be_useful(right, count, chance)):
        objections.append(
            f"{told}: not better than chance beyond doubt; check the weights, --preprocess and the order of --labels"
        )
    else:
        findings.append(told)


def _may_be_useful(right: int, count: int, chance: float) -> bool:
    """Whether more images may yet show a network that gets a tenth right of what guessing leaves."""
    return at_most(right, count, chance + 0.1 * (1 - chance)) > LEVEL


def _against_claim(
    claim: Claim,
    right: int,
    count: int,
    shown: str,
    margin: float,
    findings: list[str],
    objections: list[str],
    advice: str,
) -> None:
    """Exact binomial test of "at least what is said, less the margin"; on the very same images there is no chance."""
    floor = max(0.0, claim.percent - margin)
    is_below = 100 * right / count < floor
    if is_below and not claim.same_images:
        is_below = at_most(right, count, floor / 100) < LEVEL
    on = ", on the same images" if claim.same_images else ""
    told = f"{claim.who} says {claim.percent:.2f} %{on}; {shown}"
    if is_below:
        objections.append(f"{told}{advice}")
    else:
        findings.append(told)


def _mixed_up(outcomes: Outcomes, labels: Sequence[str]) -> str | None:
    """The classes that are answered under another's name, where the images of most of them are; None for none."""
    classes = len(labels)
    if not 2 <= classes <= _MOST_CLASSES:
        return None
    shift = _shift(outcomes, classes)
    if shift:
        examples = _listed([(index, (index + shift) % classes) for index in range(classes)], labels)
        share = 100 * float(((outcomes.labels + shift) % classes == outcomes.top1).mean())
        by = f"{shift}" if shift <= classes // 2 else f"{shift - classes}"
        return (
            f"the labels are shifted by {by}: images of {examples}; shifted back, {share:.2f} % would be right; "
            f"{_LABELS_FIRST}"
        )
    confusion = np.zeros((classes, classes), np.int64)
    np.add.at(confusion, (outcomes.labels, outcomes.top1), 1)
    rows, columns = linear_sum_assignment(-confusion)
    moved = [
        (int(row), int(column))
        for row, column in zip(rows, columns, strict=True)
        if row != column
        and confusion[row].sum() >= _FEWEST_OF_CLASS
        and 2 * confusion[row, column] > confusion[row].sum()
    ]
    if len(moved) < 2 or sum(confusion[row, column] - 2 * confusion[row, row] for row, column in moved) < 0:
        return None
    share = 100 * confusion[rows, columns].sum() / confusion.sum()
    return (
        f"the labels are in another order than the outputs: images of {_listed(moved, labels)}; in the right order "
        f"{share:.2f} % would be right; {_LABELS_FIRST}"
    )


def _shift(outcomes: Outcomes, classes: int) -> int:
    """By how many places the answers lie beside the labels, around the end; 0 where they do not beyond doubt."""
    distances = np.bincount((outcomes.top1 - outcomes.labels) % classes, minlength=classes)
    best, count = int(distances.argmax()), len(outcomes.labels)
    # Every distance might have been the largest by chance: the level is divided among them (Bonferroni).
    if best == 0 or distances[best] < 2 * distances[0] or 3 * distances[best] < count:
        return 0
    shifted = Outcomes((outcomes.labels + best) % classes, outcomes.top1, outcomes.in_top5, outcomes.errors)
    chance = chance_of(shifted)
    return best if at_least(int(distances[best]), count, chance) < LEVEL / classes else 0


def _listed(moved: Sequence[tuple[int, int]], labels: Sequence[str]) -> str:
    shown = ", ".join(f"{labels[row]!r} are answered as {labels[column]!r}" for row, column in moved[:_SHOWN_CLASSES])
    return f"{shown} and so on" if len(moved) > _SHOWN_CLASSES else shown
