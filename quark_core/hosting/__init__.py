"""Backends in processes of their own, so that training neither waits for them nor ends with them.

A lane has a thread, but all threads of a process share one interpreter and
one end: what a backend does in Python, training waits for, and a crash of it
is training's. So a backend is opened in a helper process where a run is
written, unless it declares otherwise, and its lane hands batches on as the
bytes that they are.
"""
