"""Imports what is at a place, once or for as long as somebody watches."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import suppress

from quark.importing.foreign import ForeignRun, ImportFailure
from quark.importing.intake import RunImport, RunIntake

_MOST_WORK = 0.1
"""A look takes this share of the time at most."""
_LONGEST_PAUSE_S = 60.0


def import_all(intake: RunIntake, find: Callable[[], Iterable[ForeignRun]]) -> list[RunImport]:
    """Import every run that is found, each as far as it goes.

    Raises:
        ImportFailure: The place cannot be read at all.
        SessionStoreError: The store cannot be written.
    """
    intake.begin_pass()
    return [intake.take(run) for run in find()]


def watch_all(
    intake: RunIntake,
    find: Callable[[], Iterable[ForeignRun]],
    interval_s: float,
    on_news: Callable[[RunImport], None] | None = None,
) -> list[RunImport]:
    """Import every run that is found, and what comes, until Ctrl-C.

    Runs without news are not read again. Looks are as rare as it takes to need no more than a
    tenth of one core.

    Args:
        intake: Where the runs go.
        find: Finds the runs; called at each look.
        interval_s: Seconds between two looks.
        on_news: Told of each run of which something came, or that has just begun to fail.

    Returns:
        What has come of each run.

    Raises:
        ImportFailure: The place cannot be read at the first look.
        SessionStoreError: The store cannot be written.
    """
    watched = _Watch(intake, find, on_news)
    try:
        pause_s = watched.look(is_first=True)
        while True:
            time.sleep(min(max(interval_s, pause_s), _LONGEST_PAUSE_S))
            pause_s = watched.look()
    except KeyboardInterrupt:
        pass
    # Asked twice: what was taken is kept; only that it has ended is not said.
    with suppress(KeyboardInterrupt):
        watched.end()
    return list(watched.results.values())


class _Watch:
    """What is known of the runs of one place."""

    def __init__(
        self,
        intake: RunIntake,
        find: Callable[[], Iterable[ForeignRun]],
        on_news: Callable[[RunImport], None] | None,
    ) -> None:
        self.results: dict[str, RunImport] = {}
        self._intake = intake
        self._find = find
        self._on_news = on_news
        self._marks: dict[str, str | None] = {}
        self._failure: str | None = None

    def look(self, *, is_first: bool = False) -> float:
        """Take what is new; returns how many seconds to rest."""
        began_s = time.process_time()
        try:
            self._take_all(is_watched=True)
            self._failure = None
        except ImportFailure as error:
            # What is watched may be away for a while.
            if is_first:
                raise
            self._tell_once(str(error))
        return (time.process_time() - began_s) / _MOST_WORK

    def end(self) -> None:
        """Take the rest, and say of each run how it ended."""
        self._marks.clear()
        try:
            self._take_all(is_watched=False)
        except ImportFailure as error:
            self._tell_once(str(error))

    def _take_all(self, *, is_watched: bool) -> None:
        self._intake.begin_pass()
        for run in self._find():
            try:
                mark = run.mark()
            except OSError:
                # Its file is gone; to take it says so.
                mark = None
            key = run.key
            if mark is not None and self._marks.get(key) == mark:
                continue
            result = self._intake.take(run, is_watched=is_watched)
            if result.failure is None:
                self._marks[key] = mark
            self._note(key, result)

    def _note(self, key: str, result: RunImport) -> None:
        before = self.results.get(key)
        is_news = result.is_changed or (
            result.failure is not None and (before is None or before.failure != result.failure)
        )
        if before is not None:
            result.is_new |= before.is_new
            result.points += before.points
            result.records += before.records
            result.files += before.files
        self.results[key] = result
        if is_news and self._on_news is not None:
            self._on_news(result)

    def _tell_once(self, message: str) -> None:
        if message != self._failure:
            self._failure = message
            if self._on_news is not None:
                self._on_news(RunImport(identity="watch", failure=message))
