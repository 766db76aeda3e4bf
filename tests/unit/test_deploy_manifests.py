"""Every manifest in docs/deploy is what its API takes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from convoy.app.config.settings import Settings, read_settings
from tests.support.manifests import DEPLOY, PATCHES, check, document, documents, manifests

DATA = DEPLOY.parents[1] / "tests" / "data"
WHOLE = [path for path in manifests() if path.name not in PATCHES]


def named(path: Path) -> str:
    return str(path.relative_to(DEPLOY))


def test_every_file_is_a_manifest_of_a_kind_that_is_known() -> None:
    kinds = {one["kind"] for path in WHOLE for one in documents(path)}
    assert kinds == {
        *("Deployment", "Service", "PodDisruptionBudget", "HorizontalPodAutoscaler", "ScaledObject", "ServiceMonitor"),
        *("ClusterServingRuntime", "InferenceService", "RayService"),
    }
    assert {path.name for path in manifests()} >= set(PATCHES)


@pytest.mark.parametrize("path", WHOLE, ids=named)
def test_a_manifest_is_what_its_api_takes(path: Path) -> None:
    for one in documents(path):
        check(one)
        with pytest.raises(jsonschema.ValidationError):
            check({**one, "specx": {}})


# What a schema does not know


def containers() -> list[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Each container that runs `convoy serve`, and the pod that it is in."""
    deployment = document("kubernetes/base/deployment.yaml", "Deployment")["spec"]["template"]["spec"]
    runtime = document("kserve/runtime.yaml", "ClusterServingRuntime")["spec"]
    return [("deployment", deployment["containers"][0], deployment), ("kserve", runtime["containers"][0], runtime)]


def option(container: dict[str, Any], name: str) -> str:
    (found,) = [arg.partition("=")[2] for arg in container["args"] if arg.startswith(f"--{name}=")]
    return found


@pytest.mark.parametrize(("container", "pod"), [one[1:] for one in containers()], ids=[one[0] for one in containers()])
def test_ports_users_and_folders_are_the_images_own(container: dict[str, Any], pod: dict[str, Any]) -> None:
    ports = {one["name"]: str(one["containerPort"]) for one in container["ports"]}
    assert ports == {"http": option(container, "port"), "grpc": option(container, "grpc-port")}
    image = (DEPLOY.parents[1] / "Dockerfile").read_text()
    user = re.search(r"^USER (\d+):(\d+)$", image, re.MULTILINE)
    security = {**pod.get("securityContext", {}), **container["securityContext"]}
    assert (str(security["runAsUser"]), security["runAsNonRoot"]) == (user[1], True)
    # With a root that is read only, all that the image writes to must be a volume.
    assert security["readOnlyRootFilesystem"] is True
    mounts = {one["mountPath"]: one["name"] for one in container["volumeMounts"]}
    written = re.findall(r"CONVOY_(?:PLAN_CACHE|STORE_CACHE|ADDRESS_FILE)=(/[^/\s]+)", image)
    assert len(written) == 3
    assert set(written) <= mounts.keys()
    assert set(mounts.values()) == {one["name"] for one in pod["volumes"]}
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["port"] in ("http", int(ports["http"]))
        assert container[probe]["timeoutSeconds"] <= container[probe]["periodSeconds"]


def pods() -> list[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Each pod, with the container whose drain must fit into its grace."""
    (_, deployed, pod), (_, served, _) = containers()
    plain = document("kserve/inference-service.yaml", "InferenceService")["spec"]["predictor"]
    canary = document("kserve/inference-service-canary.yaml", "InferenceService")["spec"]
    predictors = [plain, canary["predictor"], *(one["predictor"] for one in canary["canary"])]
    return [("deployment", deployed, pod), *((f"predictor {n}", served, one) for n, one in enumerate(predictors))]


@pytest.mark.parametrize(("container", "pod"), [one[1:] for one in pods()], ids=[one[0] for one in pods()])
def test_the_grace_is_longer_than_the_drain_and_no_service_sets_our_options(
    container: dict[str, Any], pod: dict[str, Any]
) -> None:
    drain_s = sum(float(option(container, f"drain-{part}-s")) for part in ("delay", "timeout"))
    assert pod["terminationGracePeriodSeconds"] >= drain_s + 10
    assert pod["enableServiceLinks"] is False


def test_the_compose_file_of_two_replicas_fits_the_balancer_that_it_mounts() -> None:
    folder = DEPLOY / "balancers"
    compose = yaml.safe_load((folder / "compose.yml").read_text())
    rules = jsonschema.Draft7Validator(json.loads((DATA / "compose-spec.json").read_text()))
    rules.validate(compose)
    services, config = compose["services"], (folder / "haproxy.cfg").read_text()
    balancer, replicas = services["balancer"], [services[f"convoy-{number}"] for number in (1, 2)]
    assert balancer["volumes"] == ["./haproxy.cfg:/usr/local/etc/haproxy/haproxy.cfg:ro"]
    assert [port.rpartition(":")[2] for port in balancer["ports"]] == re.findall(r"bind :(\d+)", config)
    known = {alias for one in replicas for alias in one["networks"]["default"]["aliases"]}
    assert set(re.findall(r"^    server \S+ (\S+):\d+", config, re.MULTILINE)) == known
    for one in replicas:
        command, *options = one["command"]
        told = read_settings(dict(option.removeprefix("--").replace("-", "_").split("=") for option in options))
        assert command == "serve"
        assert told.drain_delay_s > 2, "two looks of the balancer"
        assert int(one["stop_grace_period"].removesuffix("s")) > told.drain_delay_s + told.drain_timeout_s + 10
    assert not rules.is_valid({**compose, "services": {**services, "convoy-1": {**replicas[0], "comand": []}}})


def test_a_roll_out_waits_longer_than_any_start_may_take() -> None:
    base = document("kubernetes/base/deployment.yaml", "Deployment")["spec"]
    gpu = document("kubernetes/overlays/gpu/gpu.yaml", "Deployment")["spec"]["template"]["spec"]["containers"][0]
    own = base["template"]["spec"]["containers"][0]["startupProbe"]
    patience_s = own["periodSeconds"] * max(own["failureThreshold"], gpu["startupProbe"]["failureThreshold"])
    assert base["progressDeadlineSeconds"] > patience_s


def test_what_selects_the_pods_is_on_the_pods_and_ports_have_their_names() -> None:
    template = document("kubernetes/base/deployment.yaml", "Deployment")["spec"]["template"]
    labels, (container,) = template["metadata"]["labels"].items(), template["spec"]["containers"]
    services = documents(DEPLOY / "kubernetes/base/service.yaml")
    budget = document("kubernetes/base/disruption-budget.yaml", "PodDisruptionBudget")
    selectors = [*(one["spec"]["selector"] for one in services), budget["spec"]["selector"]["matchLabels"]]
    assert all(selector.items() <= labels for selector in selectors)
    ports = {one["name"] for one in container["ports"]}
    assert all({one["targetPort"] for one in service["spec"]["ports"]} == ports for service in services)
    monitor = document("kubernetes/overlays/gpu-keda/service-monitor.yaml", "ServiceMonitor")["spec"]
    (watched,) = [
        one for one in services if monitor["selector"]["matchLabels"].items() <= one["metadata"]["labels"].items()
    ]
    assert monitor["endpoints"][0]["port"] in {one["name"] for one in watched["spec"]["ports"]}


def test_every_twin_of_an_option_is_real() -> None:
    texts = [path.read_text() for path in manifests()]
    twins = {name for text in texts for name in re.findall(r"name: CONVOY_([A-Z_]+)", text)}
    assert twins
    assert {name.lower() for name in twins} <= Settings.model_fields.keys()


def test_the_ray_application_has_its_arguments_in_order() -> None:
    spec = document("ray/rayservice.yaml", "RayService")["spec"]
    (application,) = yaml.safe_load(spec["serveConfigV2"])["applications"]
    assert application["import_path"] == "convoy.ray:build_app"
    arguments, cluster = application["args"], spec["rayClusterConfig"]
    (group,) = cluster["workerGroupSpecs"]
    (worker,) = group["template"]["spec"]["containers"]
    assert arguments["store"] in {one["mountPath"] for one in worker["volumeMounts"]}
    assert int(worker["resources"]["limits"]["cpu"]) >= arguments["num_cpus"]
    assert group["minReplicas"] * arguments["max_replicas_per_node"] >= arguments["num_replicas"]
    assert group["template"]["spec"]["terminationGracePeriodSeconds"] > arguments["graceful_shutdown_timeout_s"]
    assert worker["image"].endswith(f":{cluster['rayVersion']}")
    # HAProxy is on every node, or on none.
    (head,) = cluster["headGroupSpec"]["template"]["spec"]["containers"]
    assert head["env"] == worker["env"]


def test_the_ray_applications_arguments_are_known_to_it() -> None:
    known = pytest.importorskip("convoy.app.ray.arguments", reason="this build has no application for Ray")
    spec = document("ray/rayservice.yaml", "RayService")["spec"]
    (application,) = yaml.safe_load(spec["serveConfigV2"])["applications"]
    known.AppArguments(**application["args"])
