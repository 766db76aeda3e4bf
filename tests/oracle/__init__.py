"""A differential oracle: the same requests to two builds must be answered alike, byte by byte.

    python -m tests.oracle --before REVISION_OR_FOLDER

A build is a folder from which `convoy serve` is started. `corpus.py` says which servers run and what each is asked.
What may differ is in two tables: `normal.py` lists what differs between any two runs, `intended.toml` what was changed
on purpose.
"""
