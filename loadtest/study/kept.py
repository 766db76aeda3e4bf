"""What a study that was stopped has found already, so that the next one goes on from there."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from convoy.loadtest.simulation.workload import Scenario

Figures = dict[str, dict[str, list[float]]]
_HERE = Path(__file__).parent
# Whatever decides, and whatever it is compared with: figures of other code are not this study's.
_CODE = (_HERE.parents[1] / "app" / "scheduling", _HERE.parent / "simulation", _HERE)


class Kept:
    """A folder with one file for each scenario. What another version of the code found is left alone and not used."""

    def __init__(self, folder: Path, seeds: int) -> None:
        self._folder = folder
        digest = hashlib.sha256(str(seeds).encode())
        for path in sorted(path for code in _CODE for path in code.glob("*.py")):
            digest.update(path.read_bytes())
        self._code = digest.hexdigest()

    def figures(self, scenario: Scenario) -> Figures | None:
        """What was found of a scenario; None where nothing was, or the file was cut off."""
        try:
            found: Figures = json.loads(self._place(scenario).read_text())
        except (FileNotFoundError, json.JSONDecodeError):
            return None
        return found

    def keep(self, scenario: Scenario, figures: Figures) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._place(scenario).write_text(json.dumps(figures))

    def _place(self, scenario: Scenario) -> Path:
        return self._folder / f"{hashlib.sha256(f'{self._code} {scenario}'.encode()).hexdigest()[:32]}.json"
