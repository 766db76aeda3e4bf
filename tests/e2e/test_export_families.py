"""Networks of several families of torchvision, and of operators that they lack, through the whole export.

The weights are random, so nothing is said of accuracy: every file can be made and runs, fp32 answers as torch does, and
TensorRT builds what is meant for it.
"""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

import pytest

from convoy.app.engines.tensorrt_library import RTX
from convoy.export.proof.verify import MAX_FP32_ERROR
from convoy.models.bundle import Bundle
from tests.support import user_networks
from tests.support.quick_exports import export_network

pytestmark = [pytest.mark.long, pytest.mark.timeout(900), pytest.mark.usefixtures("measures_little")]

TORCHVISION = ("mobilenet_v3_small", "densenet121")
OWN = (
    *("transposed", "pixel_shuffle", "u_net", "resized_inside", "pools", "norms_and_activations"),
    *("vision_transformer", "recurrent_over_columns", "bilinear_pooling", "unfolded", "branch_and_flip", "spectrum"),
)


def exported(source: str, folder: Path, **changes: object) -> Bundle:
    # A budget that nothing exceeds: which layers INT8 hurts is chance with random weights, and is not searched for.
    made = {"allow_random_calibration": True, "calibration_method": "minmax", "accuracy_budget_points": 100.0}
    return export_network(source, folder, **{"precisions": "fp32,fp16,int8", "force": True, **made, **changes})


def is_right_in_all_precisions(bundle: Bundle) -> None:
    variants = {variant.file: variant for variant in bundle.manifest.variants}
    assert {"fp32.onnx", "fp16.onnx", "int8-cpu.onnx", "int8-trt.onnx"} <= set(variants)
    assert variants["fp32.onnx"].max_relative_error <= MAX_FP32_ERROR
    assert variants["fp16.onnx"].max_relative_error < 0.05
    for file, variant in variants.items():
        assert variant.latency is not None or variant.target != "cpu", file
        assert variant.builder is None or variant.builder.accepted, (file, variant.builder)
    if importlib.util.find_spec(RTX.module) is not None:
        assert all(variants[file].builder is not None for file in ("fp32.onnx", "fp16.onnx", "int8-trt.onnx"))


@pytest.mark.parametrize("name", TORCHVISION)
def test_a_family_of_torchvision_is_right_in_all_precisions(tmp_path, name):
    is_right_in_all_precisions(exported(f"torchvision:{name}", tmp_path, input="3x64x64", preprocess=None))


@pytest.mark.parametrize("name", OWN)
def test_operators_of_users_networks_are_right(tmp_path, name):
    shutil.copyfile(user_networks.__file__, tmp_path / "nets.py")
    bundle = exported(f"{tmp_path / 'nets.py'}:{name}", tmp_path, input="3x32x32", precisions="fp32")
    assert bundle.manifest.variants[0].max_relative_error <= MAX_FP32_ERROR
    assert bundle.manifest.spec.max_batch_size == 4
