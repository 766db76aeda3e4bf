"""`python -m tests.oracle`: play the corpus into two builds, and say what differs."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

from tests.oracle.corpus import SETUPS, Setup, fill_stores
from tests.oracle.judge import Verdict, differing, intended_since, judge
from tests.oracle.normal import Answers, Part
from tests.oracle.session import SHARED_MEMORY, Build, Session, build_of
from tests.support.stores import ROOT


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.oracle", description=__doc__)
    parser.add_argument("--before", required=True, help="a folder with the project's files, or a revision")
    parser.add_argument("--after", default=str(ROOT), help="the same; by default this very tree")
    parser.add_argument("--setups", help="only these, such as routes,images")
    parser.add_argument("--show", type=int, default=20, help="how many differences are shown whole")
    given = parser.parse_args()
    try:
        setups = _chosen(given.setups)
        with tempfile.TemporaryDirectory(prefix="convoy-oracle-corpus-") as folder, ExitStack() as builds:
            fill_stores(Path(folder))
            before, after = (
                builds.enter_context(build_of(place, Path(folder))) for place in (given.before, given.after)
            )
            return _compare(before, after, setups, given)
    except (ValueError, OSError, AssertionError) as error:
        print(f"oracle: {error}", file=sys.stderr)
        return 2


def _chosen(only: str | None) -> Sequence[Setup]:
    names = only.split(",") if only else [setup.name for setup in SETUPS]
    if unknown := set(names) - {setup.name for setup in SETUPS}:
        raise ValueError(f"no setup is called {', '.join(sorted(unknown))}; there are {[one.name for one in SETUPS]}")
    return [setup for setup in SETUPS if setup.name in names]


def _compare(before: Build, after: Build, setups: Sequence[Setup], given: argparse.Namespace) -> int:
    plays = {build: [_play(build, setups)] for build in (before, after)}
    again = {name.partition("/")[0] for name in differing(plays[before][0], plays[after][0])}
    if again:
        # What differs by chance must not be taken for a change, nor hidden.
        print(f"once more: {', '.join(sorted(again))}", flush=True)
        for build in (before, after):
            plays[build].append(_play(build, [setup for setup in setups if setup.name in again]))
    intended = intended_since(before.tree, after.tree) if given.setups is None else []
    verdict = judge(plays[before], plays[after], intended)
    _report(verdict, given.show)
    return 0 if verdict.is_good else 1


def _play(build: Build, setups: Sequence[Setup]) -> Answers:
    """Every answer, two servers at a time: much of the time is waiting for a start, or for a silence."""

    def one(setup: Setup) -> Answers:
        started_s = time.monotonic()
        answers = _play_one(build, setup)
        print(f"{build.tree} {setup.name}: {len(answers)} in {time.monotonic() - started_s:.1f} s", flush=True)
        return {f"{setup.name}/{name}": answer for name, answer in answers.items()}

    with ThreadPoolExecutor(2) as pool:
        return {name: answer for answers in pool.map(one, setups) for name, answer in answers.items()}


def _play_one(build: Build, setup: Setup) -> Answers:
    store = ("--store", setup.store) if setup.store else ()
    with ExitStack() as left:
        for name, contents in setup.regions.items():
            (SHARED_MEMORY / name).write_bytes(contents)
            left.callback((SHARED_MEMORY / name).unlink, missing_ok=True)
        server = left.enter_context(build.serve(setup.name, *store, *setup.options))
        session = Session(build, server)
        with suppress(ConnectionRefusedError):  # the exit code tells of a server that is gone
            for ask in setup.asks():
                ask(session)
        session.close()
        server.signal()
        session.record("the end", Part(f"exit code {server.wait()}"))
        return session.answers


def _report(verdict: Verdict, show: int) -> None:
    for number, (name, diff) in enumerate(verdict.differences.items()):
        print(f"\n=== {name}\n{diff}" if number < show else f"=== {name}")
    print(
        f"\n{verdict.requests} requests, {verdict.equal} answered alike, {len(verdict.intended)} differ as intended, "
        f"{len(verdict.unsteady)} are unsteady, {len(verdict.differences)} differ"
    )
    for name in verdict.unsteady:
        print(f"unsteady, one build alone answers it in several ways: {name}")
    for one in verdict.stale:
        print(f"stale, take it out of intended.toml: {one.asks} ({one.reason})")


if __name__ == "__main__":
    raise SystemExit(main())
