"""`python -m convoy.app.commands.healthcheck`: the image's HEALTHCHECK; exit 0 or 1.

Checks whether the server in this container is ready. Uses the address that the server wrote, however it was set: `serve
--port`, the environment, a free port. Needs only Python, so that it is cheap every few seconds.
"""

from __future__ import annotations

import os
import ssl
import sys
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path


def main() -> int:
    url = _address() + "/v2/health/ready"
    try:
        # The ready route and not the port: a server whose engine hangs still listens. No proxy is used.
        handlers = [urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=_context())]
        urllib.request.build_opener(*handlers).open(url, timeout=2.0).close()
    except urllib.error.HTTPError as error:
        print(f"{url}: {error.read(1000).decode(errors='replace')}")
        return 1
    except (OSError, ValueError) as error:
        print(f"{url}: {error}")
        return 1
    return 0


def _address() -> str:
    """The address that the server wrote or, if it could not write, its most likely one."""
    told = ""
    with suppress(KeyError, OSError, ValueError):
        told = Path(os.environ["CONVOY_ADDRESS_FILE"]).read_text().strip()
    scheme = "https" if os.environ.get("CONVOY_TLS_CERT_FILE") else "http"
    port = os.environ.get("CONVOY_PORT", "")
    own = f"{scheme}://127.0.0.1:{port if port.isdigit() else 8000}"  # Kubernetes sets tcp://... for a Service
    return told if told.startswith(("http://", "https://")) else own


def _context() -> ssl.SSLContext:
    """For a server on this machine, whose certificate is for another name; with the client certificate of other
    commands.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if cert := os.environ.get("CONVOY_CLIENT_CERT_FILE"):
        context.load_cert_chain(cert, os.environ.get("CONVOY_CLIENT_KEY_FILE"))
    return context


if __name__ == "__main__":
    sys.exit(main())
