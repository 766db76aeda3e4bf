from __future__ import annotations

import base64
import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from convoy.app.http.uploads import is_json, split_images
from convoy.models.errors import InvalidRequest


def plain(data: bytes) -> str:
    return base64.b64encode(data).decode()


# Others' encoders, and what they write into JSON.
TEXTS = {
    "plain": plain,
    "unpadded": lambda data: plain(data).rstrip("="),
    "url-safe": lambda data: base64.urlsafe_b64encode(data).decode(),
    "with line breaks": lambda data: base64.encodebytes(data).decode(),
    "a data URL": lambda data: f"data:image/png;base64,{plain(data)}",
}
MEMBERS: dict[str, Any] = {
    "image": lambda text: {"image": text},
    "data": lambda text: {"data": text},
    "b64": lambda text: {"b64": text},
    "named b64": lambda text: {"image_bytes": {"b64": text}},
}
WRITERS = {
    "json": json.dumps,
    "indented": lambda document: json.dumps(document, indent=2),
    "PHP's": lambda document: json.dumps(document).replace("/", r"\/"),
    ".NET's": lambda document: json.dumps(document).replace("+", r"\u002B"),
}


def split(text: str) -> tuple[list[bytes | str], bool]:
    found = split_images(memoryview(bytearray(text.encode())))
    if isinstance(found, memoryview):
        return [bytes(found)], False
    return [one if isinstance(one, str) else bytes(one) for one in found], True


@given(
    st.lists(st.binary(max_size=200), min_size=1, max_size=5),
    st.sampled_from(sorted(TEXTS)),
    st.sampled_from(sorted(MEMBERS)),
    st.sampled_from(sorted(WRITERS)),
)
def test_images_come_out_as_they_went_in_whoever_wrote_them(
    images: list[bytes], text: str, member: str, writer: str
) -> None:
    instances = [MEMBERS[member](TEXTS[text](image)) for image in images]
    document = {"signature_name": "serving_default", "instances": instances}
    assert split(WRITERS[writer](document)) == (images, True)
    assert split(WRITERS[writer](instances[0])) == (images[:1], False)


def test_an_instance_may_be_the_string_itself() -> None:
    assert split(json.dumps({"instances": [plain(b"one"), plain(b"two")]})) == ([b"one", b"two"], True)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("{", "failed to parse"),
        ("[]", "must be an object"),
        ("{}", "not one image in base64"),
        ('{"image": 1}', "not one image in base64"),
        ('{"image": "AAAA", "top_k": 3}', "options in the query"),
        ('{"image": {"b64": {"b64": "AAAA"}}}', "not one image in base64"),
        ('{"instances": []}', "a list of images"),
        ('{"instances": {"b64": "AAAA"}}', "a list of images"),
        ('{"instances": ["AAAA"], "parameters": {}}', "'parameters' beside 'instances'"),
        ('{"image": "ä"}', "characters that base64 has not"),
        (r'{"image": "\ud83d\ude00"}', "characters that base64 has not"),
        (json.dumps({"instances": ["AAAA"] * 257}), "more than 256 images"),
        ('{"a":' * 2000 + "1" + "}" * 2000, "more than 256 images"),
    ],
)
def test_what_is_no_images_is_refused_with_an_example(body: str, words: str) -> None:
    try:
        (told,), _ = split(body)
    except InvalidRequest as error:
        told = str(error)
    assert words in str(told)


def test_one_that_is_no_base64_leaves_the_others_alone() -> None:
    found, _ = split(json.dumps({"instances": [plain(b"one"), "???", {"b64": "AAAA=AAA"}, plain(b"four")]}))
    assert found[::3] == [b"one", b"four"]
    assert "instances[1] is not base64" in str(found[1])
    assert "instances[2] is not base64" in str(found[2])


@given(st.text(max_size=80) | st.recursive(st.text(max_size=9), lambda inner: st.dictionaries(st.text(), inner)))
@example('{"image": "data:,x"}')
def test_any_body_is_images_or_a_refusal(given: Any) -> None:
    with suppress(InvalidRequest):
        split(given if isinstance(given, str) else json.dumps({"instances": [given]}, ensure_ascii=False))


def test_json_is_told_by_its_type_or_its_beginning() -> None:
    assert is_json(memoryview(b' \n{"image": ""}'), b"application/x-www-form-urlencoded")
    assert is_json(memoryview(b"[1]"), b"Application/JSON; charset=utf-8")
    assert not is_json(memoryview(b"words"), b"text/plain")
