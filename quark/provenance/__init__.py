"""The provenance of a run: code, data, outputs, and their digests.

What a process that trains does here is bounded: it keeps, and understands nothing. Syntax
trees are made where somebody asks (`normal_form`), never in a loop.
"""
