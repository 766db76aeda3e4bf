"""Why weights do not fit a network, in one line. Knows names and shapes; knows nothing of torch."""

from __future__ import annotations

from collections.abc import Mapping

from convoy.models.samples import some

Shapes = Mapping[str, tuple[int, ...]]


def misfit(found: Shapes, expected: Shapes) -> str | None:
    """What is missing, unknown or of another shape; None when the weights fit."""
    missing = [name for name in expected if name not in found]
    unknown = [name for name in found if name not in expected]
    differing = [
        f"{name} is {list(found[name])} instead of {list(shape)}"
        for name, shape in expected.items()
        if name in found and found[name] != shape
    ]
    problems = [
        f"{what}{some(names)}"
        for what, names in (("missing ", missing), ("unknown ", unknown), ("", differing))
        if names
    ]
    return "; ".join(problems) or None
