"""Refuse state-changing calls from foreign web pages.

Every page in a browser on this machine can reach a server that listens on loopback: pages can POST forms to any
address, and a page's host name may resolve to 127.0.0.1 (DNS rebinding). Two headers that pages cannot choose tell:
`Origin`, the page's origin, and `Host`, the name it used. Programs send no `Origin`. If a secret is required, this
check is unnecessary, because foreign pages do not have it.
"""

from __future__ import annotations

import re
from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.datastructures import Headers

from convoy.app.calls.access import Authenticator, ServeOptions
from convoy.models.errors import Forbidden

_PLACE = re.compile(r"[\w.:\[\]-]+", re.ASCII)  # no other parts of a URL


def check_own_page(headers: Headers, options: ServeOptions) -> None:
    """Raise Forbidden for a foreign page. The API key has been checked if keys are on."""
    authorization = headers.get("authorization", "").encode("latin-1")
    if options.api_keys or Authenticator(options).is_admin_token(authorization):
        return
    hosts, origins = headers.getlist("host"), headers.getlist("origin")
    # If other machines can reach the server, they may use any name for it.
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
    """Whether only this machine can reach the address; names other than localhost could mean anything."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def host_name(place: str) -> str:
    """`[::1]:8000` without brackets and port; empty if it is not a host."""
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
