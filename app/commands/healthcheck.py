"""`python -m convoy.app.commands.healthcheck`: the image's HEALTHCHECK; exit 0 or 1.

Whether the server in this container is ready. Asks where the server says that it listens, whatever told it so: `serve
--port`, the environment, a free port. Needs nothing but Python, so that it costs little every few seconds.
"""

from __future__ import annotations

import os
import sys
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path

_TIMEOUT_S = 2.0


def main() -> int:
    url = _address() + "/v2/health/ready"
    try:
        # The ready route, not the port: a server whose engine hangs still listens. A proxy has no part in this.
        urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=_TIMEOUT_S).close()
    except urllib.error.HTTPError as error:
        print(f"{url}: {error.read(1000).decode(errors='replace')}")
        return 1
    except (OSError, ValueError) as error:
        print(f"{url}: {error}")
        return 1
    return 0


def _address() -> str:
    """What the server wrote; where it could write nothing, what it is most likely to have been told."""
    told = ""
    with suppress(KeyError, OSError, ValueError):
        told = Path(os.environ["CONVOY_ADDRESS_FILE"]).read_text().strip()
    return told if told.startswith("http://") else f"http://127.0.0.1:{os.environ.get('CONVOY_PORT', '8000')}"


if __name__ == "__main__":
    sys.exit(main())
