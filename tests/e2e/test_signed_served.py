"""A server with `--require-signature`: others are served, the index says why one is not, and a reload asks again."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.servers import start_server, wait_until
from tests.support.signing_keys import KeyPair, sign
from tests.support.stores import StoreFolder

pytestmark = pytest.mark.slow


@pytest.fixture
def own(tmp_path: Path, store: StoreFolder) -> KeyPair:
    """The keys of who has signed the first version in the store."""
    pair = KeyPair(tmp_path, "own")
    sign(store.add_digits(1), pair)
    return pair


def requires(own: KeyPair, cache: Path) -> tuple[str, ...]:
    return ("--require-signature", str(own.public), "--store-cache", str(cache))


def test_what_is_not_signed_is_refused_and_what_is_goes_on(own: KeyPair, store: StoreFolder, tmp_path: Path) -> None:
    store.add_add_sub()
    cache = tmp_path / "cache"
    watched = ("--model-control", "poll", "--poll-interval-s", "0.1", "--max-inflight-mb", "256")
    with start_server(*requires(own, cache), *watched, store=store.root) as server:
        assert server.seven() == ("1", "7")
        state, reason = server.index()["simple/1"]
        assert (state, f"{store.root}/simple/1: not signed" in reason) == ("UNAVAILABLE", True)

        aside = StoreFolder(tmp_path / "aside")
        changed = aside.add_digits(2)
        sign(changed, own)
        with (changed / "labels.txt").open("a") as file:
            file.write("ten\n")
        changed.rename(store.root / "digits" / "2")
        wait_until(lambda: server.index().get("digits/2", ("",))[0] == "UNAVAILABLE", "it is refused")
        assert "the signature is not valid" in server.index()["digits/2"][1]
        assert server.seven() == ("1", "7")

        better = aside.add_digits(3)
        sign(better, own)
        better.rename(store.root / "digits" / "3")
        wait_until(lambda: server.seven() == ("3", "7"), "the next one serves")
        sign(store.root / "simple" / "1", own)
        wait_until(lambda: server.index()["simple/1"][0] == "READY", "what has been signed since is loaded")
        wait_until(lambda: not list(cache.glob("signed/*/digits-*/1")), "the copy of what is not served any more goes")
        assert len(list(cache.glob("signed/*/digits-*/3"))) == 1
    assert not list(cache.glob("signed/*/*")), "no copy is left"


def test_a_configuration_that_nobody_has_signed_decides_nothing(
    own: KeyPair, store: StoreFolder, tmp_path: Path
) -> None:
    sign(store.add_digits(2), own)
    (store.root / "digits" / "config.pbtxt").write_text("version_policy { specific { versions: [ 1 ] } }")
    with start_server(*requires(own, tmp_path / "cache"), store=store.root) as server:
        assert server.seven() == ("2", "7")
    with start_server(store=store.root) as server:
        assert server.seven() == ("1", "7")


def test_a_signature_comes_with_a_bundle_from_a_url(own: KeyPair, store: StoreFolder, tmp_path: Path) -> None:
    with start_server(*requires(own, tmp_path / "cache"), "--store", f"file://{store.root}") as server:
        assert server.seven() == ("1", "7")
