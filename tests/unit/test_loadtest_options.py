from __future__ import annotations

import pytest

from convoy.loadtest.options import LoadTestOptions
from convoy.models.errors import UsageError


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"rate": 5, "concurrency": 5}, "not both"),
        ({"rate": 0}, "--rate must be"),
        ({"rate": float("nan")}, "--rate must be"),
        ({"duration_s": -1}, "--duration must be"),
        ({"duration_s": float("inf")}, "--duration must be"),
        ({"duration_s": 1e9}, "--duration must be at most"),
        ({"slo_ms": 0}, "--slo-ms must be"),
        ({"timeout_s": 0}, "--timeout must be"),
        ({"warm_up_s": 10.0, "duration_s": 10.0}, "--warm-up must be"),
        ({"concurrency": 0}, "--concurrency must be"),
        ({"connections": 100_000}, "--connections must be"),
        ({"rate": 1e6, "duration_s": 60}, "lower the rate or the duration"),
        ({"body": "xml"}, "--body must be"),
        ({"arrivals": "bursts"}, "needs --rate"),
        ({"arrivals": "sometimes", "rate": 1}, "--arrivals must be poisson, constant or bursts"),
        ({"protocol": "smtp"}, "--protocol must be"),
        ({"find_capacity": True}, "needs --slo-ms"),
        ({"find_capacity": True, "slo_ms": 5, "rate": 5}, "different kinds of load"),
        ({"find_capacity": True, "slo_ms": 5, "arrivals": "constant"}, "Poisson"),
        ({"steps": (100.0, -1.0)}, "--steps must be"),
        ({"processes": 0}, "--processes must be"),
        ({"burst_off_s": 0.0, "rate": 1, "arrivals": "bursts"}, "--burst-off must be"),
        ({"api_key": "line\r\nbreak"}, "API key"),
    ],
)
def test_a_wrong_call_is_named(wrong, words):
    with pytest.raises(UsageError, match=words):
        LoadTestOptions(**wrong)


def test_a_report_that_could_not_be_written_is_refused_before_the_run(tmp_path):
    with pytest.raises(UsageError, match="folder does not exist"):
        LoadTestOptions(json_file=tmp_path / "missing" / "report.json")
