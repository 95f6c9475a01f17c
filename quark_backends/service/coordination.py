"""What client and server say to each other of sweeps, trials and logs; a part of the protocol."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from quark_core.backends.coordination import MOST_ENTRIES, MOST_TRIALS, NewTrial, TrialWish
from quark_core.records.sweeps import SweepState, TrialResult
from quark_core.system.process import ProcessIdentity

PAGE_TRIALS = 1000
"""A page of trials has at most so many."""

PAGE_BYTES = 8 * 2**20
"""A page of trials or entries ends where it has about so many bytes."""

_Label = Annotated[str, Meta(min_length=1, max_length=250)]
_Number = Annotated[int, Meta(ge=0, le=2**63 - 1)]
_Lease = Annotated[float, Meta(gt=0)]


class OpenSweepRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`POST /v1/sweeps`: the sweep of this name, which is made where there is none.

    Attributes:
        project: Of which project.
        name: What it is called there.
        definition: What it is, as JSON values: the same for all who come.
        max_failures: How many failed runs of a trial make it broken.
    """

    project: _Label
    name: _Label
    definition: dict[str, Any]
    max_failures: Annotated[int, Meta(ge=1, le=1_000_000)] = 3


class SweepList(msgspec.Struct, frozen=True):
    """`GET /v1/sweeps`: sweeps as `StoredSweep.to_dict()`, newest first."""

    sweeps: list[dict[str, Any]]


class SweepStateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /v1/sweeps/{sweep_id}/state`: pause, go on with or cancel a sweep.

    Attributes:
        state: What it shall be.
        by: Who asks, as `user@host`; the service adds the id of the key.
    """

    state: SweepState
    by: _Label


class AddTrialsRequest(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /v1/sweeps/{sweep_id}/trials`: add trials, all of them or none.

    Attributes:
        trials: What is to be added.
        key: Names the addition: of several who add under one key, the first does.
    """

    trials: Annotated[list[NewTrial], Meta(min_length=1, max_length=MOST_TRIALS)]
    key: _Label


class TrialList(msgspec.Struct, frozen=True):
    """Trials as `StoredTrial.to_dict()`, by their number.

    Attributes:
        trials: Some of them.
        next: What to give as `start` for those that may follow; null where there are none, and
            where these are all that were added.
    """

    trials: list[dict[str, Any]]
    next: int | None = None


class ClaimRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`POST /v1/sweeps/{sweep_id}/claim`: a trial that nobody else holds.

    Attributes:
        request_id: Names the claim: sent again with the same name, it is answered with the
            same trial and token.
        worker: Who claims; null for whoever has no process that could be asked.
        lease_s: For how long it is held without a word of its run.
        wish: Which trials it may be.
    """

    request_id: _Label
    worker: ProcessIdentity | None = None
    lease_s: _Lease = 60.0
    wish: TrialWish | None = None


class TrialReply(msgspec.Struct, frozen=True):
    """A trial as `StoredTrial.to_dict()`; null where there is none to have now."""

    trial: dict[str, Any] | None


class SettleRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`POST /v1/sweeps/{sweep_id}/settle`: what became of a trial, or that it is held still.

    Attributes:
        number, token: The claim. One that is not the newest changes nothing: the reply says so.
        result: What became of it; null renews the lease.
        lease_s: For how long it is held from now on, where it is held.
    """

    number: _Number
    token: Annotated[int, Meta(ge=1, le=2**63 - 1)]
    result: TrialResult | None = None
    lease_s: _Lease = 60.0


class AppendRequest(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /v1/entries`: append texts to a log, all of them or none, one after the other.

    Attributes:
        log: Which log; it begins with its first entry.
        entries: The texts.
        request_id: Names the request: sent again with the same name, it appends nothing more.
    """

    log: _Label
    entries: Annotated[list[str], Meta(min_length=1, max_length=MOST_ENTRIES)]
    request_id: _Label


class EntryList(msgspec.Struct, frozen=True):
    """`GET /v1/entries`: entries of a log.

    Attributes:
        entries: Some of them, in their order.
        next: What to give as `start` for those that may follow; null where there are none.
    """

    entries: list[str]
    next: int | None = None


class CompareRequest(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /v1/runs/{run_id}/compare_and_set`: set a field of a run if its value is `expect`.

    Attributes:
        field: Its name.
        expect, value: Values before and after; null where the field is not there.
        by: Who asks, as `user@host`; the service adds the id of the key.
    """

    field: _Label
    expect: Any
    value: Any
    by: _Label


class CompareBelongingRequest(CompareRequest, frozen=True, kw_only=True):
    """`POST /v1/groups/compare_and_set` and `POST /v1/project/compare_and_set`.

    Attributes:
        project: Name of the project.
        path: The group's; empty for the project.
    """

    project: Annotated[str, Meta(max_length=512)]
    path: Annotated[str, Meta(max_length=512)] = ""


class CompareReply(msgspec.Struct, frozen=True):
    """Whether the value was `expect`, and so has been set."""

    was_set: bool
