"""The version of Convoy, in one place for the command, the metrics and the metadata."""

from __future__ import annotations

VERSION = "0.1.0"
