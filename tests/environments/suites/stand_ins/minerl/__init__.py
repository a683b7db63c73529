"""A stand-in for MineRL 0.4.4 with spaces, types, return values and errors of the real one, and a very small world.

Written from minerllabs/minerl @ ccc8c659d2b8e4737eda418593dee94c101c9ba3 (tag v0.4.4); each fact names file and line
below `minerl/`. It checks actions more strictly than the original, which ignores unknown entries.
"""
