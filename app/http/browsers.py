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

from convoy.app.calls.access import Authenticator, ServeOptions
from convoy.models.errors import Forbidden

_PLACE = re.compile(r"[\w.:\[\]-]+", re.ASCII)  # nothing that a URL has before or behind it


def check_own_page(headers: Headers, options: ServeOptions) -> None:
    """Raises Forbidden. The API key has been checked where there is one."""
    authorization = headers.get("authorization", "").encode("latin-1")
    if options.api_keys or Authenticator(options).is_admin_token(authorization):
        return
    hosts, origins = headers.getlist("host"), headers.getlist("origin")
    # Another machine's name for this server is its own affair, where other machines can ask at all.
    if options.is_loopback:
        for host in hosts or [""]:
            if not (is_loopback(host_name(host)) or host_name(host) in options.allowed_hosts):
                raise _refusal("Host", host)
    for origin in origins:
        place = origin.partition("://")[2]
        is_here = is_loopback(host_name(place)) and [place] == hosts
        if not (is_here or host_name(place) in options.allowed_hosts):
            raise _refusal("Origin", origin)


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
