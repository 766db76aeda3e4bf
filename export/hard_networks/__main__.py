"""`python -m convoy.export.hard_networks`: adds what is missing to docs/hard-networks.md, one network after the other.

A row is written as soon as its network is done; a training that was interrupted goes on after its last epoch.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from convoy.export.cache import StepCache, default_root
from convoy.export.hard_networks.page import write_page
from convoy.export.hard_networks.rows import HardRow, read_table, write_table
from convoy.export.hard_networks.trial import NETWORKS, HardNetwork, TrialPlace, try_network
from convoy.models.errors import ConvoyError, UsageError
from convoy.models.train import Report, TrainProgress

_DATA, _PAGE = Path("results/hard-networks.json"), Path("hard-networks.md")


def main(arguments: list[str] | None = None) -> int:
    """Do what is left, or the networks that are named again. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m convoy.export.hard_networks", description=__doc__)
    parser.add_argument("--docs", type=Path, default=Path("docs"), help="folder of the page and the results (docs)")
    parser.add_argument("--work", type=Path, default=Path("build/hard-networks"), help="folder of weights and bundles")
    parser.add_argument("--networks", help="measure these again, names with commas between; weights are kept")
    asked = parser.parse_args(arguments)
    try:
        place = TrialPlace(asked.work, cache=StepCache(default_root()))
        for row in make_rows(asked.docs, place, asked.networks.split(",") if asked.networks else ()):
            print(f"{row.network}: {'; '.join(row.misses()) or 'reaches the goal'}", flush=True)
    except ConvoyError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; the same command goes on", file=sys.stderr)
        return 130
    return 0


def make_rows(docs: Path, place: TrialPlace, again: Sequence[str] = ()) -> Iterator[HardRow]:
    """Try what has no row yet, or the networks of `again`, and write table and page after each. Raises UsageError for
    an unknown network."""
    names = [network.name for network in NETWORKS]
    if unknown := [name for name in again if name not in names]:
        raise UsageError(f"there is no hard network {unknown[0]!r}; choose from {', '.join(names)}")
    table = read_table(docs / _DATA)
    write_page(table, names, docs / _PAGE)
    for network in NETWORKS:
        if network.name in again or (not again and table.find(network.name) is None):
            row = try_network(network, place, _said(network))
            table = table.with_row(row)
            write_table(table, docs / _DATA)
            write_page(table, names, docs / _PAGE)
            yield row


def _said(network: HardNetwork) -> Report:
    def report(progress: TrainProgress) -> None:
        if progress.last is not None:
            print(f"{network.name}: epoch {progress.done} of {progress.total}, {progress.last.loss:.3f}", flush=True)

    return report


if __name__ == "__main__":
    sys.exit(main())
