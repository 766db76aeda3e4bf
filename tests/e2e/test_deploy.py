"""What docs/deploy says is what runs: arguments of containers, paths of probes, metrics, balancers."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import tritonclient.grpc as triton_grpc
import yaml
from prometheus_client.parser import text_string_to_metric_families

from convoy.app.telemetry.outcomes import Refusal
from tests.support.manifests import DEPLOY, check, document
from tests.support.played_http import Asked, playing
from tests.support.servers import Server, free_port, rows_request, start_server, wait_until
from tests.support.stores import DEMO, StoreFolder, digit
from tests.support.tools import tool

pytestmark = pytest.mark.slow
ROW = rows_request(0.0)
OVERLAYS = sorted(path.parent for path in (DEPLOY / "kubernetes" / "overlays").glob("*/kustomization.yaml"))
# What a service that is called convoy sets in the pods of its namespace, unless they refuse it.
SERVICE_LINKS = {"CONVOY_PORT": "tcp://10.0.0.1:8000", "CONVOY_SERVICE_HOST": "10.0.0.1"}


def container(name: str) -> dict[str, Any]:
    found: dict[str, Any]
    if name == "kserve":
        found = document("kserve/runtime.yaml", "ClusterServingRuntime")["spec"]["containers"][0]
    else:
        deployment = document("kubernetes/base/deployment.yaml", "Deployment")
        found = deployment["spec"]["template"]["spec"]["containers"][0]
    return found


def arguments(name: str, store: Path) -> list[str]:
    """A container's own, but for its ports and where its store is."""
    command, *given = container(name)["args"]
    assert command == "serve"
    places = {"/store": str(store), "/mnt/models": str(store), "{{.Name}}": "flowers"}
    options = dict(arg.split("=", 1) for arg in given)
    options |= {"--port": "0", "--grpc-port": "0"}
    return [f"{option}={places.get(value, value)}" for option, value in options.items()]


def store_of(name: str, folder: Path) -> Path:
    """As KServe's initialiser leaves it, one model and nothing around it; or a folder of models."""
    shutil.copytree(DEMO, folder / ("1" if name == "kserve" else "digits/1"))
    return folder


@pytest.mark.parametrize(("name", "model"), [("deployment", "digits"), ("kserve", "flowers")])
def test_a_containers_own_arguments_serve_and_its_probes_answer(tmp_path: Path, name: str, model: str) -> None:
    store = store_of(name, tmp_path / "store")
    env = {**SERVICE_LINKS, "CONVOY_PLAN_CACHE": str(tmp_path / "cache")}
    del env["CONVOY_SERVICE_HOST"]  # no option of ours
    # It is asked twice to end, and does so at once.
    with start_server(*arguments(name, store), "--host=127.0.0.1", env=env, exit_code=143) as server:
        own = container(name)
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert server.get(own[probe]["httpGet"]["path"]).status_code == 200, probe
        assert server.post(f"/predictions/{model}", content=digit("seven")).json()["predictions"][0]["label"] == "7"
        with triton_grpc.InferenceServerClient(server.grpc_address) as client:
            assert client.is_model_ready(model)
        server.signal()
        wait_until(lambda: server.get(own["readinessProbe"]["httpGet"]["path"]).status_code == 503, "it leaves")
        assert server.get(own["livenessProbe"]["httpGet"]["path"]).status_code == 200
        # Endpoints and balancers do not know yet.
        assert server.post(f"/predictions/{model}", content=digit("seven")).status_code == 200


def test_the_metrics_that_scale_are_there_and_count_what_they_are_said_to(demo: Server) -> None:
    triggers = document("kubernetes/overlays/gpu-keda/scaled-object.yaml", "ScaledObject")["spec"]["triggers"]
    assert demo.post("/predictions/digits", content=digit("seven")).status_code == 200
    families = list(text_string_to_metric_families(demo.get("/metrics").text))
    samples = [sample for family in families for sample in family.samples]
    known = {*(sample.name for sample in samples), *(f"{family.name}_total" for family in families)}
    asked = {name for one in triggers for name in re.findall(r"convoy_\w+", one["metadata"]["query"])}
    assert asked == {"convoy_stage_duration_seconds_sum", "convoy_rejected_total"}
    assert asked <= known
    stages = {one.labels["stage"] for one in samples if one.name == "convoy_stage_duration_seconds_sum"}
    (query,) = [one["metadata"]["query"] for one in triggers if "stage" in one["metadata"]["query"]]
    assert set(re.findall(r'stage=~"([^"]*)"', query)[0].split("|")) <= stages


def test_the_reasons_that_scale_are_real() -> None:
    text = (DEPLOY / "kubernetes/overlays/gpu-keda/scaled-object.yaml").read_text()
    reasons = set(re.findall(r'reason=~"([^"]*)"', text)[0].split("|"))
    assert reasons <= {str(one) for one in Refusal}


@pytest.mark.long
@pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda path: path.name)
def test_kustomize_builds_every_overlay_into_what_the_api_takes(overlay: Path) -> None:
    built = subprocess.run([tool("kubectl"), "kustomize", overlay], capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    found = {one["kind"]: one for one in yaml.safe_load_all(built.stdout)}
    for one in found.values():
        check(one)
    deployment = found["Deployment"]["spec"]
    (own,) = deployment["template"]["spec"]["containers"]
    assert own["image"].startswith("registry.example/convoy:")
    assert ("nvidia.com/gpu" in own["resources"]["limits"]) == overlay.name.startswith("gpu")
    assert "args" in own
    # Who scales and who says how many there are is one of them, never two.
    scales = sum(kind in found for kind in ("HorizontalPodAutoscaler", "ScaledObject"))
    assert scales + ("replicas" in deployment) == 1
    mounts = {one["name"] for one in own["volumeMounts"]}
    assert mounts == {one["name"] for one in deployment["template"]["spec"]["volumes"]}
    assert ("store" in mounts) == (overlay.name == "pvc")


# The balancers in front of two real servers


class Balancer:
    """Where it listens for each protocol."""

    def __init__(self, http: int, grpc: int) -> None:
        self.url, self.grpc = f"http://127.0.0.1:{http}", f"127.0.0.1:{grpc}"

    def has_replicas(self) -> bool:
        """Whether a replica answered, and not the balancer because it knows of none yet."""
        try:
            reply = self.ask()
        except httpx.TransportError:
            return False
        return reply.status_code == 200 or "retry-after" in reply.headers

    def ask(self) -> httpx.Response:
        return httpx.post(f"{self.url}/v2/models/shift/infer", json=ROW, trust_env=False, verify=False, timeout=30)


@contextmanager
def running(command: list[str], log: Path, balancer: Balancer) -> Iterator[Balancer]:
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out)
    try:
        wait_until(balancer.has_replicas, f"the balancer answers; its log:\n{log.read_text()[-2000:]}")
        yield balancer
    finally:
        process.terminate()
        process.wait(30)


def grpc_port(server: Server) -> str:
    return server.grpc_address.rpartition(":")[2]


@contextmanager
def haproxy(servers: list[Server], folder: Path) -> Iterator[Balancer]:
    http, grpc = free_port(), free_port()
    text = (DEPLOY / "balancers" / "haproxy.cfg").read_text()
    text = text.replace(":8080", f"127.0.0.1:{http}").replace(":8081", f"127.0.0.1:{grpc}")
    for number, server in enumerate(servers, 1):
        text = text.replace(f"convoy-{number}.example:8000", f"127.0.0.1:{server.port}")
        text = text.replace(f"convoy-{number}.example:8001", f"127.0.0.1:{grpc_port(server)}")
        text = re.sub(rf"(:{grpc_port(server)} .*check) port 8000", rf"\1 port {server.port}", text)
    (folder / "haproxy.cfg").write_text(text)
    with running([tool("haproxy"), "-f", str(folder / "haproxy.cfg")], folder / "log", Balancer(http, grpc)) as one:
        yield one


@contextmanager
def envoy(servers: list[Server], folder: Path) -> Iterator[Balancer]:
    port = free_port()
    document = yaml.safe_load((DEPLOY / "balancers" / "envoy.yaml").read_text())
    resources = document["static_resources"]
    resources["listeners"][0]["address"]["socket_address"] = {"address": "127.0.0.1", "port_value": port}
    for cluster in resources["clusters"]:
        ports = [grpc_port(one) if cluster["name"] == "convoy_grpc" else one.port for one in servers]
        places = [{"address": "127.0.0.1", "port_value": int(one)} for one in ports]
        ends = [{"endpoint": {"address": {"socket_address": place}}} for place in places]
        cluster["load_assignment"]["endpoints"] = [{"lb_endpoints": ends}]
    (folder / "envoy.yaml").write_text(yaml.safe_dump(document))
    command = [tool("envoy"), "-c", str(folder / "envoy.yaml"), "--concurrency", "1", "--use-dynamic-base-id"]
    with running(command, folder / "log", Balancer(port, port)) as one:
        yield one


@pytest.mark.long
@pytest.mark.parametrize("balanced", [haproxy, envoy])
def test_behind_a_balancer_a_replica_leaves_and_nobody_notices(tmp_path: Path, balanced: Any) -> None:
    store = StoreFolder(tmp_path / "store")
    store.add_shift(1.0)
    with ExitStack() as stack:
        _, *own = yaml.safe_load((DEPLOY / "balancers" / "compose.yml").read_text())["services"]["convoy-1"]["command"]
        options = (*own, "--access-log", "off", "--host", "127.0.0.1")
        servers = [stack.enter_context(start_server(*options, store=store.root)) for _ in range(2)]
        balancer = stack.enter_context(balanced(servers, tmp_path))
        with triton_grpc.InferenceServerClient(balancer.grpc) as client:
            assert client.is_model_ready("shift")
        with ThreadPoolExecutor(8) as pool:
            answers = Counter(one.status_code for one in pool.map(lambda _: balancer.ask(), range(400)))
            assert answers == {200: 400}
            counts = [one.statistics("shift")["inference_count"] for one in servers]
            assert min(counts) > 100, counts
            asking = [pool.submit(balancer.ask) for _ in range(200)]
            servers[0].signal()
            while servers[0].process.poll() is None:
                asking += [pool.submit(balancer.ask) for _ in range(8)]
                asking[-1].result()
            asking += [pool.submit(balancer.ask) for _ in range(200)]
            assert Counter(one.result().status_code for one in asking) == {200: len(asking)}
        assert servers[1].statistics("shift")["inference_count"] > counts[1]


class FullReplica:
    """A replica that is well and has no room: what the balancers need to know of a server, with its ports."""

    def __init__(self, stack: ExitStack) -> None:
        self.asked = 0
        self.port = int(stack.enter_context(playing(self._answer)).rpartition(":")[2])
        self.grpc_address = f"127.0.0.1:{free_port()}"

    def _answer(self, asked: Asked) -> tuple[int, dict[str, str], bytes]:
        if asked.method == "GET":
            return 200, {}, b""
        self.asked += 1
        return 503, {"Retry-After": "7"}, b""


@pytest.mark.long
@pytest.mark.parametrize("balanced", [haproxy, envoy])
def test_behind_a_balancer_a_503_is_the_clients_with_its_retry_after(tmp_path: Path, balanced: Any) -> None:
    with ExitStack() as stack:
        replicas = [FullReplica(stack), FullReplica(stack)]
        balancer = stack.enter_context(balanced(replicas, tmp_path))
        before = sum(one.asked for one in replicas)
        reply = balancer.ask()
        assert (reply.status_code, reply.headers["retry-after"]) == (503, "7")
        assert sum(one.asked for one in replicas) == before + 1
