"""The matrix of what export was tried with: its cases, its verdicts, and that the page is what the kept rows say."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

from convoy.app.engines.onnx_session import new_session
from convoy.export.matrix.cases import Case, all_cases
from convoy.export.matrix.made import onnx_files
from convoy.export.matrix.made.originals import TRUTH
from convoy.export.matrix.page import write_page
from convoy.export.matrix.rows import Matrix, MatrixRow, read_matrix, write_matrix
from convoy.export.matrix.trial import try_case
from convoy.export.zoo_table.page import write_page as write_zoo_page
from convoy.export.zoo_table.rows import read_table

pytestmark = pytest.mark.slow

DOCS = Path(__file__).resolve().parents[2] / "docs"
CASES = {case.name: case for case in all_cases()}


def row(what: str, **changes: object) -> MatrixRow:
    given = {"verdict": "exact", "error": 2e-7, "is_known": True, "said": "", "seconds": 1.0} | changes
    return MatrixRow("A group", what, f"convoy export {what}", **given)  # type: ignore[arg-type]


def test_every_case_has_a_name_of_its_own():
    assert len(CASES) == len(all_cases())


def test_the_page_is_what_the_kept_rows_say(tmp_path):
    write_page(read_matrix(DOCS), list(CASES), tmp_path)
    assert (tmp_path / "export-matrix.md").read_text() == (DOCS / "export-matrix.md").read_text()


def test_the_page_of_torchvisions_table_is_what_its_rows_say(tmp_path):
    table = read_table(DOCS)
    write_zoo_page(table, [one.model for one in table.rows], tmp_path)
    assert (tmp_path / "zoo-table.md").read_text() == (DOCS / "zoo-table.md").read_text()


def test_what_was_kept_is_of_cases_that_there_are_and_nothing_is_broken():
    rows = read_matrix(DOCS).rows
    assert {one.name for one in rows} <= CASES.keys()
    assert not [one for one in rows if one.verdict == "broken"]


def test_a_row_replaces_the_former_one_and_goes_with_its_case(tmp_path):
    matrix = (
        Matrix({}, ()).with_row(row("one")).with_row(row("two")).with_row(row("one", verdict="refused", error=None))
    )
    write_matrix(matrix, tmp_path)
    assert read_matrix(tmp_path) == matrix
    assert [(one.what, one.verdict) for one in matrix.rows] == [("one", "refused"), ("two", "exact")]
    assert [one.what for one in matrix.only(["A group: two", "A group: new"]).rows] == ["two"]


def test_the_page_says_verdicts_and_what_is_missing(tmp_path):
    rows = (
        row("one", said="a | b"),
        row("two", verdict="refused", error=None, said="do this"),
        row("x", is_known=False),
    )
    write_page(Matrix({"torch": "2.9"}, rows), ["A group: one", "A group: two", "A group: x", "B: y"], tmp_path)
    text = (tmp_path / "export-matrix.md").read_text()
    assert "3 of 4 tried: 2 exact, 1 refused, 0 broken.\n\n## A group\n" in text
    assert "| one | `convoy export one` | **exact** (2e-07*): a / b |\n" in text
    assert "| two | `convoy export two` | **refused**: do this |\n" in text
    assert "| x | `convoy export x` | **exact** (2e-07) |\n" in text
    assert text.endswith("Not tried yet (1): B: y.\n")


@pytest.mark.parametrize(
    "name",
    [
        "ONNX files: a free batch",
        "ONNX files: strings",
        "ONNX files: numbers of words",
        "Odd sources: a word that is no source",
    ],
)
def test_a_case_comes_out_as_it_was_kept(name):
    tried, kept = try_case(CASES[name]), read_matrix(DOCS).find(name)
    assert kept is not None
    # How two right answers round is the processor's.
    assert (tried.error is None) == (kept.error is None)
    assert (tried.error or 0.0) < 1e-4
    assert (tried.command, tried.verdict, tried.said) == (
        kept.command,
        kept.verdict,
        kept.said,
    )


@pytest.mark.parametrize("shift", [0.0, 0.01])
def test_a_bundle_that_answers_otherwise_than_the_original_is_broken(shift):
    from safetensors.numpy import save_file

    def prepare(folder: Path) -> tuple[str, ...]:
        onnx_files.write("free_batch", folder / "net.onnx")
        images = np.random.default_rng(0).integers(0, 256, (2, 32, 32, 3), dtype=np.uint8)
        seen = (images.astype(np.float32) / 255).transpose(0, 3, 1, 2)
        (answers,) = new_session(folder / "net.onnx").run(None, {"images": seen})
        save_file({"images": images, "answers": answers + np.float32(shift)}, folder / TRUTH)
        return "net.onnx", "--preprocess", "unit"

    tried = try_case(Case("A group", "a graph", prepare))
    assert (tried.verdict, tried.is_known) == ("broken" if shift else "exact", True)
