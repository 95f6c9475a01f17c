"""The `quark` command."""

from quark.cli.main import main

__all__ = ["main"]
