"""A day, an hour or a second stands for all of it."""

from datetime import UTC, datetime

import pytest

from quark_core.search.evaluation import parse_period


def us(*parts):
    moment = datetime(*parts, tzinfo=UTC)
    return int(moment.timestamp()) * 1_000_000 + moment.microsecond


@pytest.mark.parametrize(
    ("text", "start", "end"),
    [
        ("2026", us(2026, 1, 1), us(2027, 1, 1)),
        ("2026-11", us(2026, 11, 1), us(2026, 12, 1)),
        ("2026-12", us(2026, 12, 1), us(2027, 1, 1)),
        ("2028-02", us(2028, 2, 1), us(2028, 3, 1)),
        ("2026-11-01", us(2026, 11, 1), us(2026, 11, 2)),
        ("2026-11-01T09", us(2026, 11, 1, 9), us(2026, 11, 1, 10)),
        ("2026-11-01 09:30", us(2026, 11, 1, 9, 30), us(2026, 11, 1, 9, 31)),
        ("2026-11-01T09:30:05Z", us(2026, 11, 1, 9, 30, 5), us(2026, 11, 1, 9, 30, 6)),
        ("2026-11-01T09:30+02:00", us(2026, 11, 1, 7, 30), us(2026, 11, 1, 7, 31)),
        ("2026-11-01t09:30-0130", us(2026, 11, 1, 11), us(2026, 11, 1, 11, 1)),
        (" 2026-11-01T09:30:05.25 ", us(2026, 11, 1, 9, 30, 5, 250_000), None),
        ("9999", us(9999, 1, 1), us(9999, 12, 31) + 86_400_000_000),
    ],
)
def test_what_a_text_stands_for(text, start, end):
    period = parse_period(text)
    assert period == (start, period.end_us if end is None else end)
    if end is None:
        assert period.end_us - period.start_us == 10_000


NO_TIMES = """
now 26 2026-1 2026-13 2026-02-30 2026-11-01T25 20261101 2026-11-01Z 2026-11-01T09:60 0000
2026-11-01T09+24:00 2026-11-01T09:30:05.1234567
"""


@pytest.mark.parametrize("text", ["", "\uff12\uff10\uff12\uff16", *NO_TIMES.split()])
def test_what_is_no_time(text):
    with pytest.raises(ValueError, match=r"\S"):
        parse_period(text)
