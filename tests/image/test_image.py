"""Each image as its users run it: built from the Dockerfile, started, asked, stopped, and looked into.

`make image-test` runs it for the CPU's and for TensorRT for RTX, `IMAGE_TARGET=gpu make image-test` for the largest
one, without TensorRT, whose libraries only NVIDIA's own index has. `test_rtx_image.py` has what one of them adds.
"""

from __future__ import annotations

import json
import re
import signal

import pytest

from tests.support.containers import TARGETS, Container, Images, main_process
from tests.support.servers import Server
from tests.support.stores import ROOT, StoreFolder

USER = 10001
# What an image may weigh beyond its base: little more than two of them do. The largest is
# tested without TensorRT, and only to be far below what torch would add.
MOST_BYTES = {"cpu": 340_000_000, "rtx": 620_000_000, "gpu": 4 << 30}

pytestmark = [pytest.mark.image, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module", params=TARGETS)
def target(request: pytest.FixtureRequest) -> str:
    assert isinstance(request.param, str)
    return request.param


@pytest.fixture(scope="module")
def image(images: Images, base: str, target: str) -> str:
    return images.build(target, base)


def test_without_a_store_it_serves_the_demo(server: Server) -> None:
    assert server.seven() == ("1", "7")


def test_what_serves_without_a_gpu_is_the_cpu_and_it_says_why(server: Server) -> None:
    (model,) = server.stats()["models"]
    assert model["engine"] == "onnxruntime-cpu"
    assert {reason.partition(": ")[0] for reason in model["why_not_others"]} >= {"tensorrt-rtx", "onnxruntime-cuda"}


def test_it_runs_as_a_user_of_its_own(container: Container, server: Server) -> None:
    process = main_process(server)
    assert {*process.uids(), *process.gids()} == {USER}
    assert container.run("sh", "-c", "touch /opt/convoy/x || touch /opt/libraries/x || touch /store/x").returncode != 0


def test_serving_writes_nothing_but_where_it_listens(container: Container, server: Server) -> None:
    """No caches and no identifiers either: a library that reports to its makers would leave one."""
    assert server.seven() == ("1", "7")
    # What is in /cache was built with the image.
    elsewhere = ("-not", "-path", "/proc/*", "-not", "-path", "/cache/*")
    written = container.run("find", "/", "-xdev", "-user", str(USER), "-type", "f", *elsewhere)
    assert written.stdout.split() == ["/tmp/convoy-address"]


def test_the_plan_cache_is_its_own(container: Container) -> None:
    assert container.run("sh", "-c", "touch /cache/plan && rm /cache/plan").returncode == 0
    assert container.run("stat", "--format=%u %a", "/cache").stdout.split() == [str(USER), "755"]


def test_it_is_well_while_it_serves(container: Container, server: Server) -> None:
    assert (server.is_ready(), container.check_health()) == (True, 0)


def test_the_entry_point_gets_the_signals_itself(container: Container) -> None:
    assert (container.config["Entrypoint"], container.config["Cmd"]) == (["convoy"], ["serve"])


@pytest.mark.parametrize("tool", ["cc", "gcc", "g++", "make", "ld", "pip", "git"])
def test_there_is_no_tool_that_builds_or_installs(container: Container, tool: str) -> None:
    found = container.run("sh", "-c", f"command -v {tool}")
    assert found.returncode != 0, found.stdout


@pytest.mark.parametrize("module", ["torch", "torchvision", "onnx", "onnxscript", "pytest", "pip", "setuptools"])
def test_there_is_no_library_that_serving_does_not_need(container: Container, module: str) -> None:
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec('{module}') is not None)"
    assert container.run("python3", "-c", code).returncode == 0


def test_every_library_is_pinned(container: Container) -> None:
    code = "import importlib.metadata as m, json; print(json.dumps({d.name: d.version for d in m.distributions()}))"
    installed = json.loads(container.run("python3", "-c", code).stdout)
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = dict(line.split("==") for line in lines if "==" in line)
    exact = {normal(name): version for name, version in pinned.items()}
    unpinned = {name: v for name, v in installed.items() if exact.get(normal(name)) != v and name != "convoy-serve"}
    assert not unpinned


def normal(distribution: str) -> str:
    return re.sub(r"[-_.]+", "-", distribution).lower()


def test_it_builds_plans_or_says_what_to_install(container: Container, target: str) -> None:
    built = container.run(
        "sh", "-c", "convoy build digits --plan-cache /tmp/plans; built=$?; rm -rf /tmp/plans; exit $built"
    )
    assert built.returncode == (0 if target == "rtx" else 1), built.stderr
    assert target == "rtx" or "pip install 'convoy-serve[rtx]'" in built.stderr


def test_doctor_finds_nothing_wrong_with_the_cpu(container: Container) -> None:
    diagnosis = json.loads(container.run("convoy", "doctor", "--json").stdout)
    assert {e["engine"]: e["usable"] for e in diagnosis["engines"]} == {
        "tensorrt": False,
        "tensorrt-rtx": False,
        "onnxruntime-cuda": False,
        "onnxruntime-cpu": True,
        "openvino": False,
    }


def test_a_mounted_store_is_served_and_a_signal_ends_it_in_order(
    images: Images, image: str, store: StoreFolder
) -> None:
    store.add_digits(name="numbers")
    with images.container(image, f"{store.root}:/store:ro") as container:
        assert container.check_health() != 0
        with container.serving() as server:
            assert server.seven("numbers") == ("1", "7")
            assert [model["name"] for model in server.stats()["models"]] == ["numbers"]
            main_process(server).send_signal(signal.SIGTERM)
            assert server.wait() == 0
        assert container.check_health() != 0


def test_it_weighs_little_beyond_its_base(images: Images, base: str, image: str, target: str) -> None:
    own_bytes = images.bytes_of(image) - images.bytes_of(base)
    print(f"{target}: {own_bytes / 1e6:.0f} MB on top of its base")
    assert own_bytes < MOST_BYTES[target]
