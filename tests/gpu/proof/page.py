"""The page for people: how to make it, what is asked, and one section for each GPU.

Knows Markdown and the records. Judges nothing: verdicts stand in the records.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from convoy.models.checkpoint import write_whole
from convoy.models.records import RecordError
from tests.gpu.proof.book import Book, read_books
from tests.gpu.proof.experiments_page import answers, questions
from tests.gpu.proof.markdown import table
from tests.gpu.proof.page_words import BENCHMARK, INTRODUCTION
from tests.gpu.proof.records import SCHEMA_VERSION, Environment, GpuState, Proof, Target, read_proof

PAGE = "gpu-proof.md"


def write_page(folder: Path) -> None:
    """The page in `folder` over all results in `folder`/results. Raises JobError when the disk does not take it."""
    write_whole(folder / PAGE, render(_proofs(folder / "results"), read_books(folder)).encode())


def _proofs(folder: Path) -> Iterable[Proof]:
    for path in sorted(folder.glob("*.json")):
        try:
            proof = read_proof(path)
        except RecordError:
            continue  # another program's results lie here, too
        if proof.schema_version == SCHEMA_VERSION:
            yield proof


def render(proofs: Iterable[Proof], books: Iterable[Book] = ()) -> str:
    """The whole page."""
    proofs, books = list(proofs), list(books)
    gpus = dict.fromkeys([book.gpu for book in books] + [proof.environment.gpu for proof in proofs])
    sections = []
    for gpu in gpus:
        sections.append(f"## {gpu}\n")
        sections += [answers(book) for book in books if book.gpu == gpu]
        sections += [_section(proof) for proof in proofs if proof.environment.gpu == gpu]
    return "\n".join([INTRODUCTION, questions(books), BENCHMARK, *(sections or ["No results yet.\n"])])


def _section(proof: Proof) -> str:
    blocks = [
        f"### Benchmark{f' ({proof.label})' if proof.label else ''}\n",
        _environment(proof.environment),
        _course(proof),
        _targets(proof.targets),
        _agreements(proof),
        _bare(proof),
        _core(proof),
        _http(proof),
        _gatherings(proof),
        _yardsticks(proof),
        _dropped(proof),
    ]
    return "\n".join(block for block in blocks if block)


def _environment(where: Environment) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in where.libraries.items() if version != "none")
    missing = ", ".join(name for name, version in where.libraries.items() if version == "none")
    lines = [
        f"{where.created_at}; compute capability {where.compute_capability}, {where.memory_gib} GiB, driver "
        f"{where.driver}, CUDA {where.cuda}; {where.cpu}, {where.cores} cores; Python {where.python}, {versions}.",
        f"Not there: {missing}." if missing else "",
        _clocks(where.states),
    ]
    return "\n".join(line for line in lines if line) + "\n"


def _clocks(states: Sequence[GpuState]) -> str:
    if not states:
        return ""
    throttled = sorted({reason for state in states for reason in state.throttled})
    fastest, slowest = max(state.sm_mhz for state in states), min(state.sm_mhz for state in states)
    return (
        f"Clocks between stages: {slowest} to {fastest} MHz, at most {max(state.power_w for state in states):.0f} W "
        f"and {max(state.temperature_c for state in states)} °C; slowed down by {', '.join(throttled) or 'nothing'}."
    )


def _course(proof: Proof) -> str:
    ended = proof.ended or "the program was stopped before its end"
    steps = ", ".join(f"{stage.name} {stage.seconds:.0f} s" for stage in proof.stages)
    lines = [f"The run: {ended} ({steps})."]
    if proof.tests is not None:
        run = proof.tests
        lines.append(f"Tests marked `gpu`: {run.passed} passed, {run.failed} failed, {run.skipped} skipped.")
        lines += [f"- {note}" for note in run.notes]
    return "\n".join(lines) + "\n"


def _targets(targets: Sequence[Target]) -> str:
    rows = [
        (one.name, one.engine, _wanted(one), _number(one.measured), f"**{one.verdict}**", one.how) for one in targets
    ]
    return table("Targets", ("target", "engine", "wanted", "measured", "verdict", "from"), rows)


def _wanted(one: Target) -> str:
    return f">= {one.at_least:g}" if one.at_least is not None else f"<= {one.at_most:g}"


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.1e}" if 0 < abs(value) < 1e-2 else f"{value:.3f}"


def _agreements(proof: Proof) -> str:
    rows = [
        (
            *(one.network, one.engine, one.precision, f"{one.images} {one.pictures}"),
            *(f"{one.max_relative_error:.1e}", f"{one.top1_agreement:.2%}"),
        )
        for one in proof.agreements
    ]
    head = ("network", "engine", "precision", "pictures", "largest relative error", "top-1 agreement")
    return table("Against the fp32 graph on the CPU", head, rows)


def _bare(proof: Proof) -> str:
    rows = [
        (
            *(*_setting(row.setting), f"{row.images_per_s:.0f}", f"{row.period_ms:.3f}", f"{row.copy_in_ms:.3f}"),
            *(f"{row.waited_ms:.3f}", f"{row.compute_ms:.3f}", f"{row.copy_out_ms:.3f}"),
        )
        for row in proof.bare
    ]
    head = (*_SETTING, "images/s", "ms per batch", "copy in", "waited", "compute", "copy out")
    return table("Bare engine (milliseconds, medians)", head, rows)


def _core(proof: Proof) -> str:
    rows = [
        (
            *(*_setting(row.setting), row.request_samples, f"{row.images_per_s:.0f}", f"{row.mean_batch:.1f}"),
            *(f"{row.p50_ms:.2f}", f"{row.p99_ms:.2f}"),
        )
        for row in proof.core
    ]
    head = (*_SETTING, "images per request", "images/s", "mean batch", "p50 ms", "p99 ms")
    return table("In-process core", head, rows)


def _http(proof: Proof) -> str:
    rows = [
        (
            *(row.network, row.engine, row.precision, "-" if row.edges is None else row.edges, row.request_samples),
            *(f"{row.images_per_s:.0f}", f"{row.p50_ms:.2f}", f"{row.p99_ms:.2f}", row.failed),
        )
        for row in proof.http
    ]
    head = ("network", "engine", "precision", "edges", "images per request", "images/s", "p50 ms", "p99 ms", "failed")
    return table("Over HTTP", head, rows)


def _gatherings(proof: Proof) -> str:
    tables = []
    for one in proof.gatherings:
        rows = [
            (
                *(row.requests, row.request_samples, row.request_bytes),
                *(f"{row.by_host_ms:.3f}", f"{row.by_copy_engine_ms:.3f}"),
            )
            for row in one.rows
        ]
        head = ("requests", "images in each", "bytes in each", "gathered by the host, ms", "by the copy engine, ms")
        chosen = "never" if one.threshold_bytes is None else f"from {one.threshold_bytes} bytes per request on"
        title = f"Gathering, {one.network} (copy engine {chosen}; batched copies: {one.batched_copies})"
        tables.append(table(title, head, rows))
    return "\n".join(tables)


def _yardsticks(proof: Proof) -> str:
    rows = [(row.network, row.precision, row.batch_size, f"{row.images_per_s:.0f}") for row in proof.yardsticks]
    head = ("network", "precision", "batch", "images/s")
    return table("torch by itself, eager, without copies", head, rows)


def _dropped(proof: Proof) -> str:
    return table("Not measured", ("what", "why"), [(one.what, one.reason) for one in proof.dropped])


_SETTING = ("network", "engine", "precision", "batch", "graphs", "slots")


def _setting(one: object) -> tuple[object, ...]:
    names = ("network", "engine", "precision", "batch_size", "graphs", "slots")
    values = (getattr(one, name) for name in names)
    return tuple({True: "on", False: "off"}[value] if isinstance(value, bool) else value for value in values)
