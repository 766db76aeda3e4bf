"""What is said of files that make no TLS, and of what turns it on."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest

from convoy.app.config.settings import Settings, read_settings
from convoy.models.errors import UsageError
from convoy.models.tls import ClientTls, ServerTls
from tests.support.certificates import Authority


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "own")


def test_a_pair_makes_a_context_that_asks_clients_only_where_it_is_told_to(authority: Authority) -> None:
    pair = authority.sign("server")
    plain = ServerTls.read(pair.cert, pair.key, None)
    assert plain.context().verify_mode is ssl.CERT_NONE
    assert ServerTls.read(pair.cert, pair.key, authority.file).context().verify_mode is ssl.CERT_REQUIRED
    assert plain.key.strip() not in repr(plain)


def test_one_file_may_have_both(authority: Authority, tmp_path: Path) -> None:
    pair = authority.sign("server")
    both = tmp_path / "both.pem"
    both.write_bytes(pair.key.read_bytes() + pair.cert.read_bytes())
    assert ServerTls.read(both, None, None).context()
    assert ClientTls(cert_file=str(both)).context()


def test_what_is_wrong_is_said_of_the_file_that_is_wrong(authority: Authority, tmp_path: Path) -> None:
    pair, other, locked = authority.sign("one"), authority.sign("two"), authority.sign("three", password=b"secret")
    nothing, empty = tmp_path / "not-there", tmp_path / "empty"
    empty.touch()
    for cert, key, ca, words in (
        (nothing, pair.key, None, f"--tls-cert-file {nothing} cannot be read: "),
        (pair.cert, nothing, None, f"--tls-key-file {nothing} cannot be read: "),
        (pair.cert, pair.key, nothing, f"--tls-client-ca-file {nothing} cannot be read: "),
        (empty, pair.key, None, f"--tls-cert-file {empty} has no PEM certificate"),
        (pair.cert, pair.cert, None, f"--tls-key-file {pair.cert} has no PEM private key"),
        (pair.cert, None, None, f"--tls-cert-file {pair.cert} has no PEM private key"),
        (pair.cert, pair.key, pair.key, f"--tls-client-ca-file {pair.key} has no PEM certificate"),
        (locked.cert, locked.key, None, f"the key in --tls-key-file {locked.key} has a password"),
        (pair.cert, other.key, None, f"the key in --tls-key-file {other.key} does not match the first certificate in"),
    ):
        with pytest.raises(UsageError) as caught:
            ServerTls.read(cert, key, ca)
        assert str(caught.value).startswith(words)


def test_a_certificate_that_is_cut_off_is_no_certificate(authority: Authority) -> None:
    pair = authority.sign("one")
    pair.cert.write_text(pair.cert.read_text()[:200])
    with pytest.raises(UsageError, match=r"cannot use --tls-cert-file .*openssl x509"):
        ServerTls.read(pair.cert, pair.key, None)


def test_a_client_says_what_is_wrong_too(authority: Authority, tmp_path: Path) -> None:
    pair, other = authority.sign("one"), authority.sign("two")
    with pytest.raises(UsageError, match="--client-key-file needs --client-cert-file"):
        ClientTls(key_file=str(pair.key))
    with pytest.raises(UsageError, match=r"--ca-file .* cannot be read"):
        ClientTls(ca_file=str(tmp_path / "not-there"))
    with pytest.raises(UsageError, match=r"--ca-file .* has no PEM certificate"):
        ClientTls(ca_file=str(pair.key))
    with pytest.raises(UsageError, match="does not match the first certificate in --client-cert-file"):
        ClientTls(cert_file=str(pair.cert), key_file=str(other.key))


def test_the_certificate_turns_it_on(authority: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = authority.sign("one")
    with pytest.raises(UsageError, match="need tls_cert_file"):
        read_settings({"tls_key_file": str(pair.key)})
    assert (Settings().scheme, Settings().serve_options().tls) == ("http", None)
    monkeypatch.setenv("CONVOY_TLS_CERT_FILE", str(pair.cert))
    monkeypatch.setenv("CONVOY_TLS_KEY_FILE", str(pair.key))
    settings = read_settings({})
    assert settings.scheme == "https"
    assert settings.serve_options().tls == ServerTls.read(pair.cert, pair.key, None)
