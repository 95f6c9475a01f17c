"""Agreement of ranks on one trial: the lead rank claims it, the others read a log.

The log `<sweep>/launch/<launch>` has an entry for each trial that the leading rank has claimed,
one for each rung that a rank has reached, and one for each decision there. A training is stopped
only where all ranks have said that they are at the rung: who stops alone would leave the others
waiting for it in a collective.
"""

from __future__ import annotations

import json
import logging
import time
import uuid
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from quark.sweeps.sweep_store import StoreLink
from quark_core.errors import QuarkError, SchemaValidationError, SessionStoreError
from quark_core.ranks.launches import detect_rank, find_launch
from quark_core.system.process import ProcessIdentity, current_process, find_age_s, is_alive

_log = logging.getLogger("quark")

_POLL_S, _SLOW_POLL_S = 0.02, 0.25
# How long the leading rank waits for the others at a rung; they wait much longer for it, so that
# none goes on while it stops.
_GATHER_S = 20.0
_ANSWER_S = 120.0
# Clocks of machines may be so far apart.
_SKEW_S = 60.0

_PROCESS = ("host", "pid", "started", "image")

_agreements: dict[str, RankAgreement] = {}


class GivenTrial(NamedTuple):
    """A trial that the leading rank has claimed.

    Attributes:
        number, token: The claim.
        earlier_run_id: A run to go on from, or None.
    """

    number: int
    token: int
    earlier_run_id: str | None


class RankAgreement:
    """One rank's view of the log of its launch.

    Args:
        link: The store.
        log: Name of the log.
        rank: This rank.
        world_size: How many there are.
        is_exact: Whether no other launch has this log.

    Attributes:
        leads: Whether it claims and decides.
    """

    def __init__(
        self, link: StoreLink, log: str, rank: int, world_size: int, *, is_exact: bool
    ) -> None:
        self.leads = rank == 0
        self.link = link
        self._log = log
        self._rank = rank
        self._world_size = world_size
        self._is_exact = is_exact
        self._read = 0
        self._leader: ProcessIdentity | None = None
        self._trials: deque[GivenTrial | None] = deque()
        self._here: dict[tuple[int, int, int], set[int]] = {}
        self._decisions: dict[tuple[int, int, int], bool] = {}
        self._trial: tuple[int, int] = (-1, 0)
        self._has_begun = False
        # The other ranks have let a rung go by: they are not waited for again.
        self._sees_alone = False

    def give(self, trial: GivenTrial | None) -> None:
        """Tell the other ranks which trial is next, or that there is none any more."""
        if not self._has_begun:
            self._has_begun = True
            process = current_process()
            begun = [process.host, process.pid, process.started, process.image]
            self._tell({"begin": begun, "s": time.time()})
        self._tell({"next": None if trial is None else list(trial)})
        if trial is not None:
            self._trial = (trial.number, trial.token)

    def take(self) -> GivenTrial | None:
        """The trial that is next, on a rank that does not lead; waits for it.

        Raises:
            SessionStoreError: The leading rank is gone.
        """
        poll_s = _POLL_S
        while True:
            self._catch_up()
            if self._trials:
                given = self._trials.popleft()
                if given is not None:
                    self._trial = (given.number, given.token)
                return given
            if self._leader is not None and is_alive(self._leader) is False:
                raise SessionStoreError(
                    "rank 0, which claims the trials of this launch, ended without a message"
                )
            time.sleep(poll_s)
            poll_s = min(poll_s * 1.2, _SLOW_POLL_S)

    def join(self, number: int, token: int) -> None:
        """Say which trial this launch works at, where all ranks know it."""
        self._trial = (number, token)
        if self.leads:
            self.give(GivenTrial(number, token, None))

    def announce(self, step: int, *, stops: bool) -> bool:
        """Decide at a rung, on the leading rank; returns what holds for all ranks.

        A training that shall stop goes on where the other ranks do not see the rung.
        """
        place = (*self._trial, step)
        if stops and self._sees_alone:
            stops = False
        elif stops and not self._wait(lambda: self._count_here(place), _GATHER_S):
            self._sees_alone = True
            _log.warning(
                "the trial is not stopped at step %d, because not all ranks reached it within "
"%g s. Log the sweep's metric on all ranks, or call trial.report there",
                step, _GATHER_S
            )  # fmt: skip
            stops = False
        try:
            self._tell({"rung": list(place), "stop": stops})
        except QuarkError as error:
            _log.warning("training continues: the other ranks cannot be notified (%s)", error)
            return False
        return stops

    def wait_for(self, step: int) -> bool:
        """What the leading rank decides at a rung, on one that does not lead."""
        place = (*self._trial, step)
        try:
            self._tell({"at": list(place), "rank": self._rank})
        except QuarkError as error:
            # The leading rank does not stop without this one.
            _log.warning("training continues at step %d: %s", step, error)
            return False
        if not self._wait(lambda: place in self._decisions, _ANSWER_S):
            _log.warning("rank 0 sent no decision at step %d within %g s", step, _ANSWER_S)
            return False
        return self._decisions[place]

    def _count_here(self, place: tuple[int, int, int]) -> bool:
        return len(self._here.get(place, ())) >= self._world_size - 1

    def _wait(self, is_there: Callable[[], bool], timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        poll_s = _POLL_S / 4
        while True:
            try:
                self._catch_up()
            except QuarkError as error:
                _log.debug("the log of the launch cannot be read: %s", error)
            if is_there():
                return True
            if time.monotonic() > deadline:
                return False
            time.sleep(poll_s)
            poll_s = min(poll_s * 1.2, _SLOW_POLL_S)

    def _tell(self, said: dict[str, Any]) -> None:
        entry, request_id = json.dumps(said), uuid.uuid4().hex
        self.link.store.append_entries(self._log, [entry], request_id=request_id)

    def _catch_up(self) -> None:
        while True:
            entries = self.link.store.read_entries(self._log, self._read)
            if not entries:
                return
            self._read += len(entries)
            for entry in entries:
                try:
                    self._note(json.loads(entry))
                except (ValueError, TypeError, LookupError, OverflowError, RecursionError):
                    continue  # somebody else's, who may write here too

    def _note(self, said: dict[str, Any]) -> None:
        if "begin" in said:
            begun = dict(zip(_PROCESS, said["begin"], strict=True))
            leader = msgspec.convert(begun, ProcessIdentity)
            is_ours = self._is_exact or said["s"] >= time.time() - find_age_s() - _SKEW_S
            # What stands before is of an earlier launch under the same name.
            self._trials.clear()
            self._leader = leader if is_ours else None
        elif "next" in said:
            if self._leader is not None and not self.leads:
                given = said["next"]
                self._trials.append(
                    None if given is None else msgspec.convert(tuple(given), GivenTrial)
                )
        elif "at" in said:
            number, token, step = said["at"]
            self._here.setdefault((number, token, step), set()).add(int(said["rank"]))
        elif "rung" in said:
            number, token, step = said["rung"]
            self._decisions[number, token, step] = said["stop"] is True


def find_agreement(link: StoreLink, sweep_id: str) -> RankAgreement | None:
    """How this process agrees with the other ranks of its launch; None where it is alone.

    Raises:
        SchemaValidationError: It has ranks beside it, and nothing says of which launch.
    """
    rank = detect_rank()
    if rank.world_size <= 1:
        return None
    launch = find_launch()
    if launch is None:
        raise SchemaValidationError(
            f"this is rank {rank.rank} of {rank.world_size} of an unknown launch, so its ranks "
            "cannot work on one trial. Start them with torchrun, srun or mpirun, or set "
            "MASTER_ADDR and MASTER_PORT"
        )
    log = f"{sweep_id}/launch/{launch.key}-{launch.restart}-{launch.requeues}"
    found = _agreements.get(log)
    if found is None:
        found = RankAgreement(link, log, rank.rank, rank.world_size, is_exact=launch.is_exact)
        _agreements[log] = found
    found.link = link
    return found
