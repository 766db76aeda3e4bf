"""The real builder's column: nine families of torchvision, built again, are taken or refused as the table says."""

from __future__ import annotations

from pathlib import Path

import pytest

from convoy.export.zoo_table.rows import read_table
from convoy.export.zoo_table.table import BUILT_FILES, try_builder

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.mark.parametrize(
    "name",
    [
        *("resnet18", "mobilenet_v3_small", "efficientnet_b0", "densenet121"),
        *("shufflenet_v2_x0_5", "regnet_y_400mf", "convnext_tiny", "swin_t", "maxvit_t"),
    ],
)
def test_the_builder_answers_as_in_the_table(name):
    row = read_table(DOCS).find(name)
    assert row is not None
    cells = try_builder(name, 2, BUILT_FILES)
    assert [(cell.precision, cell.accepted, cell.why) for cell in cells] == [
        (cell.precision, cell.accepted, cell.why) for cell in row.builder
    ]
    assert {cell.precision for cell in cells} == {"fp16", "int8"}
