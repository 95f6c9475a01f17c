"""Core of Quark: records, session, writers, delivery and analysis. Imports no backend."""

from quark_core.system.terminal_text import guard_logger

__all__: list[str] = []

guard_logger("quark")
