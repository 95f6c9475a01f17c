"""`quark ui`: the page in the browser."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import click

from quark.cli.options import argument, option, takes_options
from quark.cli.store_access import BACKEND, usage_mistakes
from quark_core.config import settings


@click.command()
@takes_options
def ui(
    *,
    directory: Path | None = argument(),
    storage_dir: Path | None = option("Same as DIRECTORY.", "-d"),
    backend: str | None = BACKEND,
    host: str = option("Address to listen on.", show_default=True, default="127.0.0.1"),
    port: int | None = option(
        "Port to listen on; 0 uses a free one.",
        least=0,
        most=65535,
        show_default="7410, or the next free port",
    ),
    allowed_hosts: tuple[str, ...] = option(
        "Host name that browsers use, such as a proxy's. Repeatable.",
        "--allowed-host",
        metavar="NAME",
    ),
    base: str = option(
        "URL path behind a proxy, such as /quark.", metavar="PATH", show_default=False, default=""
    ),
    no_open: bool = option("Do not open the browser."),
    allow_edit: bool = option("Allow editing, archiving and stopping runs in the web UI."),
    no_compact: bool = option("Do not compact ended runs; for stores without write access."),
) -> None:
    """Open the web UI.

    Shows the runs in DIRECTORY. It defaults to the working directory, or the
    nearest parent that has a store. The web UI only reads, unless you pass
    --allow-edit.

    The printed address contains a token that works once. The browser exchanges it
    for a cookie that is valid for a week. If there are no runs yet, the web UI
    waits for the first one. Ctrl-C stops the server.
    """
    if directory is not None and storage_dir is not None:
        raise click.UsageError("Pass DIRECTORY or --storage-dir, not both.")
    if allow_edit and backend is not None:
        raise click.UsageError(
            "--allow-edit cannot be combined with --backend, which is read-only."
        )
    # Late: what serves is only loaded by who looks.
    from quark.page.routes.page_source import open_source
    from quark.page.server import PageServer, bind_socket, check_base, is_loopback

    with usage_mistakes():
        base = check_base(base)
    if no_compact:
        os.environ[settings.HELPERS] = "0"
    source = open_source(directory or storage_dir, backend, awaits_store=True)
    bound = bind_socket(host, port)

    def show_next() -> None:
        click.echo(f"Opened in the browser. Link for another browser: {server.make_link()}")
        sys.stdout.flush()

    server = PageServer(
        source,
        bound,
        base=base,
        hosts=allowed_hosts,
        on_trade=show_next,
        allow_edit=allow_edit,
        keeps_sessions=port != 0,
    )
    if not is_loopback(host):
        click.echo(
            f"quark: warning: {host} is reachable from other machines, and the connection is not "
            "encrypted. `ssh -L` to a server on 127.0.0.1 is safer.",
            err=True,
        )
    link = server.make_link()
    click.echo(f"Web UI of {source.place}: {link}\nCtrl-C stops it.")
    sys.stdout.flush()
    if not no_open:
        _open_browser(link)
    try:
        server.run()
    except KeyboardInterrupt:
        pass
    finally:
        source.close()
    click.echo("\nStopped the web UI.")


def _open_browser(link: str) -> None:
    """Open the link, where there is a browser to open it in; not waiting for it."""
    import webbrowser

    thread = threading.Thread(
        target=webbrowser.open, args=(link,), name="quark-browser", daemon=True
    )
    thread.start()
