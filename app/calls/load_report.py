"""Load reports for load balancers that ask for them: ORCA (gRFC A51, `xds.data.orca.v3.OrcaLoadReport`).

A request asks with `endpoint-load-metrics-format: TEXT`, `JSON` or `BIN`, over gRPC as metadata with any value. Two
fields are told, which is what Envoy's client_side_weighted_round_robin needs.
"""

from __future__ import annotations

import base64
import struct

from convoy.app.lifecycle.load_watch import CoreLoad

ASKS = "endpoint-load-metrics-format"
TELLS = "endpoint-load-metrics"
TRAILER = "endpoint-load-metrics-bin"
# Protocol Buffers: the field's number and wire type 1, and eight bytes of a double; two fields need no library.
_REPORT = struct.Struct("<BdBd")


def report_header(wanted: bytes, load: CoreLoad) -> bytes | None:
    """The value of the header in this format; None for an unknown format."""
    match wanted.strip().upper():
        case b"TEXT":
            return b"TEXT application_utilization=%.4f, rps_fractional=%.2f" % load[:2]
        case b"JSON":
            return b'JSON {"application_utilization": %.4f, "rps_fractional": %.2f}' % load[:2]
        case b"BIN":
            return b"BIN " + base64.b64encode(report_message(load))
    return None


def report_message(load: CoreLoad) -> bytes:
    """The same as an OrcaLoadReport, for a trailer."""
    rps_fractional, application_utilization = 6 << 3 | 1, 9 << 3 | 1  # the fields' tags
    return _REPORT.pack(rps_fractional, load.requests_per_s, application_utilization, load.utilisation)
