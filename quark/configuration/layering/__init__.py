"""Configurations made of layers: each setting knows who gave it its value, and what that replaced.

`layers` puts functions, files, the environment and the command line into an order and applies
them; `layered_config` is the mapping that they write to, `assignments` its memory; `file_layers`
and `command_line` read what people write, and evaluate none of it; `manual` tells the outcome.
"""
