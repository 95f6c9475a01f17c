"""The server of the persistence service: routes, keys, limits, stores of workspaces."""

from quark_core.system.terminal_text import guard_logger

__all__: list[str] = []

guard_logger("quark.service")
