"""`python -m tests.oracle`: make a corpus, or play one into two builds and say what differs."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.oracle import coverage
from tests.oracle.build import Build, BuildFailure, build_of
from tests.oracle.judge import Verdict, differing, intended_since, judge
from tests.oracle.normal import RULES, Normaliser
from tests.oracle.player import play
from tests.oracle.records import Answers, Setup, load_corpus

ROOT = Path(__file__).resolve().parents[2]


def main(arguments: Sequence[str] | None = None) -> int:
    given = _parser().parse_args(arguments)
    try:
        if given.task == "record":
            _record(Path(given.folder), given.seed)
            return 0
        with tempfile.TemporaryDirectory(prefix="convoy-oracle-corpus-") as fresh:
            folder = Path(given.corpus).resolve() if given.corpus else Path(fresh)
            if not given.corpus:
                _record(folder, given.seed)
            with build_of(given.before, ROOT) as before, build_of(given.after, ROOT) as after:
                return _compare(before, after, folder, given.setups, given.show)
    except (BuildFailure, ValueError, OSError) as error:
        print(f"oracle: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.oracle", description=__doc__)
    tasks = parser.add_subparsers(dest="task", required=True)
    record = tasks.add_parser("record", help="write the corpus and what it needs")
    record.add_argument("folder")
    compare = tasks.add_parser("compare", help="play it into two builds; exit 1 if they differ, 2 if one cannot be")
    compare.add_argument("--before", required=True, help="a folder with the project's files, or a revision")
    compare.add_argument("--after", default=str(ROOT), help="the same; by default this very tree")
    compare.add_argument("--corpus", help="a folder that `record` has filled; by default one is made")
    compare.add_argument("--setups", help="only these, such as routes,images")
    compare.add_argument("--show", type=int, default=20, help="so many differences are shown whole")
    for task in (record, compare):
        task.add_argument("--seed", type=int, default=1, help="of the requests that are spoiled at random")
    return parser


def _record(folder: Path, seed: int) -> None:
    # Only here is anything of the suite imported: a corpus that has been made outlives the code that made it.
    from tests.oracle.corpus import record

    print(f"recording into {folder}", flush=True)
    record(folder, seed)


def _compare(before: Build, after: Build, folder: Path, only: str | None, show: int) -> int:
    setups = _chosen(load_corpus(folder), only)
    started_s = time.monotonic()
    plays = {
        build: [play(build, setups, folder, lambda line, word=word: print(f"  {word} {line}", flush=True))]
        for word, build in (("before", before), ("after", after))
    }
    normaliser = Normaliser()
    again = {name.partition("/")[0] for name in differing(plays[before][0], plays[after][0], normaliser)}
    repeated = tuple(setup for setup in setups if setup.name in again)
    if repeated:
        # What differs by chance must not be taken for a change, nor hidden.
        print(f"  once more: {', '.join(sorted(again))}", flush=True)
        for build in (before, after):
            plays[build].append(play(build, repeated, folder))
    verdict = judge(
        plays[before], plays[after], intended_since(before.tree, after.tree) if only is None else [], normaliser
    )
    _report(verdict, show)
    coverage.report(after, setups, plays[after][0])
    idle = [rule.why for rule in RULES if not normaliser.used[rule]]
    if idle and only is None:
        print(f"rows of the normaliser that replaced nothing: {'; '.join(idle)}")
    print(f"took {time.monotonic() - started_s:.0f} s")
    return 0 if verdict.is_good else 1


def _chosen(setups: tuple[Setup, ...], only: str | None) -> tuple[Setup, ...]:
    if only is None:
        return setups
    names = only.split(",")
    if unknown := set(names) - {setup.name for setup in setups}:
        raise ValueError(f"no setup is called {', '.join(sorted(unknown))}; there are {[one.name for one in setups]}")
    return tuple(setup for setup in setups if setup.name in names)


def _report(verdict: Verdict, show: int) -> None:
    for difference in verdict.differences[:show]:
        print(f"\n=== {difference.name}\n{difference.diff}")
    for difference in verdict.differences[show:]:
        print(f"=== {difference.name}")
    print(
        f"\n{verdict.requests} requests, {verdict.equal} answered alike, {len(verdict.intended)} differ as intended, "
        f"{len(verdict.unsteady)} are unsteady, {len(verdict.differences)} differ"
    )
    for name in verdict.unsteady:
        print(f"unsteady, one build alone answers it in several ways: {name}")
    for one in verdict.stale:
        print(f"stale, take it out of intended.toml: {one.asks} ({one.reason})")


def play_of(build: Build, folder: Path, only: str | None = None) -> Answers:
    """One play, for tests."""
    return play(build, _chosen(load_corpus(folder), only), folder)


if __name__ == "__main__":
    raise SystemExit(main())
