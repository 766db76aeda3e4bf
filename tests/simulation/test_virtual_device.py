"""The simulation itself: what is known of one server in closed form, and what both of its loops must agree on."""

from __future__ import annotations

import numpy as np
import pytest

from tests.simulation.rules import run_rule, serve_all
from tests.simulation.virtual_policy import SimulationResult, run_policy
from tests.simulation.workload import Scenario, VirtualDevice, Workload, draw, equal, zipf

WHENEVER_NS = 1 << 60


def poisson(device: VirtualDevice, rho: float, count: int) -> Workload:
    """So many requests that come at random and have all the time in the world."""
    gaps_ns = np.random.default_rng(1).exponential(device.slope_ns / rho, count)
    return Workload((np.cumsum(gaps_ns).astype(np.int64).tolist(),), WHENEVER_NS)


def latencies(result: SimulationResult) -> np.ndarray:
    return np.array(result.ended_ns[0]) - np.array(result.workload.times_ns[0])


@pytest.mark.parametrize(
    ("kappa", "rho", "mean", "median", "p99"),
    [
        (5, 0.1, 1.60, 1.34, 2.75),
        (5, 0.5, 3.33, 3.22, 5.98),
        (5, 0.7, 5.53, 5.31, 10.5),
        (20, 0.1, 1.69, 1.69, 2.38),
        (20, 0.3, 2.21, 2.19, 3.23),
        (20, 0.5, 3.08, 3.05, 4.69),
        (20, 0.7, 5.13, 5.05, 8.06),
    ],
)
def test_serving_all_is_as_slow_as_the_exact_chain_says(
    kappa: float, rho: float, mean: float, median: float, p99: float
) -> None:
    """In units of a batch's fixed cost, without a bound on the batch."""
    device = VirtualDevice(kappa, max_batch=1 << 20)
    took = latencies(run_rule(serve_all(device), poisson(device, rho, 200_000), device)) / (kappa * device.slope_ns)
    assert took.mean() == pytest.approx(mean, rel=0.03)
    assert np.median(took) == pytest.approx(median, rel=0.03)
    assert np.quantile(took, 0.99) == pytest.approx(p99, rel=0.04)


@pytest.mark.parametrize("shares", [equal(1), equal(3), zipf(4)])
def test_without_urgency_the_policy_serves_all_to_the_nanosecond(shares: tuple[float, ...]) -> None:
    """Two loops that share nothing but the device come to the same ends."""
    device = VirtualDevice(4.0, max_batch=16)
    timed = draw(Scenario(device, 20, shares), 0.7, seed=3)
    workload = Workload(timed.times_ns, WHENEVER_NS)
    ours, theirs = run_policy(workload, device), run_rule(serve_all(device), workload, device)
    assert (ours.ended_ns, ours.batches) == (theirs.ended_ns, theirs.batches)


@pytest.mark.parametrize("arrivals", ["poisson", "steps"])
def test_a_higher_load_has_the_requests_of_a_lower_one_and_more(arrivals: str) -> None:
    scenario = Scenario(VirtualDevice(5.0), 10, arrivals=arrivals)
    low, high = (draw(scenario, rho, seed=1).times_ns[0] for rho in (0.4, 0.8))
    assert len(high) > 1.5 * len(low)
    assert all(sooner <= later for sooner, later in zip(high, low, strict=False))
    assert sorted(high) == high
    assert 0 <= high[0] <= high[-1] <= scenario.until_ns
