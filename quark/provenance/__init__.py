"""What a run was made of: its code, its data, its outputs, and the digests that tell them apart.

What a process that trains does here is bounded: it keeps, and understands nothing. Syntax
trees are made where somebody asks (`normal_form`), never in a loop.
"""
