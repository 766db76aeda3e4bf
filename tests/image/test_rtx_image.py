"""What the image with TensorRT for RTX has of its own: plans inside, built without a GPU, and nothing of CUDA's beside.

`test_image.py` has what it shares with the others.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.support.containers import TARGETS, Container, Images
from tests.support.servers import Server
from tests.support.stores import ROOT, StoreFolder

USER = 10001

pytestmark = [
    pytest.mark.image,
    pytest.mark.timeout(3600),
    pytest.mark.skipif("rtx" not in TARGETS, reason="IMAGE_TARGET names another target"),
]


@pytest.fixture(scope="module")
def image(images: Images, base: str) -> str:
    return images.build("rtx", base)


def plan_files(container: Container, *what: str) -> list[str]:
    return sorted(container.run("find", "/cache", "-name", "*.plan", *what).stdout.splitlines())


def inventory(container: Container) -> dict[str, list[dict[str, str]]]:
    diagnosis = json.loads(container.run("convoy", "doctor", "--json").stdout)
    found: dict[str, list[dict[str, str]]] = diagnosis["plan_cache"]
    return found


def test_all_that_it_lacks_for_serving_from_a_gpu_is_the_driver(server: Server) -> None:
    (model,) = server.stats()["models"]
    (why,) = (reason for reason in model["why_not_others"] if reason.startswith("tensorrt-rtx: "))
    assert "no usable NVIDIA driver" in why


def test_the_host_is_asked_for_its_gpus_and_its_driver(container: Container) -> None:
    assert {"NVIDIA_VISIBLE_DEVICES=all", "NVIDIA_DRIVER_CAPABILITIES=compute,utility"} <= set(container.config["Env"])


def test_its_user_can_build_with_tensorrt_for_rtx(container: Container) -> None:
    code = "import os, tensorrt_rtx as t; assert t.Builder(t.Logger()); print(os.getuid())"
    asked = container.run("python3", "-c", code)
    assert asked.stdout.split()[-1:] == [str(USER)], asked.stderr


def test_of_nvidias_libraries_it_has_only_those_that_serve(container: Container) -> None:
    code = "import importlib.metadata as m; print(*{d.name.lower().replace('_', '-') for d in m.distributions()})"
    installed = set(container.run("python3", "-c", code).stdout.split())
    of_nvidia = {name for name in installed if name.startswith(("nvidia", "cuda", "tensorrt"))}
    family = {f"tensorrt-rtx{part}" for part in ("", "-cu13", "-cu13-bindings", "-cu13-libs")}
    assert of_nvidia == {"nvidia-ml-py", "cuda-bindings", "cuda-pathfinder"} | family
    assert "onnxruntime" in installed
    assert "onnxruntime-gpu" not in installed


def test_there_is_no_library_that_only_cuda_needs(container: Container) -> None:
    files = container.run("find", "/opt", "/usr", "-name", "lib*.so*", "-printf", "%f\n").stdout.splitlines()
    families = ("cuda", "cudart", "cudnn", "cublas", "nvrtc", "nvinfer", "torch", "onnxruntime_providers_cuda")
    assert [name for name in files if name.startswith(tuple(f"lib{family}" for family in families))] == []
    assert "libtensorrt_rtx.so.1" in files


def test_the_demos_plans_are_inside_and_whole(container: Container) -> None:
    plans = inventory(container)
    assert len(plans["plans"]) == len(plan_files(container)) > 0
    assert plans["unreadable"] == []
    # Of one that is damaged it would say so.
    assert {plan["why_not"] for plan in plans["plans"]} == {"no GPU"}


def test_plans_belong_to_who_serves_and_nobody_else_may_write_them(container: Container) -> None:
    """Otherwise the server would not run them: a plan is code."""
    lines = container.run("find", "/cache", "-type", "f", "-printf", "%U %m %f\n").stdout.splitlines()
    owners, modes, names = zip(*(line.split() for line in lines), strict=True)
    assert any(name.endswith(".plan") for name in names)
    assert set(owners) == {str(USER)}
    assert all(int(mode, 8) & 0o022 == 0 for mode in modes)


def test_plans_that_are_inside_are_good_and_not_built_again(container: Container) -> None:
    before = plan_files(container, "-printf", "%p %T@\n")
    again = container.run("convoy", "build", "digits")
    assert again.returncode == 0, again.stderr
    assert plan_files(container, "-printf", "%p %T@\n") == before


def test_a_store_is_baked_in_as_the_documents_say(images: Images, image: str, tmp_path: Path) -> None:
    store = StoreFolder(tmp_path / "store")
    store.add_digits(name="flowers")
    (recipe,) = re.findall(r"```dockerfile\n(.*?)```", (ROOT / "docs" / "serving.md").read_text(), re.DOTALL)
    start = f"FROM {image.removeprefix('localhost/')}\n"
    assert recipe.startswith(start)
    # Or the demo's plans would do for its copy.
    (tmp_path / "Dockerfile").write_text(recipe.replace(start, f"{start}RUN rm -r /cache/*\n"))
    with images.container(images.build_folder(tmp_path, "flowers")) as container:
        assert inventory(container)["plans"]
        with container.serving() as server:
            assert server.seven("flowers") == ("1", "7")
            assert [model["name"] for model in server.stats()["models"]] == ["flowers"]
