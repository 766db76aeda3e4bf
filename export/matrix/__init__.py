"""Networks of every kind through `convoy export`, and what became of each: `python -m convoy.export.matrix`.

    cases    what is tried: a name, what to write into a folder, and the command
    trial    one of them in a folder and a process of its own: exported exactly, or refused with a message
    rows     what became of it, as records and as a file that grows          page  the same for people
    made     the networks, checkpoints, ONNX files and pictures

A development program: it is in no wheel.
"""
