"""What every call passes at either wire's gate: its id, its key, its line in the access log."""

from __future__ import annotations

import hmac
import logging
import re
import secrets
from itertools import count

from app.edge.calls import EdgeOptions

_log = logging.getLogger("convoy.access")
_ID = re.compile(rb"[\x21-\x7e]{1,128}")
KEY_IS_WRONG = "the API key is missing or wrong; send it as 'Authorization: Bearer KEY'"


class Entry:
    """The rules of one server."""

    def __init__(self, options: EdgeOptions) -> None:
        self._options = options
        self._expected_key = None if options.api_key is None else b"Bearer " + options.api_key.encode()
        self._process = secrets.token_hex(4)
        self._numbers = count(1)

    def request_id(self, given: bytes | None) -> bytes:
        """The client's own id where it is fit for a header and a log, else a new one."""
        if given is not None and _ID.fullmatch(given):
            return given
        return f"{self._process}-{next(self._numbers)}".encode()

    def is_key(self, authorization: bytes | None) -> bool:
        """Whether the header holds the API key, or none is asked for."""
        return self._expected_key is None or hmac.compare_digest(authorization or b"", self._expected_key)

    def log(self, client: str, call: str, status: str, took_ms: float, *, is_error: bool, trace: bytes | None) -> None:
        """One line, if the operator wants it."""
        wanted = self._options.access_log
        is_noteworthy = is_error or took_ms > self._options.slow_request_ms
        if wanted == "off" or (wanted == "errors" and not is_noteworthy):
            return
        shown_trace = f" trace {trace.decode('latin-1')}" if trace else ""
        _log.info("%s %s %s %.1f ms%s", client, call, status, took_ms, shown_trace)
