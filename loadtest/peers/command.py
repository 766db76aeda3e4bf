"""`python -m convoy.loadtest.peers`: reads the options, runs the comparison, writes what came of it.

Exit codes: 0 - every peer asked for was measured. 1 - one of them was not, or Convoy itself failed. 130 - stopped by
Ctrl-C. In each case what was measured has been written.
"""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from convoy.loadtest.peers import conditions
from convoy.loadtest.peers.campaign import UNTOUCHED, Campaign, Effort, Entrant
from convoy.loadtest.peers.contender import CONVOY, WITHOUT_IDS, convoy_contender, peer_contender, without_ids
from convoy.loadtest.peers.definition import Peer, find_peers
from convoy.loadtest.peers.environment import ensure_environment
from convoy.loadtest.peers.exam import set_exam
from convoy.loadtest.peers.generator import Choice, OwnGenerator, choose_generator
from convoy.loadtest.peers.network import ServedNetwork, ensure_networks
from convoy.loadtest.peers.page import tables, write_page
from convoy.loadtest.peers.results import ClosedLoad, Conditions, Failure, Results, write_json
from convoy.loadtest.peers.stand import Stand
from convoy.models.errors import JobError, UsageError

EXIT_GOOD, EXIT_FAILED, EXIT_INTERRUPTED = 0, 1, 130

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Options:
    """One comparison. `model` None: the classic CIFAR CNN; `page` None: no page is written; `block` is its place there.

    `convoy_options` are words for `convoy serve`; none is the untouched configuration.
    """

    peers: tuple[str, ...]
    loads: tuple[ClosedLoad, ...]
    peers_from: Path | None
    home: Path
    model: Path | None
    threads: int
    generator: Choice
    convoy_options: str
    effort: Effort
    warm_up_s: float
    json_file: Path
    page: Path | None
    block: str


def run(options: Options, console: Console) -> int:
    """Gives the exit code. Raises UsageError and JobError for what stops everything before it begins."""
    peers = find_peers(options.peers, options.peers_from)
    generator = choose_generator(options.generator)

    def tell(line: str) -> None:
        console.print(line, markup=False, highlight=False, soft_wrap=True)

    installed, absent = _install(peers, options.home, tell)
    loads = options.loads
    if isinstance(generator, OwnGenerator):
        # It sends requests that were made beforehand.
        loads = tuple(load for load in loads if not load.body.startswith("ids"))
        tell("ids of their own are in wrk's requests alone")
    entrants = [
        Entrant(peer_contender(peer, python, options.threads), peer.settings, loads) for peer, python in installed
    ]
    convoy = convoy_contender(options.threads, tuple(shlex.split(options.convoy_options)))
    alone = Entrant(without_ids(convoy), (UNTOUCHED,), loads)
    if alone.loads:
        entrants.append(alone)
    if entrants and not any(entrant.loads for entrant in entrants):
        raise UsageError("none of these peers has a body for any of these loads; name others with --peers or --loads")
    with tempfile.TemporaryDirectory(prefix="convoy-peers-") as temporary:
        bodies = {load.body for entrant in entrants for load in entrant.loads}
        networks = ensure_networks(bodies, options.home, options.model, Path(temporary))
        asked = _conditions(options, peers, networks.values(), generator.title)
        exams = {body: set_exam(network, body, options.effort.seed) for body, network in networks.items()}
        stand = Stand(networks, exams, generator, options.warm_up_s)
        campaign = Campaign(stand, convoy, entrants, options.effort, tell)
        interrupted = _run_to_the_end(campaign, tell)
    results = campaign.results(asked, absent, interrupted=interrupted)
    _write(results, options, tell)
    if interrupted:
        return EXIT_INTERRUPTED
    return EXIT_GOOD if _is_complete(results, entrants) and not absent else EXIT_FAILED


def _run_to_the_end(campaign: Campaign, tell: Tell) -> bool:
    """Whether Ctrl-C came first; the server that was up has been stopped by then."""
    try:
        campaign.sweep()
        campaign.fight()
    except KeyboardInterrupt:
        tell("stopped; writing what was measured so far")
        return True
    return False


def _install(peers: Sequence[Peer], home: Path, tell: Tell) -> tuple[list[tuple[Peer, Path]], list[Failure]]:
    """The peers that have an environment, with its interpreter, and why the others have none."""
    installed: list[tuple[Peer, Path]] = []
    absent: list[Failure] = []
    for peer in peers:
        tell(f"{peer.title}: environment")
        try:
            installed.append((peer, ensure_environment(peer, home)))
        except JobError as error:
            absent.append(Failure(peer.name, "environment", str(error)))
            tell(str(error))
    return installed, absent


def _conditions(
    options: Options, peers: Sequence[Peer], networks: Iterable[ServedNetwork], generator: str
) -> Conditions:
    effort = options.effort
    started = f"started with {options.convoy_options}" if options.convoy_options else "as `convoy serve` has it"
    return Conditions(
        started_at=conditions.now(),
        machine=conditions.machine(),
        generator=f"{generator}; for gRPC {OwnGenerator.title}",
        threads=options.threads,
        networks={network.name: network.sha256 for network in networks},
        duration_s=effort.duration_s,
        warm_up_s=options.warm_up_s,
        rounds=effort.rounds,
        rounds_per_start=effort.rounds_per_start,
        seed=effort.seed,
        versions={CONVOY: conditions.convoy_versions()} | {peer.name: peer.versions() for peer in peers},
        titles={CONVOY: "Convoy", WITHOUT_IDS: "Convoy, no ids"} | {peer.name: peer.title for peer in peers},
        notes={CONVOY: started} | {peer.name: peer.note for peer in peers},
    )


def _is_complete(results: Results, entrants: Sequence[Entrant]) -> bool:
    """Whether every peer has a pair for every load that it takes."""
    measured = {(pair.peer, pair.load) for pair in results.pairs}
    return all((entrant.name, load) in measured for entrant in entrants for load in entrant.loads)


def _write(results: Results, options: Options, tell: Tell) -> None:
    write_json(options.json_file, results)
    tell(f"written to {options.json_file}")
    if options.page is not None:
        write_page(options.page, options.block, results)
        tell(f"written to {options.page}")
    tell("\n" + tables(results))
