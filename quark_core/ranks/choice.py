"""On which ranks of a launch a session, or one of its backends, is kept."""

from __future__ import annotations

import operator
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass

from quark_core.config import settings
from quark_core.errors import SchemaValidationError

_MAX_RANK = 10**7
_ENTRY = re.compile(r"(\d{1,8})(?:-(\d{1,8}))?")
_FORMS = '"zero", "all", or ranks such as [0, 8] or "0,8-11"'


@dataclass(frozen=True, slots=True)
class RankChoice:
    """Some ranks, or all of them.

    Attributes:
        spans: First and last rank of each span, sorted; None for all ranks.
    """

    spans: tuple[tuple[int, int], ...] | None

    def includes(self, rank: int) -> bool:
        """Whether a rank is one of them."""
        if self.spans is None:
            return True
        return any(first <= rank <= last for first, last in self.spans)

    @property
    def leader(self) -> int:
        """The lowest of them: it alone starts, describes and ends the run."""
        return 0 if self.spans is None else self.spans[0][0]

    @property
    def is_one(self) -> bool:
        """Whether it is a single rank."""
        return self.spans is not None and len(self.spans) == 1 and len(set(self.spans[0])) == 1

    def __str__(self) -> str:
        if self == RANK_ZERO:
            return "zero"
        if self.spans is None:
            return "all"
        return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in self.spans)


RANK_ZERO = RankChoice(((0, 0),))
ALL_RANKS = RankChoice(None)


def choose_ranks(ranks: object) -> RankChoice | None:
    """What a session was asked for: the argument, else QUARK_RANKS; None where neither says.

    Raises:
        SchemaValidationError: Neither a word nor ranks; the message names which of the two.
    """
    if ranks is not None:
        return parse_ranks(ranks, "ranks")
    given = os.environ.get(settings.RANKS, "").strip()
    return parse_ranks(given, settings.RANKS) if given else None


def parse_ranks(ranks: object, argument: str) -> RankChoice:
    """The choice that a word, a text such as "0,8-11" or an iterable of ranks stands for.

    Raises:
        SchemaValidationError: None of these, or no rank at all.
    """
    if isinstance(ranks, RankChoice):
        return ranks
    if isinstance(ranks, str):
        return _parse_text(ranks, argument)
    if isinstance(ranks, Iterable):
        return _join_spans([(rank, rank) for rank in _check_ranks(ranks, argument)], argument)
    raise SchemaValidationError(f"{argument} must be {_FORMS}, not a {type(ranks).__name__}")


def _parse_text(text: str, argument: str) -> RankChoice:
    word = text.strip().lower()
    if word in ("zero", "all"):
        return RANK_ZERO if word == "zero" else ALL_RANKS
    spans = []
    # A plus in a URI's parameter is a space, and a comma would end an entry of QUARK_BACKENDS.
    for entry in re.split(r"[\s,;+]+", word):
        match = _ENTRY.fullmatch(entry)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise SchemaValidationError(f"{argument} must be {_FORMS}, got {text!r:.60}")
        spans.append((int(match[1]), int(match[2] or match[1])))
    return _join_spans(spans, argument)


def _check_ranks(ranks: Iterable[object], argument: str) -> list[int]:
    found = []
    for index, rank in enumerate(ranks):
        try:
            number = -1 if isinstance(rank, bool) else int(operator.index(rank))  # type: ignore[arg-type]
        except TypeError:
            number = -1
        if not 0 <= number <= _MAX_RANK:
            raise SchemaValidationError(
                f"{argument}[{index}] must be a rank from 0 to {_MAX_RANK}, got {rank!r:.60}"
            )
        found.append(number)
    return found


def _join_spans(spans: list[tuple[int, int]], argument: str) -> RankChoice:
    if not spans:
        raise SchemaValidationError(f"{argument} names no rank; it must be {_FORMS}")
    joined: list[tuple[int, int]] = []
    for first, last in sorted(spans):
        if joined and first <= joined[-1][1] + 1:
            joined[-1] = (joined[-1][0], max(joined[-1][1], last))
        else:
            joined.append((first, last))
    return RankChoice(tuple(joined))
