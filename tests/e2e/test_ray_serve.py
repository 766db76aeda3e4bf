"""Convoy in replicas of Ray Serve, on real clusters of raylets on this machine."""

from __future__ import annotations

import importlib.util
import io
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tritonclient.http
from PIL import Image

from convoy.loadtest.peers.replica.serve import FAST
from tests.support.ray_cluster import WHOLE_BODIES, Crowd, RayCluster, ray_cluster
from tests.support.servers import free_port, wait_until
from tests.support.stores import ROOT

pytestmark = [
    pytest.mark.long,
    pytest.mark.alone,
    pytest.mark.timeout(600),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed: pip install -e '.[ray]'"),
]
THREE = ROOT / "tests" / "data" / "three.png"
DIGITS = ROOT / "models" / "demo" / "digits"


def digits_request(samples: int, seed: int = 0) -> tuple[bytes, dict[str, str]]:
    """A binary request as the official client writes it."""
    tensor = tritonclient.http.InferInput("images", [samples, 32, 32, 3], "UINT8")
    tensor.set_data_from_numpy(np.random.default_rng(seed).integers(0, 255, (samples, 32, 32, 3), np.uint8))
    client = tritonclient.http.InferenceServerClient
    body, header_bytes = client.generate_request_body([tensor])
    return body, {"Inference-Header-Content-Length": str(header_bytes), "Content-Type": "application/octet-stream"}


def large_image() -> bytes:
    """Of 600 KB, because noise cannot be compressed."""
    pixels = np.random.default_rng(0).integers(0, 255, (450, 450, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    assert file.tell() > 600_000
    return file.getvalue()


def crowd_of_images(cluster: RayCluster, image: bytes, clients: int = 8) -> Crowd:
    return Crowd(cluster.port, "/predictions/digits", image, {}, clients)


def crowd_of_tensors(cluster: RayCluster, samples: int = 1, clients: int = 8) -> Crowd:
    body, headers = digits_request(samples)
    return Crowd(cluster.port, "/v2/models/digits/infer", body, headers, clients)


# What answers, and on which way


def check_contract(cluster: RayCluster, prefix: str = "") -> None:
    """A part of the contract through Ray's proxy: routes, words of errors, the official client."""
    with cluster.client(prefix) as client:
        assert client.get("/v2/health/ready").json() == {"ready": True}
        assert client.get("/v2").json()["name"] == "convoy"
        assert client.get("/docs").status_code == 200
        answer = client.post("/predictions/digits", content=THREE.read_bytes(), headers={"X-Request-Id": "mine"})
        assert answer.json()["predictions"][0]["label"] == "3"
        assert answer.headers.get_list("x-request-id") == ["mine"]
        for path, status in (("/predictions/nothing", 404), ("/v2/models/digits/infer", 400), ("/nowhere", 404)):
            refused = client.post(path, content=b"{}")
            assert (refused.status_code, list(refused.json())) == (status, ["error", "code"])
        many = client.post("/predictions/digits", files=[("image", THREE.read_bytes()), ("image", THREE.read_bytes())])
        assert [one["predictions"][0]["label"] for one in many.json()["results"]] == ["3", "3"]
    official = tritonclient.http.InferenceServerClient(f"127.0.0.1:{cluster.port}{prefix}")
    assert official.is_server_ready()
    assert official.is_model_ready("digits")
    images = np.random.default_rng(1).integers(0, 255, (5, 32, 32, 3), np.uint8)
    rows = []
    for taken in (images[:2], images[2:], images):
        tensor = tritonclient.http.InferInput("images", list(taken.shape), "UINT8")
        tensor.set_data_from_numpy(taken)
        rows.append(official.infer("digits", [tensor]).as_numpy("logits"))
    np.testing.assert_allclose(np.concatenate(rows[:2]), rows[2], rtol=1e-4, atol=1e-4)
    assert official.get_inference_statistics("digits")["model_stats"][0]["inference_count"] >= 1
    official.close()


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[RayCluster]:
    with ray_cluster(FAST | WHOLE_BODIES, nodes=2, cpus=2) as cluster:
        cluster.deploy(num_replicas=2, max_replicas_per_node=1, max_batch=64)
        yield cluster


def test_replicas_on_both_nodes_answer_on_the_direct_way(two_nodes: RayCluster) -> None:
    raylets = {replica.ppid() for replica in two_nodes.replicas()}
    assert len(raylets) == 2
    with crowd_of_images(two_nodes, THREE.read_bytes()) as crowd:
        crowd.after(2000)
    assert not crowd.failed
    ways = two_nodes.ways(replicas=2)
    assert ways["direct"] > 0.9 * crowd.answered


def test_the_contract_holds_behind_haproxy(two_nodes: RayCluster) -> None:
    check_contract(two_nodes)


@pytest.mark.parametrize("size", ["small", "600 KB"])
def test_a_replica_that_is_killed_takes_nothing_with_it(two_nodes: RayCluster, size: str) -> None:
    before = {replica.pid for replica in two_nodes.replicas()}
    crowd = crowd_of_tensors(two_nodes) if size == "small" else crowd_of_images(two_nodes, large_image(), clients=4)
    with crowd:
        crowd.after(200)
        two_nodes.replicas()[0].kill()
        crowd.after(200)
        wait_until(lambda: len({one.pid for one in two_nodes.replicas()} - before) == 1, "another replica is there")
        wait_until(lambda: two_nodes.do("states") == {"RUNNING": 2}, "both are at work")
        crowd.after(200)
    assert not crowd.failed, crowd.failed


def test_nobody_notices_a_rolling_upgrade(two_nodes: RayCluster) -> None:
    before = {replica.pid for replica in two_nodes.replicas()}
    with crowd_of_tensors(two_nodes) as crowd:
        crowd.after(200)
        two_nodes.deploy(num_replicas=2, max_replicas_per_node=2, max_batch=32)
        wait_until(lambda: not before & {one.pid for one in two_nodes.replicas()}, "the replicas of before have ended")
        crowd.after(200)
    assert not crowd.failed, crowd.failed
    with two_nodes.client() as client:
        assert client.get("/v2/models/digits/config").json()["max_batch_size"] == 32


def test_a_handle_asks_with_images_and_with_arrays(two_nodes: RayCluster) -> None:
    assert two_nodes.do("predict", [str(THREE), str(THREE)], "digits") == [["3"], ["3"]]
    assert two_nodes.do("infer", "digits", "images", [3, 32, 32, 3], "uint8") == {"logits": [3, 10]}
    assert two_nodes.do("error_of_infer", "digits", "pictures", [3, 32, 32, 3], "uint8") == "InvalidRequest"
    assert two_nodes.ways(replicas=2)["handle"] >= 3


def test_rays_python_proxy_answers_as_well_and_the_log_says_that_it_is_slow() -> None:
    with ray_cluster({}) as cluster:
        cluster.deploy(route_prefix="/cnn")
        check_contract(cluster, "/cnn")
        # Ray takes a router of handles only where it has no HAProxy before the same deployment.
        cluster.deploy(route_prefix="/cnn", router="expected-finish", num_replicas=2)
        for _ in range(20):
            assert cluster.do("predict", [str(THREE)], "digits") == [["3"]]
        assert "requests pass through Ray's Python proxy" in cluster.logs()


def test_where_ray_runs_the_models_on_another_loop_the_direct_way_steps_back() -> None:
    with ray_cluster(FAST | {"RAY_SERVE_THROUGHPUT_OPTIMIZED": "0"}) as cluster:
        cluster.deploy(route_prefix="/cnn")
        check_contract(cluster, "/cnn")
        assert "Ray runs the models on another event loop" in cluster.logs()


def test_the_example_of_the_docs_is_deployed(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "ray.md").read_text().partition("<!-- config.yaml -->\n```yaml\n")[2].partition("```")[0]
    shutil.copytree(DIGITS, tmp_path / "store" / "digits")
    dashboard_port = free_port()
    with ray_cluster(FAST, dashboard_port=dashboard_port) as cluster:
        file = tmp_path / "config.yaml"
        text = text.replace("port: 8000", f"port: {cluster.port}").replace("0.0.0.0", "127.0.0.1")
        file.write_text(text.replace("/models", str(tmp_path / "store")))
        command = [str(Path(sys.executable).with_name("serve")), "deploy", "-a", f"http://127.0.0.1:{dashboard_port}"]
        done = subprocess.run([*command, str(file)], capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        wait_until(lambda: cluster.do("states").get("RUNNING") == 1, "it is deployed", 120)
        check_contract(cluster)
        file.write_text(file.read_text().replace("store:", "stor:"))
        subprocess.run([*command, str(file)], capture_output=True, text=True, timeout=120, check=False)
        wait_until(lambda: "did you mean 'store'?" in cluster.do("message"), "the mistake is told", 120)
        check_contract(cluster)


# How many there are


def test_replicas_come_with_the_load_and_go_with_it() -> None:
    scaling = {"max_replicas": 2, "upscale_delay_s": 1, "downscale_delay_s": 1}
    scaling |= {"metrics_interval_s": 0.5, "look_back_period_s": 5}
    with ray_cluster(FAST) as cluster:
        # A target that a crowd of threads reaches on a small machine.
        cluster.deploy(target_utilisation=0.2, **scaling)
        assert cluster.do("states") == {"RUNNING": 1}
        with crowd_of_tensors(cluster) as crowd:
            wait_until(lambda: cluster.do("states").get("RUNNING") == 2, "there are two", 120)
            crowd.after(200)
        wait_until(lambda: cluster.do("states") == {"RUNNING": 1}, "there is one again", 120)
        assert not crowd.failed, crowd.failed
        with cluster.client() as client:
            assert client.get("/v2/health/ready").status_code == 200


# What goes wrong


def test_a_store_without_a_model_fails_the_deployment_in_words(tmp_path: Path) -> None:
    with ray_cluster(FAST) as cluster:
        with pytest.raises(AssertionError) as caught:
            cluster.deploy(store=str(tmp_path))
        assert "no model in" in str(caught.value) + cluster.logs()


def test_a_users_project_may_have_packages_of_our_names(tmp_path: Path) -> None:
    for name in ("app", "models", "export", "loadtest"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"raise RuntimeError('the user's own {name}')".replace("'s", ""))
    shutil.copytree(DIGITS, tmp_path / "store" / "digits")
    with ray_cluster(FAST, runtime_env={"working_dir": str(tmp_path)}) as cluster:
        cluster.deploy(store="store")
        check_contract(cluster)
