"""`quark mcp`: runs as tools of the Model Context Protocol."""

from __future__ import annotations

import click

from quark.cli.options import takes_options
from quark.cli.store_access import SOURCE, RunSource
from quark_core.errors import SessionStoreError


@click.command()
@takes_options
def mcp(*, source: RunSource = SOURCE) -> None:
    """Serve runs to a language model over MCP (read-only).

    Speaks the Model Context Protocol on stdin and stdout. The tools search runs,
    summarize a run, list its alerts, read curves, compare runs and write a report.
    They change nothing. Analyses are not stored. Needs the extra mcp.
    """
    try:
        import mcp.server.lowlevel.server  # noqa: F401
    except ImportError as error:
        raise SessionStoreError(
            f'`quark mcp` needs {error.name}: `pip install "quark-tracker[mcp]"`.'
        ) from None
    from quark.cli.mcp_server import serve_stdio
    from quark.cli.mcp_tools import Workbench

    serve_stdio(Workbench(source.storage_dir, source.backend))
