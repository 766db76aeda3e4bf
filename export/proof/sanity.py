"""Check the fp32 reference itself: against chance, against stated accuracies, and against the order of the labels.

The gate compares variants with fp32, which does not help if fp32 is wrong: the labels may be in another order, the
preprocessing may differ from training, or the weights may be untrained. Knows answers, labels and claims; measures
nothing and reads no files.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import linear_sum_assignment
from scipy.special import gammaln

from convoy.export.proof.outcomes import Outcomes, at_least, at_most
from convoy.models.bundle import Accuracy

_SHOWN_NAMES = 6
# Two orders of three classes could look alike by chance.
_FEWEST_SORTED = 3


def shift_of(order: Mapping[int, int], classes: int) -> int:
    """The number of places by which all classes are shifted, modulo their count; 0 if they are not.

    Two swapped classes are not a shift.
    """
    distances = {(answered - label) % classes for label, answered in order.items()}
    return distances.pop() if len(distances) == 1 and classes > 2 and len(order) > 1 else 0


def described(order: Mapping[int, int], labels: Sequence[str]) -> str:
    """A description of the order, such as reverse or alphabetical; empty if it has none.

    `order` maps the index of each known class to the index that its images are answered as. The description holds for
    every one of them.
    """
    moved = {label: answered for label, answered in order.items() if label != answered}
    if not moved:
        return ""
    return (
        _reversed(order, labels)
        or _sorted(order, labels, str, "of the alphabet")
        or _sorted(order, labels, _by_numbers, "of the numbers in their names")
        or _in_cycles(moved, labels)
    )


def _reversed(order: Mapping[int, int], labels: Sequence[str]) -> str:
    is_reversed = all(answered == len(labels) - 1 - label for label, answered in order.items())
    return "they are in reverse order" if is_reversed and len(order) >= _FEWEST_SORTED else ""


def _sorted(order: Mapping[int, int], labels: Sequence[str], key: Callable[[str], object], by: str) -> str:
    """Whether the outputs are sorted by name, and the labels are not."""
    if len(set(labels)) < len(labels) or len(order) < _FEWEST_SORTED:
        return ""
    place = {name: index for index, name in enumerate(sorted(labels, key=key))}  # type: ignore[arg-type]
    if any(place[labels[label]] != answered for label, answered in order.items()):
        return ""
    return f"the outputs are in the order {by}, and the labels are not"


def _by_numbers(name: str) -> list[tuple[int, int, str]]:
    """A sort key that puts 2 before 10."""
    parts = re.findall(r"\d+|\D+", name)
    return [(0, int(part), part) if part.isdecimal() else (1, 0, part) for part in parts]


def _in_cycles(moved: Mapping[int, int], labels: Sequence[str]) -> str:
    """Swapped pairs or longer cycles of classes; empty if a cycle is incomplete."""
    cycles: list[list[int]] = []
    left = dict(moved)
    while left:
        cycle = [next(iter(left))]
        while (following := left.pop(cycle[-1], None)) is not None and following != cycle[0]:
            cycle.append(following)
        if following is None:
            return ""
        cycles.append(cycle)
    if all(len(cycle) == 2 for cycle in cycles):
        pairs = [f"{labels[a]!r} and {labels[b]!r}" for a, b in cycles[:_SHOWN_NAMES]]
        more = " and so on" if len(cycles) > len(pairs) else ""
        return f"swapped: {', '.join(pairs)}{more}"
    if len(cycles) > 1 or len(cycles[0]) > _SHOWN_NAMES:
        return ""
    circle = " as ".join(repr(labels[one]) for one in [*cycles[0], cycles[0][0]])
    return f"{len(cycles[0])} of them are in a circle: {circle}"


# One in a hundred random networks passes, and one in a hundred networks that meet their claim is refused.
LEVEL = 0.01
# A p-value at the level of 1 % is then off by less than a third of it, two times of three.
_SHUFFLES = 999
# How much a useful network must get right of what guessing gets wrong: if all images were seen, and if more follow,
# which may still show a weak one.
_USEFUL_SHARE, _USEFUL_SHARE_IN_SAMPLE = 0.5, 0.1
# The share of the images that another order must gain: a few confused classes are a fault of the network or the images,
# and not of the labels.
_LEAST_GAIN = 0.05
_SHOWN_CLASSES = 4
# A detector or segmenter below this finds nothing; published ones of many classes reach 20 and more.
_USELESS_PERCENT = 0.5
_CHECK = "; check --preprocess and --input first, then the weights and the order of --labels"
_LABELS_FIRST = "check that --labels lists the classes in the order of the network's outputs"


@dataclass(frozen=True, slots=True)
class Claim:
    """A top-1 in percent that `who` states; `same_images`: measured on the images of this evaluation."""

    percent: float
    who: str
    same_images: bool = False


@dataclass(frozen=True, slots=True)
class Expectations:
    """The top-1 that the reference should have.

    `min_percent` is the lowest that may be published. A claim may be missed by `margin_points`. `untrained`: the
    weights are random on purpose, so only chance is expected.
    """

    min_percent: float | None = None
    claims: tuple[Claim, ...] = ()
    margin_points: float = 1.0
    untrained: bool = False


@dataclass(frozen=True, slots=True)
class Sanity:
    """Findings, and objections to publishing; both are sentences for people."""

    findings: tuple[str, ...] = ()
    objections: tuple[str, ...] = ()


NOTHING_FOUND = Sanity()


def judge_reference(
    outcomes: Outcomes,
    labels: Sequence[str],
    expected: Expectations,
    *,
    is_sample: bool = False,
    samples: str = "images",
) -> Sanity:
    """Judge fp32's answers to `samples`. `is_sample`: more follow, so only certain findings count."""
    right, count = int(outcomes.right.sum()), len(outcomes.labels)
    shown = f"{100 * right / count:.2f} % of {count:,} {samples} are right"
    findings: list[str] = []
    objections: list[str] = []
    mixed_up, is_mixed_up = _mixed_up(outcomes, labels, is_sample=is_sample)
    if not expected.untrained and mixed_up:
        (objections if is_mixed_up else findings).append(f"{shown}; {mixed_up}")
    if not expected.untrained and not is_mixed_up:
        _against_chance(outcomes, shown, findings, objections, is_sample=is_sample, samples=samples)
    advice = "" if is_mixed_up else _CHECK
    seen = len(np.unique(outcomes.labels))
    if seen < len(labels) and not is_sample:
        findings.append(f"the {samples} are of {seen:,} of the {len(labels):,} classes; the others are untested")
    for claim in expected.claims:
        is_same = claim.same_images and not is_sample
        is_below, told = _against_claim(claim, right, count, shown, expected.margin_points, is_same=is_same)
        (objections if is_below else findings).append(f"{told}{advice}" if is_below else told)
    least = expected.min_percent
    if least is not None and not is_sample:
        (findings if 100 * right >= least * count else objections).append(f"{shown}; --min-accuracy wants {least:g} %")
    return Sanity(tuple(findings), tuple(objections))


def judge_score(accuracy: Accuracy, expected: Expectations) -> Sanity:
    """Judge a mean score, which has no chance level; expectations are in hundredths of it, or of the published measure
    of a set if there is one.
    """
    samples = f"{accuracy.images:,} samples"
    percent = 100 * next(reversed(accuracy.set_metrics.values()), accuracy.top1)
    shown = f"{accuracy.metric} is {accuracy.in_words} on {samples}"
    if accuracy.set_metrics:
        shown = f"{accuracy.set_in_words} on {samples}; {accuracy.metric} is {accuracy.in_words} on average"
    findings: list[str] = [shown]
    objections: list[str] = []
    if accuracy.set_metrics and percent < _USELESS_PERCENT and not expected.untrained:
        objections.append(f"{shown}: hardly anything is right{_CHECK}, and how --detection reads the outputs")
    wanted = [
        (f"{claim.who} says {claim.percent:.2f} %", claim.percent - expected.margin_points) for claim in expected.claims
    ]
    if expected.min_percent is not None:
        wanted.append((f"--min-accuracy wants {expected.min_percent:g} %", expected.min_percent))
    for said, least in wanted:
        (findings if percent >= least else objections).append(f"{shown}; {said}")
    return Sanity(tuple(findings), tuple(objections))


def chance_of(outcomes: Outcomes) -> float:
    """The share of images that these answers would get right if they were unrelated to the images.

    A constant answer gets this too, however uneven the classes are: the agreement by chance of Cohen (Educational and
    Psychological Measurement 20, 1960).
    """
    classes = int(max(outcomes.labels.max(), outcomes.top1.max())) + 1
    of_labels, of_answers = (np.bincount(own, minlength=classes) for own in (outcomes.labels, outcomes.top1))
    return float((of_labels * of_answers).sum() / len(outcomes.labels) ** 2)


def _against_chance(
    outcomes: Outcomes, shown: str, findings: list[str], objections: list[str], *, is_sample: bool, samples: str
) -> None:
    """One-sided test on shuffled labels. If it is inconclusive, only a network that is certainly useless is refused."""
    right, count, chance = int(outcomes.right.sum()), len(outcomes.labels), chance_of(outcomes)
    told = f"{shown}, where guessing would get {100 * chance:.2f} %"
    useful = chance + (_USEFUL_SHARE_IN_SAMPLE if is_sample else _USEFUL_SHARE) * (1 - chance)
    if _luck_of_perfection(outcomes.labels) <= LEVEL and _as_good_when_shuffled(outcomes) <= LEVEL:
        findings.append(told)
    elif _luck_of_perfection(outcomes.labels) > LEVEL or at_most(right, count, useful) > LEVEL:
        findings.append(f"{told}; too few {samples} to tell a network from a guess")
    else:
        objections.append(
            f"{told}: not significantly better than chance; check the weights, --preprocess and the order of --labels"
        )


def _luck_of_perfection(labels: np.ndarray) -> float:
    """The share of the orders of the labels that are all right if one is: 1 if all images have the same class."""
    of_class = np.bincount(labels)
    return math.exp(float(gammaln(of_class + 1).sum() - gammaln(len(labels) + 1)))


def _as_good_when_shuffled(outcomes: Outcomes) -> float:
    """The p-value of the right answers, from shuffled labels; never 0, and reproducible."""
    generator, right = np.random.default_rng(0), int(outcomes.right.sum())
    labels = outcomes.labels.copy()
    reached = 0
    for _ in range(_SHUFFLES):
        generator.shuffle(labels)
        reached += int((labels == outcomes.top1).sum()) >= right
    return (reached + 1) / (_SHUFFLES + 1)


def _against_claim(
    claim: Claim, right: int, count: int, shown: str, margin: float, *, is_same: bool
) -> tuple[bool, str]:
    """Whether the top-1 is below the claim, less the margin; and both as text.

    On the very same images (`is_same`) there is no chance, but two libraries may differ on one image. Otherwise it is
    an exact binomial test.
    """
    floor = max(0.0, claim.percent - margin)
    # Shares of counts are inexact in floating point, and stated values are rounded.
    is_below = right + 1 + 1e-6 < floor / 100 * count if is_same else at_most(right, count, floor / 100) < LEVEL
    on = ", on the same images" if claim.same_images else ""
    return is_below, f"{claim.who} says {claim.percent:.2f} %{on}; {shown}"


def _mixed_up(outcomes: Outcomes, labels: Sequence[str], *, is_sample: bool) -> tuple[str, bool]:
    """The classes of which most images are answered as another class, as text.

    And whether there are enough such images to be certain that the labels are wrong. The text is empty if there are
    none.
    """
    classes = len(labels)
    if not 2 <= classes <= 2000:
        return "", False
    confusion = np.zeros((classes, classes), np.int64)
    np.add.at(confusion, (outcomes.labels, outcomes.top1), 1)
    rows, columns = linear_sum_assignment(-confusion)
    order = dict(zip(rows.tolist(), columns.tolist(), strict=True))
    # Most images of these are answered as the class that the assignment gives them.
    known = {
        row: column
        for row, column in order.items()
        if confusion[row].sum() >= 5 and 2 * confusion[row, column] > confusion[row].sum()
    }
    shift = _shift(outcomes, confusion, known)
    if shift:
        shifted = {row: (row + shift) % classes for row in range(classes)}
        most = [(row, to) for row, to in shifted.items() if 2 * confusion[row, to] > confusion[row].sum()]
        share = 100 * float(((outcomes.labels + shift) % classes == outcomes.top1).mean())
        by = f"{shift}" if shift <= classes // 2 else f"{shift - classes}"
        return (
            f"the labels are shifted by {by}: images of {_listed(most, labels)}; shifted back, {share:.2f} % would be "
            f"right; {_LABELS_FIRST}"
        ), True
    moved = [(row, column) for row, column in known.items() if row != column]
    gained, lost = (sum(int(confusion[pair]) for pair in pairs) for pairs in (moved, [(row, row) for row, _ in moved]))
    if len(moved) < 2 or gained < 2 * lost:
        return "", False
    examples = _listed(moved, labels)
    if not _is_substantial(gained, lost, int(confusion.sum()), is_sample=is_sample):
        return f"most images of {examples}; {_LABELS_FIRST}", False
    share = 100 * confusion[rows, columns].sum() / confusion.sum()
    sort = described(known, labels)
    return (
        f"the labels are in another order than the outputs: images of {examples}; {f'{sort}; ' if sort else ''}in the "
        f"right order {share:.2f} % would be right; {_LABELS_FIRST}"
    ), True


def _is_substantial(gained: int, lost: int, count: int, *, is_sample: bool) -> bool:
    """Whether another order gains `_LEAST_GAIN`, significantly: a sign test on the images that it changes.

    For a sample, the gain itself must be significant.
    """
    if gained - lost < _LEAST_GAIN * count:
        return False
    if is_sample and at_least(gained, count, min(1.0, lost / count + _LEAST_GAIN)) > LEVEL:
        return False
    return at_least(gained, gained + lost, 0.5) <= LEVEL


def _shift(outcomes: Outcomes, confusion: np.ndarray, known: Mapping[int, int]) -> int:
    """The offset of all answers from the labels, cyclically; 0 if it is not significant.

    `known` is what the images of a class are answered as, if that is certain: all must have the same offset. With too
    few images per class, nearly all informative classes must.
    """
    classes, count = len(confusion), len(outcomes.labels)
    distances = np.bincount((outcomes.top1 - outcomes.labels) % classes, minlength=classes)
    best = int(distances.argmax())
    # Every offset might be the largest by chance: the level is divided among them (Bonferroni).
    if best == 0 or classes < 3 or distances[best] < 2 * distances[0] or 3 * distances[best] < count:
        return 0
    if known and shift_of(known, classes) != best:
        return 0
    seen = np.flatnonzero(confusion.max(axis=1) >= 2)
    elsewhere = confusion[seen].argmax(axis=1) != (seen + best) % classes
    # The share of classes with few images whose answers may differ from an offset.
    if not known and elsewhere.sum() > 0.1 * len(seen):
        return 0
    shifted = replace(outcomes, labels=(outcomes.labels + best) % classes)
    return best if at_least(int(distances[best]), count, chance_of(shifted)) < LEVEL / classes else 0


def _listed(moved: Sequence[tuple[int, int]], labels: Sequence[str]) -> str:
    shown = ", ".join(f"{labels[row]!r} are answered as {labels[column]!r}" for row, column in moved[:_SHOWN_CLASSES])
    return f"{shown} and so on" if len(moved) > _SHOWN_CLASSES else shown
