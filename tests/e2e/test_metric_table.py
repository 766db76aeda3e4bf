"""docs/metrics.md has every metric that servers of all kinds show, with exactly its labels, and no other."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest
import tritonclient.grpc as triton_grpc

from convoy.app.ray.connections import Ways
from tests.support.metric_table import Shape, documented, shapes, shown
from tests.support.onnx_models import convolutions
from tests.support.servers import Server, metric, start_fake_server, start_server, wait_until

pytestmark = pytest.mark.slow


def look(server: Server) -> set[tuple[str, Shape]]:
    return set(shown(server.get("/metrics").text))


def seen_alone() -> set[tuple[str, Shape]]:
    """One process, asked well and ill on both wires."""
    with start_fake_server(fake={"gpu": True}) as server:
        assert server.infer(1.0).status_code == 200
        assert server.infer(1.0, model="nobody").status_code == 404
        client = triton_grpc.InferenceServerClient(server.grpc_address)
        with pytest.raises(Exception, match="nobody"):
            client.infer("nobody", [])
        client.close()
        # Three of one batch on a fake GPU whose sizes are powers of two: one is padding.
        assert server.infer(1.0, 2.0, 3.0).status_code == 200
        wait_until(lambda: metric(server, "convoy_gpu_utilization_ratio"), "the GPU was read")
        return look(server)


def seen_of_free_sizes(store: Path) -> set[tuple[str, Shape]]:
    """What is told of a model whose clients choose the height and width."""
    convolutions(store / "free" / "1" / "model.onnx")
    with start_server(store=store) as server:
        return look(server)


def seen_on_ray() -> set[tuple[str, Shape]]:
    """What a replica adds to its core's; real ones are asked in the tests of Ray."""
    return set(shapes(Ways("replica-1").collect()))


def test_the_table_has_every_metric_with_its_labels_and_no_other(tmp_path: Path) -> None:
    seen: defaultdict[str, set[Shape]] = defaultdict(set)
    for name, shape in seen_alone() | seen_of_free_sizes(tmp_path) | seen_on_ray():
        seen[name].add(shape)
    assert dict(seen) == {name: {shape} for name, shape in documented().items()}
