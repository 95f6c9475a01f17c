"""What `quark why` prints: the verdict, since when, and causes with what speaks for them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table

from quark.analysis.explanation.results import describe_change, list_rows, tell_ends
from quark.cli.analysis_view import print_trimmed
from quark.cli.texts import Console, Text

if TYPE_CHECKING:
    from quark.analysis.explanation.results import ChangeExplanation

_WIDEST = 140  # longer lines are hard to read
_STYLES = {"Probably": "bold red", "Possibly": "yellow", "Unlikely": "dim", "Ruled out": "green"}


def print_explanation(result: ChangeExplanation, *, console: Console | None = None) -> None:
    """Print an explanation.

    Args:
        result: The explanation.
        console: Where to; stdout by default.
    """
    console = console or Console(highlight=False)
    width = min(console.width, _WIDEST) if console.is_terminal else console.width
    for end in tell_ends(result):
        print_trimmed(console, Text(end, "red"), width)
    print_trimmed(console, Text(describe_change(result), "bold"), width)
    said = result.first_difference.summary
    print_trimmed(console, Text(f"{result.reason[:1].upper()}{result.reason[1:]}."), width)
    print_trimmed(console, Text(f"{said[:1].upper()}{said[1:]}."), width)
    rows = list(list_rows(result))
    causes = Table.grid(padding=(0, 2))
    causes.add_column(no_wrap=True)
    causes.add_column(no_wrap=True)
    causes.add_column(overflow="fold")
    causes.add_column(overflow="fold", style="dim")
    others = Table.grid(padding=(0, 2))
    others.add_column(no_wrap=True, width=10)
    others.add_column(overflow="fold")
    for row in rows:
        label = Text(row.label, style=_STYLES.get(row.label, ""))
        if row.kind:
            causes.add_row(label, Text(row.kind), Text(row.place), Text(row.words))
        else:
            words = f"  # {row.words}" if row.words else ""
            others.add_row(label, Text(f"{row.place}{words}"))
    for part in (causes, others):
        if part.row_count:
            print_trimmed(console, part, width)
    for note in result.notes:
        print_trimmed(console, Text(note, style="dim"), width)
