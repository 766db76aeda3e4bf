"""The log of each epoch for other programs: a line of CSV, and optionally scalars for TensorBoard.

Unknown values are empty cells.
"""

from __future__ import annotations

import csv
import dataclasses
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from convoy.models.errors import JobError
from convoy.models.training.epochs import EpochRecord

COLUMNS = tuple(field.name for field in dataclasses.fields(EpochRecord))
# In TensorBoard's groups of charts.
_TAGS = {
    "loss": "loss/training",
    "validation_loss": "loss/validation",
    "validation_accuracy": "accuracy/validation",
    "learning_rate": "learning rate",
    "images_per_s": "cost/images per s",
    "epoch_s": "cost/s",
    "peak_memory_bytes": "cost/peak memory, bytes",
    "energy_j": "cost/energy, J",
}


class EpochLog:
    """Where each epoch is written; either place may be None. Nothing is written before the first epoch."""

    def __init__(self, table: Path | None, tensorboard: Path | None, before: Sequence[EpochRecord]) -> None:
        """`before` are the epochs of a resumed run. Raises JobError if TensorBoard is not installed."""
        self._table = table
        self._before: list[EpochRecord] | None = list(before)
        self._board = None if tensorboard is None else _board(tensorboard, len(before))

    def add(self, record: EpochRecord) -> None:
        """Log an epoch. Raises JobError if the disk refuses it."""
        if self._table is not None:
            self._add_line(self._table, record)
        if self._board is not None:
            for field, tag in _TAGS.items():
                value = getattr(record, field)
                if value is not None:
                    self._board.add_scalar(tag, value, record.epoch)
            self._board.flush()

    def close(self) -> None:
        """Flush TensorBoard's writer."""
        if self._board is not None:
            self._board.close()

    def _add_line(self, table: Path, record: EpochRecord) -> None:
        # The first time, write the whole table: the earlier run may have been killed between its file and this one.
        is_first = self._before is not None
        records = [*self._before, record] if self._before is not None else [record]
        self._before = None
        try:
            with table.open("w" if is_first else "a", newline="", encoding="utf-8") as file:
                writer = csv.writer(file, lineterminator="\n")
                if is_first:
                    writer.writerow(COLUMNS)
                writer.writerows(dataclasses.astuple(one) for one in records)
        except OSError as error:
            raise JobError(f"cannot write {table}: {error.strerror}; free space there, or pass --no-log") from error


def refuse_no_tensorboard() -> None:
    """Raise JobError if TensorBoard is not installed."""
    if importlib.util.find_spec("tensorboard") is None:
        raise JobError("--tensorboard needs tensorboard, which is not installed; pip install tensorboard")


def _board(folder: Path, done: int) -> Any:
    refuse_no_tensorboard()
    from torch.utils.tensorboard import SummaryWriter

    # Drop what an interrupted run wrote after the epoch from which this one continues.
    return SummaryWriter(str(folder), purge_step=done + 1 if done else None)
