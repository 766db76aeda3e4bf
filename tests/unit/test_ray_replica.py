"""A replica without a cluster: what Ray is told of it, and what it says of itself. Needs Ray, but starts none of it."""

from __future__ import annotations

import asyncio
import importlib.util
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from convoy.app.core import Core
from convoy.models.errors import InvalidRequest, UsageError
from tests.support.stores import ROOT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed: pip install -e '.[ray]'"),
]
THREE = ROOT / "tests" / "data" / "three.png"


class Bench:
    """A replica whose core tells the test how to be lost."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Ray's own, at its import
            from convoy.app.ray import replica
        monkeypatch.setattr(replica.serve, "get_replica_context", _context)
        monkeypatch.setattr(replica, "take_connections", lambda *_: None)
        monkeypatch.setattr(replica, "Core", self._make_core)
        monkeypatch.setattr(replica.logs, "configure_own", lambda *_: None)
        self.Unwell = replica.ReplicaUnwell
        self.make: Callable[[dict[str, object]], Any] = replica.Replica

    def _make_core(self, *given: Any, on_fatal: Callable[[str], None], **more: Any) -> Core:
        self.lose = on_fatal
        return Core(*given, on_fatal=on_fatal, **more)


def _context() -> SimpleNamespace:
    return SimpleNamespace(replica_tag="one")


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(monkeypatch)


async def ended(app: Any) -> None:
    """As Ray ends an application, by its lifespan."""
    told = iter(({"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}))

    async def receive() -> Any:
        return next(told)

    async def send(_: Any) -> None:
        pass

    await app({"type": "lifespan"}, receive, send)


def test_a_replica_is_ready_when_it_is_made_and_unwell_once_its_core_is_lost(bench: Bench) -> None:
    async def scenario() -> None:
        replica = bench.make({"engine": "cpu", "threads": 1})
        app = await replica.__serve_build_asgi_app__()
        await replica.check_health()
        load = await replica.record_autoscaling_stats()
        assert set(load) == {"utilisation", "waiting_s", "requests_per_s"}
        assert (await replica.record_routing_stats())["max_batch"] == 64
        bench.lose("the GPU is lost")  # neither a signal nor an exit: the process goes on
        for _ in range(2):
            with pytest.raises(bench.Unwell, match="the GPU is lost"):
                await replica.check_health()
        await ended(app)
        await ended(app)  # Ray may end one twice

    asyncio.run(scenario())


def test_a_handle_may_leave_the_model_out_where_there_is_one(bench: Bench) -> None:
    async def scenario() -> None:
        replica = bench.make({"engine": "cpu", "threads": 1})
        app = await replica.__serve_build_asgi_app__()
        assert (await replica.predict(THREE.read_bytes())).best.label == "3"
        several = await replica.predict([THREE.read_bytes(), b"no image"], top_k=1)
        assert several[0].best.label == "3"
        assert several[1].error is not None
        assert (await replica.infer({"images": np.zeros((2, 32, 32, 3), np.uint8)}))["logits"].shape == (2, 10)
        with pytest.raises(InvalidRequest):
            await replica.infer({"pixels": np.zeros(3)}, timeout_ms=-1)
        await ended(app)

    asyncio.run(scenario())


def test_a_store_of_which_nothing_can_be_served_is_told_in_words(bench: Bench, tmp_path: Any) -> None:
    async def scenario() -> None:
        with pytest.raises(bench.Unwell, match="no model in"):
            await bench.make({"engine": "cpu", "store": str(tmp_path)}).__serve_build_asgi_app__()

    asyncio.run(scenario())
    with pytest.raises(UsageError, match="every node"):
        bench.make({"store": str(tmp_path / "away")})


def test_ray_is_told_what_a_replica_needs(bench: Bench) -> None:
    from convoy.app.ray.arguments import AppArguments
    from convoy.app.ray.replica import application

    given = {"num_gpus": 1, "num_cpus": 2, "resources": {"a10": 1}, "graceful_shutdown_timeout_s": 50}
    bundles = [{"CPU": 2, "GPU": 1, "a10": 1}, {"CPU": 4}]
    placed = application(AppArguments.model_validate({**given, "placement_bundles": bundles}))._bound_deployment
    actor = placed.ray_actor_options
    assert (actor["num_gpus"], actor["num_cpus"], actor["resources"]) == (1, 2, {"a10": 1})
    assert placed._replica_config.placement_group_bundles == bundles
    assert placed._deployment_config.graceful_shutdown_timeout_s == 50
    scaled = application(AppArguments(min_replicas=0, max_replicas=3, target_utilisation=0.5))._bound_deployment
    config = scaled._deployment_config.autoscaling_config
    assert (config.min_replicas, config.max_replicas) == (0, 3)
    policy = config.policy.get_policy()(**config.policy.policy_kwargs)
    busy = SimpleNamespace(
        aggregated_metrics={"utilisation": {1: 1.0}, "waiting_s": {1: 0.0}, "requests_per_s": {1: 9.0}},
        target_num_replicas=1,
        capacity_adjusted_min_replicas=0,
        capacity_adjusted_max_replicas=3,
    )
    assert policy(busy)[0] == 2  # also when Ray has pickled it
