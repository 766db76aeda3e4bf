"""The audit: TensorRT's words for data types, in the JSON of 10.x and of 11.x."""

from __future__ import annotations

import json
from typing import Any

import pytest

from convoy.export.tensorrt.audit import check_audit, read_audit
from convoy.models.errors import JobError
from convoy.models.plans import PlanAudit


def audited(*layers: Any) -> dict[str, int]:
    return read_audit(json.dumps({"Layers": list(layers)})).by_precision


def layer(kind: str = "CaskConvolution", inputs: Any = (), outputs: Any = ()) -> dict[str, Any]:
    return {"Name": "n", "LayerType": kind, "Inputs": list(inputs), "Outputs": list(outputs)}


@pytest.mark.parametrize(
    ("tensor", "precision"),
    [
        ({"Format/Datatype": "Half"}, "fp16"),
        ({"Format/Datatype": "Channel major FP16 format where channel % 8 == 0"}, "fp16"),
        ({"Format/Datatype": "Row major linear FP32 format"}, "fp32"),
        ({"Format/Datatype": "Float"}, "fp32"),
        ({"Format/Datatype": "Thirty-two wide channel vectorized row major Int8 format"}, "int8"),
        ({"Format/Datatype": "Row major linear UInt8 format"}, "other"),
        ({"Format/Datatype": "Row major linear BFloat16 format"}, "bf16"),
        ({"Format/Datatype": "N/A due to dynamic shapes"}, "unknown"),
        ({"Format": "Row major linear FP32 format (kLINEAR)", "DataType": "Half"}, "fp16"),
        ({"Format": "Row major linear FP32 format (kLINEAR)", "DataType": "Float"}, "fp32"),
        ({"Format": "Row major linear FP16 format"}, "fp16"),
        ({"Format": "kHWC16", "DataType": "Int8"}, "int8"),
        ({}, "unknown"),
    ],
)
def test_each_wording_is_understood(tensor: dict[str, str], precision: str) -> None:
    assert audited(layer(outputs=[tensor])) == {precision: 1}


def test_a_layer_counts_by_its_narrowest_side() -> None:
    int8_in_fp16_out = layer(inputs=[{"DataType": "Int8"}], outputs=[{"DataType": "Half"}])
    assert audited(int8_in_fp16_out) == {"int8": 1}


def test_moving_and_converting_are_no_computing() -> None:
    half = [{"DataType": "Half"}]
    audit = read_audit(json.dumps({"Layers": [layer("Reformat", half, half), layer("NoOp", half, half)]}))
    assert audit == PlanAudit({}, 2)


def test_names_without_details_are_unknown() -> None:
    assert audited("conv1", "conv2") == {"unknown": 2}


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"Layers": '])
def test_what_is_no_report_is_refused(text: str) -> None:
    with pytest.raises(JobError, match="no list of layers"):
        read_audit(text)


def test_an_empty_engine_proves_nothing() -> None:
    with pytest.raises(JobError, match="cannot be proved"):
        check_audit(PlanAudit({}, 3), "fp16", "fp16.onnx")


def test_one_layer_in_ten_is_enough_and_less_is_not() -> None:
    check_audit(PlanAudit({"fp16": 1, "fp32": 9}, 0), "fp16", "fp16.onnx")
    with pytest.raises(JobError, match="only 1 of 11"):
        check_audit(PlanAudit({"fp16": 1, "fp32": 10}, 0), "fp16", "fp16.onnx")
