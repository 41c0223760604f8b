"""Reads pickles without doing what they say, in a process of its own that imports Python's own library alone.

A pickle is a program for a stack machine. `machine` is that machine, with names in the place of objects: no
class and no function is ever looked up, so nothing can happen but what stands in `makers`. `names` is the
list of what a file may name; whatever else it asks for is refused by name. `server` is the process that
`mega_ckpt.pickles` starts and asks.
"""
