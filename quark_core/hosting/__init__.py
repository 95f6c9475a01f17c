"""Backends in processes of their own, so that their work takes nothing from the interpreter.

A lane has a thread, but all threads of a process share one interpreter: what
a mirror does in Python, training waits for. A backend that declares
`own_process` is opened in a helper process instead, and its lane hands
batches on as the bytes that they are.
"""
