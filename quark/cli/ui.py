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
    storage_dir: Path | None = option("The same as DIRECTORY.", "-d"),
    backend: str | None = BACKEND,
    host: str = option(
        "Where to listen [default: 127.0.0.1].", show_default=False, default="127.0.0.1"
    ),
    port: int | None = option(
        "Port; 0 takes a free one [default: 7410, or the next that is free].", least=0, most=65535
    ),
    allowed_hosts: tuple[str, ...] = option(
        "A name that browsers call this server by, such as a proxy's; repeat for several.",
        "--allowed-host",
        metavar="NAME",
    ),
    base: str = option(
        "Path that a proxy keeps, such as /quark.", metavar="PATH", show_default=False, default=""
    ),
    no_open: bool = option("Do not open the browser."),
    allow_edit: bool = option(
        "Let the page change names, notes and tags, archive runs and ask them to stop."
    ),
    no_compact: bool = option(
        "Do not have runs that have ended compacted: for a store that cannot be written."
    ),
) -> None:
    """Look at the runs below DIRECTORY (by default the working directory) in the browser.

    Reads and changes no run, unless --allow-edit lets the page do that. The address that it
    prints has a token, which is good once: the browser trades it for a cookie, which is good for
    a week. Where there is no run yet, the page waits for the first one. Ctrl-C ends it.
    """
    if directory is not None and storage_dir is not None:
        raise click.UsageError("give DIRECTORY or --storage-dir, not both")
    if allow_edit and backend is not None:
        raise click.UsageError(
            "--allow-edit changes runs of the store of DIRECTORY, so it cannot be given with "
            "--backend"
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
        click.echo(f"Opened. For another browser: {server.make_link()}")
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
            f"quark: warning: {host} can be reached from other machines, and whatever crosses the "
            "network can be read on its way; `ssh -L` to a server on 127.0.0.1 is safer",
            err=True,
        )
    link = server.make_link()
    click.echo(f"Quark shows {source.place} on {link}\nCtrl-C ends it.")
    sys.stdout.flush()
    if not no_open:
        _open_browser(link)
    try:
        server.run()
    except KeyboardInterrupt:
        pass
    finally:
        source.close()
    click.echo("\nThe page is closed.")


def _open_browser(link: str) -> None:
    """Open the link, where there is a browser to open it in; not waiting for it."""
    import webbrowser

    thread = threading.Thread(
        target=webbrowser.open, args=(link,), name="quark-browser", daemon=True
    )
    thread.start()
