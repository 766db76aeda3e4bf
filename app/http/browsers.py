"""Refuse calls that change something and come from a foreign web page.

A browser on this machine reaches a server that only this machine can reach, for every page that it shows: it sends a
form's POST to any address, and a page's own name may be made to mean 127.0.0.1 (DNS rebinding). Two headers tell, which
no page can choose: `Origin`, whose page asks, and `Host`, by what name. Programs send no `Origin`. Where a secret is
asked for, there is nothing to tell: a foreign page has none.
"""

from __future__ import annotations

import re
from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.datastructures import Headers

from convoy.app.calls.access import Authenticator
from convoy.app.calls.options import ServeOptions
from convoy.models.errors import Forbidden

_PLACE = re.compile(r"[\w.:\[\]-]+", re.ASCII)  # nothing that a URL has before or behind it


class OwnPages:
    """The rule of one server."""

    def __init__(self, options: ServeOptions) -> None:
        self._keys, self._options = Authenticator(options), options

    def check(self, headers: Headers) -> None:
        """Raises Forbidden. The API key has been checked where there is one."""
        if self._options.api_keys or self._keys.is_admin_token(headers.get("authorization", "").encode("latin-1")):
            return
        hosts, origins = headers.getlist("host"), headers.getlist("origin")
        # Another machine's name for this server is its own affair, where other machines can ask at all.
        if self._options.is_loopback:
            for host in hosts or [""]:
                self._check_name(host, "Host", host)
        for origin in origins:
            place = origin.partition("://")[2]
            self._check_name(place, "Origin", origin)
            if [place] != hosts and host_name(place) not in self._options.allowed_hosts:
                raise _refusal("Origin", origin)

    def _check_name(self, place: str, header: str, given: str) -> None:
        name = host_name(place)
        if not (is_loopback(name) or name in self._options.allowed_hosts):
            raise _refusal(header, given)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address; a name other than localhost could mean anything."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def host_name(place: str) -> str:
    """`[::1]:8000` without brackets and port; empty where it is no place at all."""
    if not _PLACE.fullmatch(place):
        return ""
    try:
        return urlsplit(f"//{place}").hostname or ""
    except ValueError:
        return ""


def _refusal(header: str, given: str) -> Forbidden:
    return Forbidden(
        f"without a token only this machine's own pages and programs change what is served, and "
        f"'{header}: {given[:100]}' is not theirs; ask http://localhost, name the host with --allowed-host, "
        "or use --admin-token-file"
    )
