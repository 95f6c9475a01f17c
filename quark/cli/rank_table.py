"""The table of ranks in `quark show`: who is late, and by how much."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from quark_core.rank_paces import RankPace, RankPaces

__all__ = ["describe_late", "print_ranks"]

_ROWS = 16


def print_ranks(console: Console, paces: RankPaces) -> None:
    """Print the ranks of a run, of many the slowest, and a line on who is late."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    late = paces.find_late()
    silent = {rank.rank for rank, _ in paces.find_silent()}
    shown = paces.ranks
    if len(shown) > _ROWS:
        slowest = sorted(shown, key=lambda rank: (rank.rank not in silent, -(rank.behind_ms or 0)))
        shown = tuple(sorted(slowest[:_ROWS], key=lambda rank: rank.rank))
    has_hosts = len({rank.host for rank in paces.ranks}) > 1
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("rank", justify="right", no_wrap=True)
    if has_hosts:
        table.add_column("host", overflow="fold", min_width=6)
    for header in ("step ms", "p90", "behind", "slowest", "data ms", "records", "step", "seen"):
        table.add_column(header, justify="right", no_wrap=True)
    for rank in shown:
        is_marked = rank is late or rank.rank in silent
        table.add_row(
            str(rank.rank),
            *([Text(rank.host or "-")] if has_hosts else []),
            _describe_ms(rank.step_ms),
            _describe_ms(rank.step_p90_ms),
            _describe_ms(rank.behind_ms, signed=True),
            "-" if rank.slowest is None else f"{100 * rank.slowest:.0f} %",
            _describe_ms(rank.data_ms),
            str(rank.records),
            "-" if rank.last_step is None else str(rank.last_step),
            rank.last_seen[11:19],
            style="yellow" if is_marked else None,
        )
    console.print(table)
    if len(shown) < len(paces.ranks):
        console.print(f"The slowest {len(shown)} of {len(paces.ranks)} ranks.", style="dim")
    for line in describe_late(paces):
        console.print(line, highlight=False)


def describe_late(paces: RankPaces) -> list[str]:
    """Lines on the rank that the others wait for, and on those that were not seen lately."""
    lines = []
    measure = "" if paces.is_timed else ", by the times of its metrics"
    since = f"from step {paces.first_step} on{measure}"
    late = paces.find_late()
    if late is not None and late.step_ms is not None and late.behind_ms is not None:
        usual_ms = late.step_ms - late.behind_ms
        more = f" ({100 * late.behind_ms / usual_ms:.0f} %)" if usual_ms > 0 else ""
        lines.append(
            f"Rank {late.rank} is late: its steps take {late.behind_ms:.3g} ms{more} longer than "
            f"the other ranks', and it is the slowest at {100 * (late.slowest or 0):.0f} % of "
            f"them ({since}).{_blame_data(late, paces)}"
        )
    elif any(rank.step_ms is not None for rank in paces.ranks):
        lines.append(f"No rank is late ({since}).")
    lines += [
        f"Rank {rank.rank} was last seen {gap_s:.0f} s before the latest rank"
        + (f", at step {rank.last_step}." if rank.last_step is not None else ".")
        for rank, gap_s in paces.find_silent()
    ]
    return lines


def _blame_data(late: RankPace, paces: RankPaces) -> str:
    """Whether most of what a rank is late by is waiting for data."""
    others = sorted(r.data_ms for r in paces.ranks if r is not late and r.data_ms is not None)
    if late.data_ms is None or late.behind_ms is None or not others:
        return ""
    waits_ms = late.data_ms - others[len(others) // 2]
    return " It waits for its data." if waits_ms > 0.5 * late.behind_ms else ""


def _describe_ms(value: float | None, *, signed: bool = False) -> str:
    if value is None:
        return "-"
    return f"{value:+.3g}" if signed else f"{value:.4g}"
