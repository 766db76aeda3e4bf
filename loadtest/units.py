"""Factors between the units in which times and memory are kept and shown."""

NS_PER_S = 1_000_000_000
NS_PER_MS = 1_000_000
MS_PER_S = 1_000
BYTES_PER_MIB = 1 << 20
