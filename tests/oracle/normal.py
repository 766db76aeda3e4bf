"""What differs between any two runs of one build, and why: each row is replaced by a word before answers are compared.

Nothing else may be left out. A row names as little as it can: where it stands, and in answers to what.
"""

from __future__ import annotations

import gzip
import re
import zlib
from typing import NamedTuple


class Part(NamedTuple):
    """One answer: what comes before the body, line by line, and the body."""

    head: str
    body: bytes = b""


Answer = tuple[Part, ...]
# By server and request: "routes/GET /v2".
Answers = dict[str, Answer]


class Rule(NamedTuple):
    """`pattern` in the head or the body of the answers to asks whose names have `asks` in them; \\1 is kept."""

    where: str
    asks: str
    pattern: str
    word: str
    why: str


_OWN_ID = r"[0-9a-f]{8}-\d+\b"
_SUM = r"(?m)^(nv_\w+_(?:duration_us|duration_secs)\{.*\}) "
RULES = (
    Rule("head", "", rf"(?i)(x-request-id: '?){_OWN_ID}", r"\1<id>", "a process's own name, and a number"),
    Rule("head", "", rf"(the log has it under request ){_OWN_ID}", r"\1<id>", "the same, where gRPC names it"),
    Rule("body", "", rf"(the log has it under request ){_OWN_ID}", r"\1<id>", "the same, where an error names it"),
    Rule("head", "", r"(\w+;dur=)[0-9.]+", r"\1<ms>", "Server-Timing: how long each stage took"),
    Rule(
        "body",
        "/predictions/",
        r'("(?:decode_wait|decode|queue|compute|total)":)[0-9.e-]+(?=[,}])',
        r"\1<ms>",
        "timing_ms: the same, in the document",
    ),
    Rule(
        "body",
        " /stats",
        r'("(?:uptime_s|\w+_per_s|p\d+_ms|utilisation|(?:process_)?(?:cpu|memory)_\w+)":)[0-9.e+-]+',
        r"\1<time>",
        "how long, how fast",
    ),
    Rule(
        "body",
        " /stats",
        r'("(?:decode_wait|decode|queue|copy_in|compute|copy_out|encode|total)":)[0-9.e-]+(?=[,}])',
        r"\1<ms>",
        "mean_ms: what there is of each stage",
    ),
    Rule("body", " /stats", r'("\w+_per_s":)\{[^}]*\}', r"\1<rates>", "rates by name: a minute later none is there"),
    Rule("body", "stats", r'("ns":)[1-9]\d*', r"\1<ns>", "statistics: sums of durations; zero stays zero"),
    Rule("body", "stats", r'("last_inference":)[1-9]\d*', r"\1<time>", "statistics: a time of day; so does that"),
    Rule("body", "ModelStatistics", r"(\bns: )[1-9]\d*", r"\1<ns>", "the same over gRPC"),
    Rule("body", "ModelStatistics", r"(\blast_inference: )[1-9]\d*", r"\1<time>", "the same over gRPC"),
    Rule("body", " /metrics", r"(?m)^(\w+_created(?:\{.*\})?) \S+$", r"\1 <time>", "when a series began"),
    Rule(
        "body",
        " /metrics",
        r'(?m)^(\w+_seconds_(?:sum|bucket)\{(?!le="\+Inf").*\}) \S+$',
        r"\1 <time>",
        "durations and where they fell; how many there were stays",
    ),
    Rule(
        "body",
        " /metrics",
        r"(?m)^((?:\w*process_\w+|convoy_utilization_ratio|convoy_device_compute_seconds_total)(?:\{.*\})?) \S+$",
        r"\1 <figure>",
        "what processes need, and how busy they are",
    ),
    Rule(
        "body",
        " /metrics",
        r'(?m)^(convoy_canary_runs_total\{.*result="passed".*\}) \S+$',
        r"\1 <count>",
        "canaries run when nobody asks",
    ),
    Rule("body", " /metrics", _SUM + r"[1-9]\S*$", r"\1 <time>", "sums of durations; zero stays zero"),
    Rule("body", " /metrics", _SUM + r"0\.\d*[1-9]\d*$", r"\1 <time>", "the same, below one"),
    Rule("body", "command", r"(?m)^\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d\S*( )", r"<time>\1", "the log's time of day"),
)
_LENGTH = re.compile(r"(?im)^(content-length: )\d+")


def normalised(name: str, answer: Answer) -> Answer:
    """The answer with every row of the table applied."""
    return tuple(_part(name, part) for part in answer)


def _part(name: str, part: Part) -> Part:
    head = _replaced("head", name, part.head)
    plain = plain_body(part)
    body = _replaced("body", name, plain.decode("latin-1")).encode("latin-1")
    if body == plain:
        return Part(head, part.body)
    # As long as the numbers in it; the client has read just so many bytes.
    return Part(_LENGTH.sub(r"\1<its own>", head), body)


def _replaced(where: str, name: str, text: str) -> str:
    for rule in RULES:
        if rule.where == where and rule.asks in name:
            text = re.sub(rule.pattern, rule.word, text)
    return text


def plain_body(part: Part) -> bytes:
    """The body before it was compressed."""
    head = part.head.lower()
    if "content-encoding: gzip" in head:
        return gzip.decompress(part.body)
    return zlib.decompress(part.body) if "content-encoding: deflate" in head else part.body
