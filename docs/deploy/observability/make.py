"""Rules and dashboards: python -m docs.deploy.observability.make

    --availability 0.999    the share of requests that must succeed
    --latency-s 0.25        the latency objective; one of the buckets of convoy_call_duration_seconds
    --latency-share 0.99    the share of responses that must meet it

Writes rules.yml, dashboards/*.json, and the list of alerts in README.md.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import yaml

from docs.deploy.observability.alerts import alerts, rules
from docs.deploy.observability.grafana import grafana
from docs.deploy.observability.objective import Objective
from docs.deploy.observability.panels import dashboards

FOLDER = Path(__file__).parent
_MARK = "<!-- python -m docs.deploy.observability.make -->\n"


def runbook(objective: Objective) -> str:
    """The list of alerts in README.md."""
    lines = ["| Alert | Severity | Summary | What to do |", "|---|---|---|---|"]
    for some in alerts(objective).values():
        for one in some:
            said = one.summary.replace("{{ $value | humanizePercentage }}", "X %")
            for label in ("job", "instance", "model", "version", "device"):
                said = said.replace(f"{{{{ $labels.{label} }}}}", f"*{label}*")
            lasts = f", for {one.lasts}" if one.lasts else ""
            lines.append(f"| `{one.name}` | {one.severity}{lasts} | {said[0].upper()}{said[1:]}. | {one.look} |")
    return "\n".join(lines) + "\n"


def files(objective: Objective) -> dict[str, str]:
    """What each file beside this one has to hold."""
    begun = "# Made by make.py.\n"
    dumped = yaml.safe_dump(rules(objective), sort_keys=False, width=1000, allow_unicode=True)
    found = {"rules.yml": begun + dumped}
    for one in dashboards(objective):
        found[f"dashboards/{one.name}.json"] = json.dumps(grafana(one), indent=2) + "\n"
    before, _, after = (FOLDER / "README.md").read_text().split(_MARK)
    found["README.md"] = f"{before}{_MARK}{runbook(objective)}{_MARK}{after}"
    return found


def main() -> None:
    own = Objective()
    parser = argparse.ArgumentParser(description="Write the rules and dashboards for an objective.")
    parser.add_argument("--availability", type=float, default=own.availability)
    parser.add_argument("--latency-s", type=float, default=own.latency_s)
    parser.add_argument("--latency-share", type=float, default=own.latency_share)
    for name, text in files(Objective(**vars(parser.parse_args()))).items():
        (FOLDER / name).write_text(text)


if __name__ == "__main__":
    main()
