"""Whatever a user passes is kept, or refused by name; the run always ends well."""

import enum
import warnings

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oddities import ODDITIES, is_tame
from tiers import count_examples

import quark

plain = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(st.characters(codec=None), max_size=300),
    st.binary(max_size=5),
    st.datetimes(),
    st.decimals(),
)
anything = st.one_of(
    st.sampled_from([value for value in ODDITIES if is_tame(value)]),
    st.recursive(
        plain,
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.dictionaries(st.one_of(st.text(max_size=5), st.integers(), st.floats()), inner),
        ),
        max_leaves=8,
    ),
)


def optional(names, **likely):
    """Some of these arguments, each anything or something likely."""
    return st.fixed_dictionaries(
        {}, optional={name: st.one_of(likely.get(name, st.none()), anything) for name in names}
    )


steps, names = st.integers(0, 100), st.sampled_from(["m", "train/loss", "mean@1"])
log_calls = st.tuples(
    st.just("log"),
    st.tuples(st.one_of(names, anything), st.one_of(st.floats(), anything)),
    optional(
        ["step", "epoch", "namespace", "description", "metadata", "timestamp"],
        step=steps,
        description=st.text(st.characters(codec=None), max_size=10),
    ),
)
rows = st.dictionaries(st.one_of(names, st.text(max_size=5)), st.one_of(st.floats(), anything))
many_calls = st.tuples(
    st.just("log_many"),
    st.tuples(st.one_of(rows, anything)),
    optional(["step", "epoch", "namespace", "timestamp"], step=steps),
)
event_calls = st.tuples(
    st.just("event"),
    st.tuples(st.one_of(st.sampled_from(["saved", "a b"]), anything)),
    optional(
        ["severity", "step", "epoch", "status", "payload", "timestamp"],
        status=st.text(st.characters(codec=None), max_size=10),
    ),
)
text_calls = st.tuples(
    st.just("add_log"),
    st.tuples(st.one_of(st.text(st.characters(codec=None), max_size=10), anything)),
    optional(["identifier", "step", "epoch", "status", "payload", "timestamp", "event_type"]),
)
calls = st.lists(st.one_of(log_calls, many_calls, event_calls, text_calls), max_size=6)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("any")


def call_all(root, listed):
    with warnings.catch_warnings(), quark.start_run(project="p", storage_dir=root) as session:
        warnings.simplefilter("ignore")
        metrics, events = quark.MetricsLogger(session), quark.EventLogger(session)
        functions = {
            "log": metrics.log,
            "log_many": metrics.log_many,
            "event": events.log,
            "add_log": session.add_log,
        }
        kept = {"log": 0, "event": 0}
        for name, arguments, named in listed:
            try:
                functions[name](*arguments, **named)
            except quark.SchemaValidationError:
                continue
            if name in kept:
                kept[name] += 1
        metrics.log("last", 1.0, step=0)
    assert session.report_delivery().complete
    assert session.report_delivery().lanes[0].dropped == 0
    found = metrics.read(include_non_finite=True)
    assert len(found) >= kept["log"] + 1
    assert found[-1].metric_key == "last"
    assert quark.open_run(session.run_id, root).status == "completed"


@pytest.mark.long
@settings(max_examples=count_examples(50), deadline=None, suppress_health_check=list(HealthCheck))
@given(listed=calls)
def test_any_call_is_kept_or_refused_and_the_run_ends_well(root, listed):
    call_all(root, listed)


CALLS = {
    "log": (["m", 1.0], ["step", "epoch", "namespace", "description", "metadata", "timestamp"]),
    "log_many": ([{"m": 1.0}], ["step", "epoch", "namespace", "timestamp"]),
    "event": (["saved"], ["severity", "step", "epoch", "status", "payload", "timestamp"]),
    "add_log": (["x"], ["identifier", "step", "epoch", "status", "payload", "event_type"]),
}


@pytest.mark.sampled
@pytest.mark.parametrize("name", CALLS)
def test_every_oddity_in_every_place_is_kept_or_refused(tmp_path, name):
    good, keywords = CALLS[name]
    wrong = []
    with warnings.catch_warnings(), quark.start_run(project="p", storage_dir=tmp_path) as session:
        warnings.simplefilter("ignore")
        metrics, events = quark.MetricsLogger(session), quark.EventLogger(session)
        functions = {
            "log": metrics.log,
            "log_many": metrics.log_many,
            "event": events.log,
            "add_log": session.add_log,
        }
        for index, value in enumerate(ODDITIES):
            tries = [(good, {"step": 0, keyword: value}) for keyword in keywords]
            tries += [([*good[:i], value, *good[i + 1 :]], {"step": 0}) for i in range(len(good))]
            if name == "log_many":
                tries.append(([{"a": 1.0, "b": value}], {"step": 0}))
            for arguments, named in tries:
                try:
                    functions[name](*arguments, **named)
                except quark.SchemaValidationError:
                    continue
                except Exception as error:
                    place = list(named)[-1] if arguments is good else "argument"
                    wrong.append(f"{place}: oddity {index} {type(value).__name__}: {error!r:.80}")
    assert not wrong, "\n".join(wrong)
    assert session.report_delivery().complete


class Split(enum.StrEnum):
    TRAIN = "train"


@pytest.mark.parametrize("text", ["a\ud800b", np.str_("train"), Split.TRAIN], ids=ascii)
def test_an_odd_text_anywhere_is_kept_or_refused_and_costs_no_other_record(tmp_path, text):
    with warnings.catch_warnings(), quark.start_run(project="p", storage_dir=tmp_path) as session:
        warnings.simplefilter("ignore")
        metrics, events = quark.MetricsLogger(session), quark.EventLogger(session)
        listed = [
            lambda: metrics.log(text, 1.0, step=0),
            lambda: metrics.log("m", 1.0, step=0, namespace=text),
            lambda: metrics.log("m", 1.0, step=0, description=text),
            lambda: metrics.log("m", 1.0, step=0, metadata={text: text}),
            lambda: metrics.log_many({text: 1.0}, step=0),
            lambda: events.log(text),
            lambda: events.log("saved", status=text),
            lambda: events.log("saved", payload={"x": text}),
            lambda: session.add_log(text, status=text),
            lambda: session.add_tag(text),
        ]
        lost, dropped = [], 0
        for index, call in enumerate(listed):
            metrics.log("other", 1.0, step=0)
            events.log("other")
            try:
                call()
            except quark.SchemaValidationError:
                continue
            session.flush()
            before, dropped = dropped, session.report_delivery().lanes[0].dropped
            if dropped > before:
                lost.append((index, dropped - before))
    assert lost == []
    assert session.report_delivery().complete
