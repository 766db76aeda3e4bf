"""The page of the table of torchvision's models, for people. Knows the Markdown and nothing of how a model is tried."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from convoy.export.zoo_table.kept import shown_tools, table_head, table_line, write_lines
from convoy.export.zoo_table.rows import BuilderCell, Table, ZooRow

_PAGE = Path("zoo-table.md")
_HEAD = (
    *("model", "input", "exported", "verified (error)", "spread", "int8 ok (error)", "fastest, batch 1"),
    "TensorRT builder",
)
_INTRODUCTION = """# torchvision's classification models in Convoy

Written by `make zoo-table`. Every model gets random weights, drawn so that no output is constant, and random
pictures of its published size. *Verified*: ONNX Runtime answers as torch does at batch 1, 3 and 8, with a relative
error (of the worst picture) of at most 1e-3. *Spread* is the share of the outputs that differs between pictures: where
it were zero, agreement would prove nothing. *int8*: min-max calibration on the same 8 random pictures, and the
relative error of its outputs against fp32's, which with random weights says nothing about accuracy; the question is
whether the graph can be quantised and what that gains. Where that error is as large as the spread, the int8 outputs
tell nothing of the picture any more: with trained weights, finding and mending that is the accuracy gate's business.
Milliseconds are medians for one picture, both variants taking turns in the serving engine at the lowest priority.
Whatever else ran on the machine lengthened both, so compare the two of a row and not one row with another.
*TensorRT builder*: the plan that the real library built of `fp16.onnx` and of `int8-trt.onnx`, for batches up to 8, and
the seconds that it took. It builds without a GPU, so this says what it takes, and not that the plan is right or fast.
"""


def write_page(table: Table, names: Sequence[str], folder: Path) -> None:
    """The page for people, with what is missing from `names`. Raises JobError when the disk does not take it."""
    tried = {row.model for row in table.rows}
    missing = [name for name in names if name not in tried]
    lines = [
        _INTRODUCTION,
        f"Machine: {table.machine}. {shown_tools(table.tools)}.",
        "",
        f"{sum(row.exported for row in table.rows)} of {len(names)} exported, "
        f"{sum(row.verified for row in table.rows)} verified, "
        f"{sum(row.int8_ms is not None for row in table.rows)} quantised.",
        *_accepted(table),
        "",
        *table_head(*_HEAD),
        *(_line(row) for row in table.rows),
        "",
        *_refusals(table),
        *_warnings(table),
        f"Not tried yet ({len(missing)}): {', '.join(missing) or 'none'}.",
    ]
    write_lines(folder / _PAGE, lines)


def _accepted(table: Table) -> list[str]:
    """How many networks the builder took in each precision, of those that it was shown."""
    cells = [cell for row in table.rows for cell in row.builder]
    shown = Counter(cell.precision for cell in cells)
    taken = Counter(cell.precision for cell in cells if cell.accepted)
    counts = [f"{taken[precision]} of {count} in {precision}" for precision, count in shown.items()]
    return [f"{table.builder}, without a GPU, builds {' and '.join(counts)}."] if counts else []


def _refusals(table: Table) -> list[str]:
    refused = [(row.model, cell) for row in table.rows for cell in row.builder if not cell.accepted]
    if not refused:
        return []
    return ["Not built:", "", *(f"- {model}, {cell.precision}: {cell.why}" for model, cell in refused), ""]


def _warnings(table: Table) -> list[str]:
    counts = Counter(text for row in table.rows for cell in row.builder for text in cell.warnings)
    if not counts:
        return []
    listed = "; ".join(f'"{text}" ({count})' for text, count in counts.most_common())
    return [f"The builder's warnings, with the number of plans: {listed}.", ""]


def _line(row: ZooRow) -> str:
    verified = "-" if row.error is None else f"{'yes' if row.verified else 'NO'} ({row.error:.1g})"
    int8 = "no" if row.int8_error is None else f"yes ({row.int8_error:.2g})"
    spread = "-" if row.spread is None else f"{row.spread:.2g}"
    reason = f"; {row.why}" if row.why else ""
    builder = "; ".join(_cell(cell) for cell in row.builder) or "-"
    cells = (row.model, row.input, "yes" if row.exported else "NO", verified, spread, int8, row.fastest + reason)
    return table_line(*cells, builder)


def _cell(cell: BuilderCell) -> str:
    if not cell.accepted:
        return f"{cell.precision} NO"
    return f"{cell.precision} {cell.megabytes:.1f} MB {cell.seconds:.1f} s"
