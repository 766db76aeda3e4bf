"""The small parts of a server of several processes: how many there are, what each has, when to give up."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from convoy.app.edge_count import MOST_EDGES, choose_edges, has_gpu_driver
from convoy.app.processes.balance import BOARD_BYTES, Balance
from convoy.app.processes.launch import divide, edge_profile
from convoy.app.processes.restarts import Restarts
from convoy.app.settings import MIB, read_settings
from convoy.models.errors import UsageError


@pytest.mark.parametrize("cores", [1, 2, 3])
@pytest.mark.parametrize("has_gpu", [False, True])
def test_few_cores_are_best_used_by_one_process(cores: int, *, has_gpu: bool) -> None:
    assert choose_edges(cores, has_gpu=has_gpu, room=9).count == 0


@pytest.mark.parametrize(
    ("cores", "has_gpu", "edges"), [(4, False, 1), (4, True, 1), (16, False, 4), (16, True, 7), (128, True, 8)]
)
def test_a_gpu_leaves_the_cores_to_the_edges(cores: int, *, has_gpu: bool, edges: int) -> None:
    chosen = choose_edges(cores, has_gpu=has_gpu, room=9)
    assert chosen.count == edges
    assert f"{cores} cores" in chosen.why


def test_no_more_edges_than_there_is_memory_for() -> None:
    chosen = choose_edges(64, has_gpu=True, room=3)
    assert chosen.count == 3
    assert "--max-inflight-mb" in chosen.why


def test_a_gpu_is_told_by_its_driver(tmp_path: Path) -> None:
    assert not has_gpu_driver(tmp_path / "version")
    (tmp_path / "version").touch()
    assert has_gpu_driver(tmp_path / "version")


@pytest.mark.parametrize("given", ["-1", "two", "1.5", "", str(MOST_EDGES + 1)])
def test_a_number_of_edges_that_is_none(given: str) -> None:
    with pytest.raises(UsageError, match="edges must be auto or a number"):
        read_settings({"edges": given})


def test_each_part_must_hold_a_body() -> None:
    assert read_settings({"edges": "3", "max_inflight_mb": 256}).edge_count().count == 3
    with pytest.raises(UsageError, match="max_inflight_mb to at least 320"):
        read_settings({"edges": "4", "max_inflight_mb": 256})
    assert read_settings({"edges": "4", "max_inflight_mb": 320}).edge_count().count == 4


@given(st.integers(1, 1 << 40), st.integers(1, 65))
def test_parts_are_whole_pages_side_by_side(nbytes: int, count: int) -> None:
    parts = divide(nbytes, count)
    assert len({part.nbytes for part in parts}) == 1
    assert nbytes - count * mmap.PAGESIZE < sum(part.nbytes for part in parts) <= nbytes
    for number, part in enumerate(parts):
        assert part.offset == BOARD_BYTES + number * part.nbytes
        assert part.offset % mmap.PAGESIZE == part.nbytes % mmap.PAGESIZE == 0


@given(st.lists(st.integers(0, 4096), min_size=1, max_size=8), st.data())
def test_who_has_more_connections_lets_the_others_go_first(counts: list[int], data: st.DataObject) -> None:
    memory = mmap.mmap(-1, BOARD_BYTES)
    edges = [Balance(memory, len(counts), number) for number in range(len(counts))]
    for edge, connections in zip(edges, counts, strict=True):
        edge.publish(connections)
    own = data.draw(st.integers(0, len(counts) - 1))
    patience_s = edges[own].patience_s()
    assert (patience_s == 0) is (counts[own] == min(counts)), "somebody always takes it at once"
    assert 0 <= patience_s <= 0.02
    assert Balance(memory, len(counts), own).patience_s() == 0, "one that has just come has none"


def test_edges_share_what_all_of_them_may_do() -> None:
    settings = read_settings({"edges": "3", "max_connections": 100, "max_queue": 10})
    profile = edge_profile(settings, 3)
    assert (profile.limits.max_connections, profile.options.max_decoding) == (34, 4)
    assert profile.options.body.max_bytes == 64 * MIB
    assert profile.infers


def test_a_process_that_was_well_is_replaced_at_once_each_time() -> None:
    restarts = Restarts()
    assert [restarts.after(3600.0) for _ in range(100)] == [0.0] * 100


def test_a_process_that_dies_at_once_is_given_ever_more_time_and_then_up() -> None:
    restarts = Restarts()
    delays = [restarts.after(0.1) for _ in range(9)]
    waits = [delay for delay in delays[:-1] if delay is not None]
    assert len(waits) == 8
    assert waits == sorted(waits)
    assert waits[0] == 0.0
    assert waits[-1] <= 5.0
    assert delays[-1] is None


def test_time_well_spent_forgives() -> None:
    restarts = Restarts()
    for _ in range(8):
        restarts.after(0.1)
    assert restarts.after(60.0) == 0.0
    assert restarts.after(0.1) == 0.1
