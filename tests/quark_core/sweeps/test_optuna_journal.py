"""Optuna's journal over a log of entries: what is passed over, what is asked, what counts once."""

import json

import optuna
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quark_core.backends.coordination import AppendedEntries
from quark_core.errors import SessionStoreError
from quark_core.sweeps.optuna_journal import EntryJournal
from tests.tiers import count_examples
