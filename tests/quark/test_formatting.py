"""Durations, sizes and values are written the same in Python and on the page."""

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from quark_core import formatting

# The page's modules read the same cases: tests/quark/page/modules/data.test.js.
CASES = json.loads(Path(__file__).with_name("formats.json").read_text("utf-8"))


def format_age(age_s):
    return formatting.format_age((datetime.now(UTC) - timedelta(seconds=age_s)).isoformat())


@pytest.mark.parametrize(
    ("form", "given", "text"),
    [(form, given, text) for form, cases in CASES.items() for given, text in cases],
)
def test_each_form_is_as_the_table_says(form, given, text):
    write = format_age if form == "age" else getattr(formatting, f"format_{form}")
    assert write(given) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (4.21, "4.2 s"),
        (192.4, "3 min 12 s"),
        (3599.6, "1 h 00 min"),
        (7640, "2 h 07 min"),
        (86_400 * 3 + 4 * 3600, "3 d 04 h"),
    ],
)
def test_a_duration_has_its_two_largest_units(seconds, text):
    assert formatting.format_duration(seconds) == text


def test_what_is_old_has_its_date():
    assert formatting.format_age("2026-01-02T03:04:05+00:00") == "2026-01-02"


def test_first_names_are_joined():
    assert formatting.join_first(["a", "b"], 2) == "a, b"
    assert formatting.join_first([1, 2, 3], 2) == "1, 2 and 1 more"
