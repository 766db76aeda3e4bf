"""How many may wait for a model, and in which order of urgency: what the operator decided, and may decide anew.

Knows no queue: `convoy.app.scheduling.queues` has them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from convoy.models.priorities import Priorities


@dataclass(frozen=True, slots=True)
class QueueOptions:
    """Of one model. `max_waiting` in samples. None: as the server's others, or as the model says of itself."""

    max_waiting: int | None = None
    levels: int | None = None
    default_level: int | None = None

    def priorities(self, own: Priorities) -> Priorities:
        """What holds for a model that says `own` of itself; a default level that there is no more is the last one."""
        levels = own.levels if self.levels is None else self.levels
        default = own.default if self.default_level is None else self.default_level
        return Priorities(levels, min(default, levels))


@dataclass(frozen=True, slots=True)
class QueueRules:
    """Of all models: `max_waiting` samples for each, and what is otherwise for some, by name."""

    max_waiting: int = 1024
    by_model: Mapping[str, QueueOptions] = field(default_factory=dict)

    def of(self, model: str) -> QueueOptions:
        return self.by_model.get(model, _NOTHING_SAID)

    def max_waiting_of(self, model: str) -> int:
        own = self.of(model).max_waiting
        return self.max_waiting if own is None else own


_NOTHING_SAID = QueueOptions()
