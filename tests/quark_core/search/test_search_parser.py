"""What the language of searches means, and where its mistakes are pointed out."""

from __future__ import annotations

import math
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quark_core.errors import SchemaValidationError
from quark_core.records.json_object import JsonObject
from quark_core.records.query import (
    And,
    Comparison,
    Contains,
    Field,
    HasTag,
    IsNull,
    Membership,
    Not,
    Or,
    OrderBy,
)
from quark_core.records.sweeps import StoredTrial
from quark_core.search.evaluation import parse_period
from quark_core.search.parser import compile_trial_where, parse_order, parse_where

LOSS = Field("metric", "val/loss")
LR = Field("config", "lr")
X, Y, Z = (Comparison(Field("metric", name), "==", 1) for name in "xyz")


@pytest.mark.parametrize(
    ("text", "tree"),
    [
        ("val/loss < 0.3", Comparison(LOSS, "<", 0.3)),
        ("0.3 > val/loss", Comparison(LOSS, "<", 0.3)),
        ("0.3<=val/loss", Comparison(LOSS, ">=", 0.3)),
        ("1 == val/loss", Comparison(LOSS, "==", 1)),
        ("val/loss<-1", Comparison(LOSS, "<", -1)),
        ("config.lr == 3e-4", Comparison(LR, "==", 3e-4)),
        ("config.lr == +.5E+2", Comparison(LR, "==", 50.0)),
        ("config.lr == 10_000", Comparison(LR, "==", 10_000)),
        ("config.lr == 99999999999999999999", Comparison(LR, "==", 1e20)),
        ("config.lr < -inf", Comparison(LR, "<", -math.inf)),
        ("config.lr == true", Comparison(LR, "==", True)),
        ("config.lr != False", Comparison(LR, "!=", False)),
        ('config.lr == "it\'s"', Comparison(LR, "==", "it's")),
        (r"config.lr == 'a\'b\\c\n'", Comparison(LR, "==", "a'b\\c\n")),
        ("config.a.b-c/d@e == 1", Comparison(Field("config", "a.b-c/d@e"), "==", 1)),
        ("config.`odd key` == 1", Comparison(Field("config", "odd key"), "==", 1)),
        ("`1 and 2` == 1", Comparison(Field("metric", "1 and 2"), "==", 1)),
        ("`config.lr` == 1", Comparison(Field("metric", "config.lr"), "==", 1)),
        ("metric.step == 1", Comparison(Field("metric", "step"), "==", 1)),
        ("step == 1", Comparison(Field("run", "step"), "==", 1)),
        ("run.step == 1", Comparison(Field("run", "step"), "==", 1)),
        ("run.`step` == 1", Comparison(Field("run", "step"), "==", 1)),
        ("android == 1", Comparison(Field("metric", "android"), "==", 1)),
        ("in/x@1 == 1", Comparison(Field("metric", "in/x@1"), "==", 1)),
        ("損失 == 1", Comparison(Field("metric", "損失"), "==", 1)),
        ("min(val/loss) < 1", Comparison(Field("metric", "val/loss", "min"), "<", 1)),
        ("count(`a b`) < 1", Comparison(Field("metric", "a b", "count"), "<", 1)),
        ("last(val/loss) < 1", Comparison(LOSS, "<", 1)),
        ("min == 1", Comparison(Field("metric", "min"), "==", 1)),
        ("val/loss == null", IsNull(LOSS)),
        ("null != config.lr", Not(IsNull(LR))),
        ("config.lr == None", IsNull(LR)),
        ("tags == null", IsNull(Field("run", "tags"))),
        ("config.lr in (1, 'a', true,)", Membership(LR, (1, "a", True))),
        ("config.lr not in [1]", Not(Membership(LR, (1,)))),
        ("'big' in tags", HasTag("big")),
        ("'big' not in tags", Not(HasTag("big"))),
        ("'lora' in name", Contains(Field("run", "name"), "lora")),
        ("'adam' not in config.lr", Not(Contains(LR, "adam"))),
        ("created >= '2026-11'", Comparison(Field("run", "created"), ">=", "2026-11")),
        ("x == 1 or y == 1 and z == 1", Or((X, And((Y, Z))))),
        ("(x == 1 or y == 1) and z == 1", And((Or((X, Y)), Z))),
        ("not x == 1 and y == 1", And((Not(X), Y))),
        ("not (x == 1 and\n\ty == 1)", Not(And((X, Y)))),
        ("NOT not x == 1", Not(Not(X))),
        ("x == 1 AND y == 1 OR z == 1", Or((And((X, Y)), Z))),
        ("((x == 1))", X),
    ],
)
def test_what_an_expression_means(text, tree):
    found = parse_where(text)
    assert found == tree
    # 1 == True in Python; the types tell them apart.
    assert repr(type(getattr(found, "value", None))) == repr(type(getattr(tree, "value", None)))


@pytest.mark.parametrize(
    ("text", "field", "descending"),
    [
        ("val/loss", LOSS, False),
        ("-val/loss", LOSS, True),
        ("+val/loss", LOSS, False),
        (" - val/loss ", LOSS, True),
        ("val/loss desc", LOSS, True),
        ("val/loss ASC ", LOSS, False),
        ("-min(val/loss)", Field("metric", "val/loss", "min"), True),
        ("config.`a desc` desc", Field("config", "a desc"), True),
        ("created", Field("run", "created"), False),
        ("desc", Field("metric", "desc"), False),
    ],
)
def test_what_an_order_means(text, field, descending):
    assert parse_order(text) == OrderBy(field, descending)


MISTAKES = [
    ("", 1, "expected a name or a value, but it ends here"),
    ("   ", 1, "ends here"),
    ("val/loss < ", 11, "expected a name or a value, but it ends here"),
    ("val/loss", 9, "expected a comparison (== != < <= > >= in)"),
    ("val/loss = 3", 10, "write =="),
    ("a == 1 && b == 1", 8, "'and' and 'or'"),
    ("!a == 1", 1, "'not'"),
    ("a and", 3, "not 'and'"),
    ("a == and", 6, "not 'and'"),
    ("x == 'abc", 6, "no closing quote"),
    ("`abc == 1", 1, "no closing backtick"),
    ("10x == 3", 1, "backticks"),
    ("created > 2026-11-01", 11, "quotes"),
    ("a $ 3", 3, "'$' has no meaning here"),
    ("a == 1 b == 2", 8, "expected 'and', 'or' or the end, not 'b'"),
    ("(a == 1", 8, "expected ')', but it ends here"),
    ("a == 1)", 7, "not ')'"),
    ("a in ()", 7, "expected a value"),
    ("a in 3", 6, "in parentheses"),
    ("3 in (1, 2)", 1, "put a name before"),
    ("a in (1, null)", 10, "null cannot be in a list"),
    ("0.1 < x < 3", 9, "0.1 < x and x < 0.3"),
    ("x is null", 3, "== null"),
    ("a < null", 3, "null has no order"),
    ("config.a < true", 10, "no order"),
    ("a == b", 6, "names are compared with values"),
    ("status == completed", 11, "'completed'"),
    ("1 == 1", 1, "must be a name"),
    ("a == nan", 6, "nan equals nothing"),
    ("step == 'x'", 9, "step is a number"),
    ("name == 1", 9, "text in quotes"),
    ("created > 1", 11, "'2026-11-01'"),
    ("created > 'yesterday'", 11, "this is not a time"),
    ("created > '2026-13'", 11, "this is not a time"),
    ("status == 'done'", 11, "one of 'running', 'completed', 'failed', 'interrupted'"),
    ("status in ('lost')", 12, "lost is a state"),
    ("tags == 1", 9, "write 'tag' in tags"),
    ("tags == 'a'", 9, "did you mean 'a' in tags?"),
    ("tags in ('a')", 10, "did you mean 'a' in tags?"),
    ("'' in val/loss", 1, "a text in quotes"),
    ("a < true", 3, "no order"),
    ("config.`a == 1", 8, "no closing backtick"),
    ("config.`a`b == 1", 11, "not 'b'"),
    ("config.`a`. == 1", 11, "'.' has no meaning"),
    ("metric.a.`b` == 1", 10, "expected a comparison"),
    ("a in tags", 1, "in quotes: 'a'"),
    ("3 in tags", 1, "a text in quotes"),
    ("'' in tags", 1, "a text in quotes"),
    ("'a' in step", 8, "not a text"),
    ("avg(x) > 1", 1, "last, first, min, max, count"),
    ("min(config.lr) > 1", 5, "takes a metric"),
    ("min(step) > 1", 5, "min(metric.step)"),
    ("run.foo == 1", 1, "no field 'foo'"),
    ("run.statsu == 'x'", 1, "status"),
    ("config. == 1", 1, "put a name after"),
    (r"id == '\q'", 7, r"\q has no meaning"),
    ("a == 1 and\n  b = 2", 5, "line 2"),
    ("a == 1;drop table run", 7, "';' has no meaning"),
    ("a == '\ud800'", 6, "surrogate"),
    ("損失 == 'x", 7, "closing quote"),
    ("not " * 60 + "a == 1", 1, "nested deeper than 50"),
    ("a in (" + "1, " * 500 + "1)", 1, "at most 400"),
    (" and ".join(f"m{n} == 1" for n in range(60)), 1, "at most 40"),
]


@pytest.mark.parametrize(("text", "column", "message"), MISTAKES)
def test_a_mistake_is_pointed_at(text, column, message):
    with pytest.raises(SchemaValidationError) as caught:
        parse_where(text, "--where")
    head, line, mark = str(caught.value).split("\n")
    assert head.startswith("--where, ")
    assert f"column {column}:" in head
    assert message in head
    assert set(mark.strip()) == {"^"}
    if text.isascii() and "\n" not in text and len(text) <= 100:
        assert line == f"  {text}"
        assert mark.index("^") == column + 1


def test_the_mark_stands_under_wide_characters():
    with pytest.raises(SchemaValidationError) as caught:
        parse_where("損失 == nan")
    assert str(caught.value).split("\n")[1:] == ["  損失 == nan", " " * 10 + "^^^"]


def test_long_expressions_are_shown_around_the_mistake():
    text = "a == 1 and " * 500 + "b ~ 2" + " and c == 3" * 500
    with pytest.raises(SchemaValidationError) as caught:
        parse_where(text)
    head, line, mark = str(caught.value).split("\n")
    assert "column 5503" in head
    assert len(line) < 140
    assert line[mark.index("^")] == "~"


@pytest.mark.parametrize("text", [None, 3, b"a == 1", ["a == 1"]])
def test_only_a_text_is_an_expression(text):
    with pytest.raises(SchemaValidationError, match="where must be a str"):
        parse_where(text)


def test_what_is_too_long_is_refused_before_it_is_read():
    with pytest.raises(SchemaValidationError, match="20001 characters"):
        parse_where("(" * 20_001)


def test_ten_thousand_parentheses_are_no_matter():
    assert parse_where("(" * 9_000 + "x == 1" + ")" * 9_000) == X


@pytest.mark.parametrize(
    ("text", "column", "message"),
    [
        ("", 1, "expected a name"),
        ("-", 1, "expected a name"),
        ("tags", 1, "by their tags"),
        ("-x desc", 4, "write - before the name or desc after it"),
        ("x y", 3, "expected the end"),
        ("1", 1, "expected a name"),
        ("run.foo", 1, "no field"),
        ("- avg(x)", 3, "unknown function avg"),
    ],
)
def test_a_mistake_in_an_order_is_pointed_at(text, column, message):
    with pytest.raises(SchemaValidationError, match=r"^order_by, column") as caught:
        parse_order(text)
    assert f"column {column}:" in str(caught.value)
    assert message in str(caught.value)


WORDS = st.sampled_from(
    "and or not in ( ) [ ] , == != < <= > >= = 'a' \"b\" ' ` `a b` x val/loss config.lr run.x tags"
    " name created 1 -2.5 3e-4 nan inf true null min max( count( \\ . - + $ é 日 \n \x00".split(" ")
)


@given(st.one_of(st.lists(WORDS, max_size=12).map(" ".join), st.text(max_size=30)))
def test_any_text_is_read_or_refused_with_a_place(text):
    for parse in (parse_where, parse_order):
        try:
            parse(text)
        except SchemaValidationError as error:
            head, line, mark = str(error).split("\n")
            assert "column " in head
            assert line.startswith("  ")
            assert set(mark.strip()) == {"^"}


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


TRIAL = StoredTrial(
    "s1",
    4,
    JsonObject({"lr": 0.01, "optimizer": "adam", "model": {"layers": 3}, "weight decay": 0.1}),
    JsonObject({"rung": 1, "budget": 9, "source": "halving"}),
    "suspended",
    token=2,
    failures=1,
    worker=JsonObject({"host": "node7|boot|pid", "pid": 3, "started": ""}),
    claimed_at="2026-11-28T10:00:00.000000Z",
    run_id="abcd",
    values=(0.5, 0.1),
)


@pytest.mark.parametrize(
    ("where", "fits"),
    [
        ("lr < 0.1", True),
        ("param.lr < 0.001", False),
        ("config.lr == 0.01", True),
        ("param.lr == 0.01 and failures == 0", False),
        ("optimizer in ('adam', 'sgd')", True),
        ("optimizer != 'adam'", False),
        ("'da' in optimizer", True),
        ("model.layers >= 3", True),
        ("`weight decay` > 0.05", True),
        ("param.`weight decay` > 0.5", False),
        ("momentum > 0", False),
        ("momentum == null", True),
        ("state == 'suspended'", True),
        ("not (state == 'waiting')", True),
        ("number in (1, 4)", True),
        ("rung == 1 and budget == 9", True),
        ("origin.source == 'halving'", True),
        ("origin.source == 'random'", False),
        ("token == 2 and losses == 0", True),
        ("value > 0.4", True),
        ("worker == 'node7'", True),
        ("run == 'abcd'", True),
        ("claimed >= '2026-11-28' and settled == null", True),
        ("trial.number == 4", True),
        ("param.number == 4", False),
        ("lr == 'adam'", False),
        ("lr != 'adam'", True),
    ],
)
def test_names_are_parameters_and_fields(where: str, fits: bool) -> None:
    assert compile_trial_where(where)(TRIAL) is fits


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("lr <", "expected"),
        ("state == 'done'", "state must be one of 'waiting', 'running'"),
        ("number == 'four'", "number is a number"),
        ("trial.lr == 1", "a trial has no field 'lr'"),
        ("min(value) < 1", "a trial has no min"),
        ("claimed > 'soon'", "this is not a time"),
        ("lr = 0.1", "to compare, write =="),
    ],
)
def test_a_mistake_is_shown_at_its_place(where: str, message: str) -> None:
    with pytest.raises(SchemaValidationError, match=message) as caught:
        compile_trial_where(where)
    assert str(caught.value).startswith("where, column ")
    assert "^" in str(caught.value)


def test_values_that_are_not_finite_are_none() -> None:
    import msgspec

    broken = msgspec.structs.replace(TRIAL, values=(float("nan"),))
    assert compile_trial_where("value == null")(broken)
    assert not compile_trial_where("value < 1")(broken)
