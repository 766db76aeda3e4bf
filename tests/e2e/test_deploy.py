"""What docs/deploy says is what runs: arguments of containers, paths of probes, metrics, balancers."""

from __future__ import annotations

import json
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
from tests.support.ray_cluster import Crowd
from tests.support.servers import (
    Server,
    free_port,
    metric,
    rows_request,
    start_fake_server,
    start_server,
    wait_until,
)
from tests.support.stores import DEMO, StoreFolder, digit
from tests.support.tools import tool

pytestmark = pytest.mark.slow
ROW = rows_request(0.0)
OVERLAYS = sorted(path.parent for path in (DEPLOY / "kubernetes" / "overlays").glob("*/kustomization.yaml"))
# What a service that is called convoy sets in the pods of its namespace, unless they refuse it.
SERVICE_LINKS = {"CONVOY_PORT": "tcp://10.0.0.1:8000", "CONVOY_SERVICE_HOST": "10.0.0.1"}


def container(name: str) -> dict[str, Any]:
    if name == "kserve":
        spec = document("kserve/runtime.yaml", "ClusterServingRuntime")["spec"]
    else:
        spec = document("kubernetes/base/deployment.yaml", "Deployment")["spec"]["template"]["spec"]
    found: dict[str, Any] = spec["containers"][0]
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
    queries = " ".join(one["metadata"]["query"] for one in triggers)
    assert demo.post("/predictions/digits", content=digit("seven")).status_code == 200
    families = list(text_string_to_metric_families(demo.get("/metrics").text))
    samples = [sample for family in families for sample in family.samples]
    known = {*(sample.name for sample in samples), *(f"{family.name}_total" for family in families)}
    asked = set(re.findall(r"convoy_\w+", queries))
    assert asked == {"convoy_stage_duration_seconds_sum", "convoy_rejected_total"}
    assert asked <= known
    for label, words in {
        "stage": {one.labels["stage"] for one in samples if one.name == "convoy_stage_duration_seconds_sum"},
        "reason": {str(one) for one in Refusal},
    }.items():
        assert set(re.findall(rf'{label}=~"([^"]*)"', queries)[0].split("|")) <= words


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
    """Where it listens for each protocol, and what asks it."""

    def __init__(self, http: int, grpc: int) -> None:
        self.port, self.grpc = http, f"127.0.0.1:{grpc}"

    def has_replicas(self) -> bool:
        """Whether a replica answered, and not the balancer because it knows of none yet."""
        try:
            reply = self.ask()
        except httpx.TransportError:
            return False
        return reply.status_code != 503 or "retry-after" in reply.headers

    def ask(self) -> httpx.Response:
        url = f"http://127.0.0.1:{self.port}/v2/models/shift/infer"
        return httpx.post(url, json=ROW, trust_env=False, verify=False, timeout=30)


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
def envoy(servers: list[Server], folder: Path, policy: dict[str, Any] | None = None) -> Iterator[Balancer]:
    """With a policy it asks the servers for the load that they have."""
    port = free_port()
    document = yaml.safe_load((DEPLOY / "balancers" / "envoy.yaml").read_text())
    resources = document["static_resources"]
    resources["listeners"][0]["address"]["socket_address"] = {"address": "127.0.0.1", "port_value": port}
    for cluster in resources["clusters"]:
        ports = [grpc_port(one) if cluster["name"] == "convoy_grpc" else one.port for one in servers]
        places = [{"address": "127.0.0.1", "port_value": int(one)} for one in ports]
        ends = [{"endpoint": {"address": {"socket_address": place}}} for place in places]
        cluster["load_assignment"]["endpoints"] = [{"lb_endpoints": ends}]
        if policy is not None:
            del cluster["lb_policy"]
            cluster["load_balancing_policy"] = {"policies": [{"typed_extension_config": policy}]}
    if policy is not None:
        manager = resources["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
        manager["route_config"]["virtual_hosts"][0] |= {
            "request_headers_to_add": [{"header": {"key": "endpoint-load-metrics-format", "value": "TEXT"}}],
            "response_headers_to_remove": ["endpoint-load-metrics"],
        }
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


def policy(name: str, **settings: str) -> dict[str, Any]:
    kind = f"{name}.v3.{name.title().replace('_', '')}"
    kind = f"type.googleapis.com/envoy.extensions.load_balancing_policies.{kind}"
    return {"name": name, "typed_config": {"@type": kind, **settings}}


BY_LOAD = policy("client_side_weighted_round_robin", blackout_period="1s", weight_update_period="0.5s")


def share(folder: Path, fast: Server, slow: Server, by: dict[str, Any]) -> float:
    """How many requests the fast one gets for each of the slow one's, once the weights are known."""

    def answered() -> list[float]:
        return [metric(one, "convoy_requests_total", outcome="success") for one in (fast, slow)]

    body = json.dumps(rows_request(1.0)).encode()
    with (
        envoy([fast, slow], folder, by) as balancer,
        Crowd(balancer.port, "/v2/models/rows/infer", body, {}, clients=4) as crowd,
    ):
        crowd.after(600)  # in which the load is told, and the weights are known
        before = answered()
        crowd.after(600)
        more = [after - earlier for after, earlier in zip(answered(), before, strict=True)]
    assert not crowd.failed
    return more[0] / max(1.0, more[1])


@pytest.mark.long
def test_envoy_leads_requests_to_where_there_is_more_room(tmp_path: Path) -> None:
    quick, lame = {"per_sample_ms": 3.0, "max_batch": 2}, {"per_sample_ms": 15.0, "max_batch": 2}
    with start_fake_server(fake=quick) as fast, start_fake_server(fake=lame) as slow:
        assert 0.8 < share(tmp_path, fast, slow, policy("round_robin")) < 1.25
        assert share(tmp_path, fast, slow, BY_LOAD) > 2.5
