"""The oracle's own judgement: what it leaves out, what it finds, and what it accepts."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from tests.oracle.judge import INTENDED, Intended, intended_since, judge, read_intended
from tests.oracle.normal import Answers, Part
from tests.support.stores import ROOT

HEAD = "HTTP/1.1 200 OK\r\ncontent-length: {length}\r\nx-request-id: {id}\r\n"
PREDICT = "images/POST /predictions/digits seven"


def answers(name: str, *parts: Part) -> Answers:
    return {name: parts}


def predicted(own_id: str, total: str, score: str = "0.99") -> Answers:
    body = f'{{"predictions":[{{"class_id":7,"score":{score}}}],"timing_ms":{{"decode":0.1,"total":{total}}}}}'.encode()
    return answers(PREDICT, Part(HEAD.format(length=len(body), id=own_id), body))


def verdict(before: Answers, after: Answers, *intended: Intended):
    return judge([before], [after], intended)


def test_ids_and_times_do_not_count_and_nor_does_how_long_they_are() -> None:
    assert verdict(predicted("3eeb31c8-7", "5.51"), predicted("00000000-12345", "12.375")).equal == 1


def test_an_id_of_the_clients_own_counts() -> None:
    assert verdict(predicted("mine", "5.51"), predicted("yours", "5.51")).differences


@pytest.mark.parametrize("after", [predicted("3eeb31c8-7", "5.51", "0.98"), answers("images/other", Part("x")), {}])
def test_anything_else_is_a_difference_and_shown(after: Answers) -> None:
    found = verdict(predicted("3eeb31c8-7", "5.51"), after)
    assert not found.is_good
    assert '-   "score": 0.99' in found.differences[PREDICT]


def test_a_header_more_is_a_difference() -> None:
    name, body = "routes/GET /v2", b"{}"
    before, after = Part("HTTP/1.1 200 OK\r\na: b\r\n", body), Part("HTTP/1.1 200 OK\r\na: b\r\nc: d\r\n", body)
    assert "+c: d" in verdict(answers(name, before), answers(name, after)).differences[name]


def test_bytes_that_show_alike_differ_all_the_same() -> None:
    before, after = (answers("x/y", Part("z", data)) for data in (b'{"a":1}', b'{"a": 1}'))
    assert not verdict(before, after).is_good


def test_compressed_times_are_times() -> None:
    def squeezed(total: str) -> Answers:
        body = gzip.compress(f'{{"timing_ms":{{"total":{total}}}}}'.encode())
        head = f"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: {len(body)}\r\n"
        return answers(PREDICT, Part(head, body))

    assert verdict(squeezed("1.25"), squeezed("123456.75")).equal == 1


def test_what_one_build_answers_in_two_ways_is_unsteady_and_no_difference() -> None:
    one, other = predicted("mine", "1", "0.5"), predicted("mine", "1", "0.6")
    found = judge([one, other], [other, other], [])
    assert (found.unsteady, found.differences) == ([PREDICT], {})
    assert judge([one, one], [other, other], []).differences


def test_an_intended_difference_settles_just_its_lines() -> None:
    before, after = predicted("mine", "1", "0.5"), predicted("mine", "1", "0.6")
    exact = Intended("images/*", (r'\s+"score": 0\.5',), (r'\s+"score": 0\.6',), "better")
    found = verdict(before, after, exact)
    assert (found.intended, found.is_good) == ([PREDICT], True)
    (part,) = after[PREDICT]
    more = answers(PREDICT, Part(part.head + "new: header\r\n", part.body))
    assert not verdict(before, more, Intended("images/*", exact.before, exact.after, "better")).is_good


def test_an_intended_difference_that_is_none_any_more_is_an_error() -> None:
    same = predicted("mine", "1")
    found = verdict(same, same, Intended("images/*", ("gone",), (), "once"))
    assert found.equal == 1
    assert not found.is_good


def test_an_entry_needs_a_reason_and_a_line(tmp_path: Path) -> None:
    path = tmp_path / "intended.toml"
    for text in ('asks = "*"\nbefore = ["a"]', 'asks = "*"\nreason = "b"'):
        path.write_text(f"[[difference]]\n{text}\n")
        with pytest.raises(ValueError, match="needs a reason"):
            read_intended(path)
    path.write_text('[[difference]]\nasks = "*"\nafter = ["a"]\nreason = "b"\n')
    assert read_intended(path)[0].after == ("a",)
    read_intended(ROOT / INTENDED)  # the one that is in force can be read


def test_what_the_build_before_has_made_already_is_not_intended_again(tmp_path: Path) -> None:
    builds = tmp_path / "before", tmp_path / "after"
    for build, asks in zip(builds, (["a"], ["a", "b"]), strict=True):
        path = build / INTENDED
        path.parent.mkdir(parents=True)
        path.write_text("".join(f'[[difference]]\nasks = "{one}"\nwhole = true\nreason = "c"\n' for one in asks))
    assert [one.asks for one in intended_since(*builds)] == ["b"]
    assert intended_since(ROOT, ROOT) == []
    assert len(intended_since(tmp_path / "older than the list", builds[1])) == 2
