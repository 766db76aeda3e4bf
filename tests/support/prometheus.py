"""A Prometheus of a test's own: its port, its folder, and questions to it."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.support.promql import RULES
from tests.support.servers import free_port, wait_until
from tests.support.tools import tool

_END_S = 30.0


class Prometheus:
    """A running one that looks once a second."""

    def __init__(self, port: int) -> None:
        self._client = httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=30.0)

    def is_ready(self) -> bool:
        return self._client.get("/-/ready").status_code == 200

    def ask(self, expr: str) -> list[dict[str, Any]]:
        """Every series that an expression has now: its labels as `metric`, and `value`. A wrong one is an error."""
        answer = self._client.get("/api/v1/query", params={"query": expr})
        assert answer.status_code == 200, f"{expr}: {answer.text}"
        found: list[dict[str, Any]] = answer.json()["data"]["result"]
        return found

    def targets(self) -> dict[str, str]:
        """How each server is, by its address: `up`, `down`, or `unknown` before the first look."""
        active = self._client.get("/api/v1/targets").json()["data"]["activeTargets"]
        return {one["labels"]["instance"]: one["health"] for one in active}

    def unhealthy_rules(self) -> list[str]:
        """Those that Prometheus could not evaluate, or has not yet, with what it says of them."""
        groups = self._client.get("/api/v1/rules").json()["data"]["groups"]
        rules = [rule for group in groups for rule in group["rules"]]
        assert rules
        return [f"{rule['name']}: {rule.get('lastError', rule['health'])}" for rule in rules if rule["health"] != "ok"]

    def close(self) -> None:
        self._client.close()


@contextmanager
def start_prometheus(servers: Sequence[str]) -> Iterator[Prometheus]:
    """One that scrapes these addresses under the job `convoy`, with our rules; it is gone when the body ends."""
    program, port = tool("prometheus"), free_port()
    with tempfile.TemporaryDirectory(prefix="convoy-prometheus-") as name:
        folder = Path(name)
        config = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(RULES)],
            "scrape_configs": [{"job_name": "convoy", "static_configs": [{"targets": list(servers)}]}],
        }
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        log = folder / "log"
        command = [
            program,
            f"--config.file={folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
        ]
        with log.open("wb") as out, subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT) as process:
            one = Prometheus(port)
            try:
                wait_until(lambda: _answers(one, process, log), "Prometheus answers", 60.0)
                yield one
            finally:
                one.close()
                process.terminate()
                try:
                    process.wait(_END_S)
                except subprocess.TimeoutExpired:
                    process.kill()


def _answers(one: Prometheus, process: subprocess.Popen[bytes], log: Path) -> bool:
    assert process.poll() is None, f"Prometheus has ended:\n{log.read_text()[-3000:]}"
    try:
        return one.is_ready()
    except httpx.TransportError:
        return False
