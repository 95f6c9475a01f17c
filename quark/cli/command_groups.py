"""Groups of commands that say which command was meant where there is none of a name."""

from __future__ import annotations

from difflib import get_close_matches

import click

_NEAR = 2
# What other tools call it, which no likeness of letters finds.
_CALLED_ELSEWHERE = {
    "list": "runs",
    "ls": "runs",
    "ps": "runs",
    "tail": "follow",
    "diff": "compare",
    "check": "analyze",
    "start": "ui",
    "open": "ui",
    "server": "ui",
    "dashboard": "ui",
}
_RUN_ARGUMENTS = ("run", "runs", "old", "new", "before", "after")


class ListingGroup(click.Group):
    """A group of which `list` need not be said: `quark groups PROJECT` lists those of one."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """See `click.Group`."""
        said = args[0] if args else None
        if said not in self.commands and said not in ctx.help_option_names:
            args = ["list", *args]
        return super().parse_args(ctx, args)


class SuggestingGroup(click.Group):
    """A group that answers a name which it does not have with those that are near."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """See `click.Group`."""
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            names = self.list_commands(ctx)
            given = args[0].lower()
            near = [name for name in names if name.startswith(given)] if given else []
            near = near or get_close_matches(given, names, n=_NEAR)
            near = near or [name for name in [_CALLED_ELSEWHERE.get(given)] if name in names]
            if not near or "Did you mean" in error.message:
                raise
            meant = " or ".join(map(repr, near[:_NEAR]))
            raise click.UsageError(f"{error.message} Did you mean {meant}?", error.ctx) from None

    def invoke(self, ctx: click.Context) -> object:
        """See `click.Group`. Where a run is to be named, it says where the names are."""
        try:
            return super().invoke(ctx)
        except click.MissingParameter as error:
            if error.param is None or error.param.name not in _RUN_ARGUMENTS:
                raise
            # What is optional in `quark why [OLD] NEW` is the first one.
            told = error.format_message().replace("'[OLD]'", "'NEW'")
            told = f"{told} `quark runs` lists the runs."
            raise click.UsageError(told, error.ctx) from None
