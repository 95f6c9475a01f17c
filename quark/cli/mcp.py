"""`quark mcp`: runs as tools of the Model Context Protocol."""

from __future__ import annotations

import click

from quark.cli.options import takes_options
from quark.cli.store_access import SOURCE, RunSource
from quark_core.errors import SessionStoreError


@click.command()
@takes_options
def mcp(*, source: RunSource = SOURCE) -> None:
    """Serve runs to a program that speaks the Model Context Protocol, over stdin and stdout.

    Its tools search runs, sum one up, say what is wrong with it and what shows
    that, read curves, compare runs and write a report. They change nothing; an
    analysis that they make is not stored. Needs the extra mcp.
    """
    try:
        import mcp.server.lowlevel.server  # noqa: F401
    except ImportError as error:
        raise SessionStoreError(
            f"{error.name} is missing, which the Model Context Protocol needs: "
            'pip install "quark-tracker[mcp]"'
        ) from None
    from quark.cli.mcp_server import serve_stdio
    from quark.cli.mcp_tools import Workbench

    serve_stdio(Workbench(source.storage_dir, source.backend))
