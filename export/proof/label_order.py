"""In which order are the labels, when it is not that of the network's outputs? What is sure of it, in words.

Knows which class the images of each class are answered as, and the classes' names; knows no images and no chance.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

_SHOWN_NAMES = 6
# Of which two orders of three classes would look alike by chance.
_FEWEST_SORTED = 3


def shift_of(order: Mapping[int, int], classes: int) -> int:
    """By how many places every one of the classes is answered beside itself, around the end; 0 where not all are.

    Two swapped classes are no shift.
    """
    distances = {(answered - label) % classes for label, answered in order.items()}
    return distances.pop() if len(distances) == 1 and classes > 2 and len(order) > 1 else 0


def described(order: Mapping[int, int], labels: Sequence[str]) -> str:
    """What sort of order it is, where it is one that has a name; else nothing.

    `order` has the class that the images of each class are answered as, by their numbers, for the classes of which that
    is known. Nothing is said that does not hold for every one of them.
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
    """Whether the outputs are sorted by the names, which the labels then are not."""
    if len(set(labels)) < len(labels) or len(order) < _FEWEST_SORTED:
        return ""
    place = {name: index for index, name in enumerate(sorted(labels, key=key))}  # type: ignore[arg-type]
    if any(place[labels[label]] != answered for label, answered in order.items()):
        return ""
    return f"the outputs are in the order {by}, and the labels are not"


def _by_numbers(name: str) -> list[tuple[int, int, str]]:
    """Sorts 2 before 10."""
    parts = re.findall(r"\d+|\D+", name)
    return [(0, int(part), part) if part.isdecimal() else (1, 0, part) for part in parts]


def _in_cycles(moved: Mapping[int, int], labels: Sequence[str]) -> str:
    """Swapped pairs, or more in a circle; nothing where it is not known how a circle closes."""
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
