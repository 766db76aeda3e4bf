"""From bare rates to the bound, and from rounds to the table. Pure.

Decoding and computing share the cores, so an image costs the sum of what each costs when it has all of them:
the bound is 1 / (1 / engine + 1 / decoder). Overlapping them moves work about and makes none of it less.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from convoy.loadtest.peers.compare import Spread, ratio
from convoy.loadtest.peers.results import Reading


@dataclass(frozen=True, slots=True)
class Round:
    """One network once: bare, and over HTTP right after or before. `decoder_rps` None: requests carry tensors."""

    network: str
    body: str
    batch_size: int
    engine_rps: float
    decoder_rps: float | None
    reading: Reading

    @property
    def bound_rps(self) -> float:
        if self.decoder_rps is None:
            return self.engine_rps
        return 1 / (1 / self.engine_rps + 1 / self.decoder_rps)

    @property
    def share(self) -> float:
        """How much of the bound is left over HTTP, the load generator's own CPU being on the server's account."""
        return ratio(self.reading.rps, self.bound_rps)


def bound_table(rounds: Sequence[Round]) -> str:
    """Markdown, a row per network, in the order in which they first appear."""
    names = list(dict.fromkeys(one.network for one in rounds))
    head = (
        "| network | requests | engine alone, images/s | decoder alone, images/s | bound, images/s "
        "| over HTTP, images/s | share of the bound | server CPU, us a request | generator CPU, us a request |\n"
        "|---|---|---|---|---|---|---|---|---|"
    )
    return "\n".join([head, *(_row([one for one in rounds if one.network == name]) for name in names)])


def _row(rounds: Sequence[Round]) -> str:
    first = rounds[0]
    decoder = [one.decoder_rps for one in rounds if one.decoder_rps is not None]
    share = Spread.of([one.share for one in rounds])
    failed = sum(one.reading.failed for one in rounds)
    cells = [
        first.network,
        first.body,
        f"{Spread.of([one.engine_rps for one in rounds]).median:,.1f} (batch {first.batch_size})",
        f"{Spread.of(decoder).median:,.1f}" if decoder else "-",
        f"{Spread.of([one.bound_rps for one in rounds]).median:,.1f}",
        f"{Spread.of([one.reading.rps for one in rounds]).median:,.1f}" + (f" ({failed} failed)" if failed else ""),
        f"**{share.median:.2f}** ({share.low:.2f} to {share.high:.2f})",
        f"{Spread.of([one.reading.server_cpu_us for one in rounds]).median:,.0f}",
        f"{Spread.of([one.reading.generator_cpu_us for one in rounds]).median:,.0f}",
    ]
    return f"| {' | '.join(cells)} |"
