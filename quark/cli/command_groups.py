"""Groups of commands that say which command was meant where there is none of a name."""

from __future__ import annotations

from difflib import get_close_matches

import click

__all__ = ["SuggestingGroup"]

_NEAR = 2


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
            if not near or "Did you mean" in error.message:
                raise
            meant = " or ".join(map(repr, near[:_NEAR]))
            raise click.UsageError(f"{error.message} Did you mean {meant}?", error.ctx) from None
