"""What stands between an edge and a core, wherever that core is: what it can be asked, and how it says no.

Memory, calls that are open, registered shared memory, refusals in words. Knows no wire and no engine.
"""
