"""What stands between an edge and a core, wherever that core is: what it can be asked, memory, calls that are open, and how
a request that is not answered is told so.

Knows no wire and no engine.
"""
