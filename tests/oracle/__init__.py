"""A differential oracle: the same requests, played into two builds, are answered alike byte by byte.

    python -m tests.oracle record FOLDER                              write the corpus and the stores it needs
    python -m tests.oracle compare --before REVISION_OR_FOLDER        play it into that build and into this one

The corpus is made once, in the tree under test, from the generators of the suite; both builds get the bytes that were
written then. Nothing of the package imports what it judges, except for making the corpus: a build is a folder from
which `convoy serve` is started. What may differ is in two tables: `normal.py` has what differs between any two runs,
`intended.toml` what was changed on purpose.
"""
