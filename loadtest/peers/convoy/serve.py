"""`convoy serve` with nothing said but where, what and on how many threads."""

from __future__ import annotations

import os
import sys

from peer_side import settings

ASKED = settings()
WORDS = ["--store", ASKED.store, "--host", "127.0.0.1", "--port", str(ASKED.port), "--grpc-port", str(ASKED.grpc_port)]
# -P: not what lies in the working directory.
SERVE = [sys.executable, "-P", "-m", "convoy", "serve", *WORDS]
os.execv(sys.executable, [*SERVE, *["--threads", str(ASKED.threads)] * bool(ASKED.threads)])
