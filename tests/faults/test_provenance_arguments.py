"""Whatever is said of where a run belongs and what it was made of is kept, or refused."""

import warnings

import pytest
from oddities import ODDITIES

import quark
from quark_core.records.query import Query

TEXTS = ["\x1b[31mred\x07", "a\0b", "../../etc/passwd", "a//b", " ", "\ud800", "x" * 100_000]
VALUES = [*ODDITIES, *TEXTS, ("x", 0), {"\x1b": 1}, {"": 1}, [[]], range(3)]


MOST_CHARACTERS = 1_000


def iterate(values):
    for _ in zip(range(5), values, strict=False):
        pass


SESSION_CALLS = {
    "annotate": lambda s, m, v: s.annotate(v),
    "annotate value": lambda s, m, v: s.annotate(value=v),
    "update_config": lambda s, m, v: s.update_config(v),
    "update_config value": lambda s, m, v: s.update_config(value=v),
    "add_to_group": lambda s, m, v: s.add_to_group(v),
    "remove_from_group": lambda s, m, v: s.remove_from_group(v),
    "timer": lambda s, m, v: m.timer(v).__enter__(),
    "aggregate": lambda s, m, v: m.aggregate(v, 1.0),
    "aggregate value": lambda s, m, v: m.aggregate("v", v),
    "aggregate keep": lambda s, m, v: m.aggregate("kept", 1.0, keep=v),
    "aggregate step": lambda s, m, v: m.aggregate("stepped", 1.0, step=v),
    "progress": lambda s, m, v: iterate(m.progress(v)),
    "progress total": lambda s, m, v: iterate(m.progress([1, 2], total=v)),
    "progress start": lambda s, m, v: iterate(m.progress([1, 2], total=5, start=v)),
    "advance": lambda s, m, v: m.progress(total=10).advance(v),
    "reach": lambda s, m, v: m.progress(total=10).reach(v),
    "fingerprint": lambda s, m, v: s.fingerprint(v, 1),
    "fingerprint value": lambda s, m, v: s.fingerprint("v", v),
    "fingerprint step": lambda s, m, v: s.fingerprint("v", 1, step=v),
    "fingerprint level": lambda s, m, v: s.fingerprint("v", 1, level=v),
    "fingerprint_data": lambda s, m, v: s.fingerprint_data(v, [1]),
    "fingerprint_data source": lambda s, m, v: s.fingerprint_data("v", v),
    "fingerprint_data level": lambda s, m, v: s.fingerprint_data("v", [1], level=v),
    "watch_data": lambda s, m, v: iterate(quark.watch_data(v)),
    "watch_data name": lambda s, m, v: iterate(quark.watch_data([1], v)),
    "watch_data ids": lambda s, m, v: iterate(quark.watch_data([1], "n", sample_ids=v)),
    "trace": lambda s, m, v: quark.trace(v),
    "trace target": lambda s, m, v: quark.trace("x")(v),
    "trace output": lambda s, m, v: quark.trace("x", output=v),
    "trace init": lambda s, m, v: quark.trace("x", init=v),
    "trace inspect": lambda s, m, v: quark.trace("x", output=True, inspect=v),
    "tracked": lambda s, m, v: quark.tracked(v),
    "flush level": lambda s, m, v: s.flush(v),
    "ranks by": lambda s, m, v: m.read_across_ranks("m", by=v),
    "events severity": lambda s, m, v: quark.EventLogger(s).read(severity=v),
    "events type": lambda s, m, v: quark.EventLogger(s).read(event_type=v),
    "telemetry boundary": lambda s, m, v: quark.SystemTelemetry(s).read(boundary=v),
}


def is_own(error):
    """Whether an object's own method has raised, where it was asked to be gone through."""
    return "planted" in str(error) or (isinstance(error, TypeError) and "iterable" in str(error))


@pytest.mark.sampled
@pytest.mark.parametrize("name", SESSION_CALLS)
def test_every_oddity_is_kept_or_refused_and_costs_no_other_record(tmp_path, name):
    wrong = []
    with warnings.catch_warnings(), quark.start_run(project="p", storage_dir=tmp_path) as session:
        warnings.simplefilter("ignore")
        metrics = quark.MetricsLogger(session)
        for number, value in enumerate(VALUES):
            metrics.log("m", float(number), step=number)
            session.fingerprint("other", number, step=number)
            try:
                SESSION_CALLS[name](session, metrics, value)
            except quark.SchemaValidationError as error:
                if set("\x1b\x07\0") & set(str(error)) or len(str(error)) > MOST_CHARACTERS:
                    wrong.append(f"oddity {number}: {str(error)!a:.200}")
            except Exception as error:
                if not (name in ("progress", "watch_data") or is_own(error)):
                    wrong.append(f"oddity {number} {type(value).__name__}: {error!r:.80}")
        steps = [record.value for record in metrics.read(metric_key="m")]
    assert not wrong, "\n".join(wrong)
    assert steps == list(map(float, range(len(VALUES))))
    report = session.report_delivery()
    assert report.complete
    assert report.lanes[0].dropped == 0
    kept = quark.open_run(session.run_id, tmp_path)
    found = kept.open_run.read("fingerprint", Query()).to_records()
    assert sum(record.key == "other" for record in found) == len(VALUES)


START_CALLS = ("group", "version", "if_exists", "fork_from")
STORE_CALLS = {
    "best_run": lambda root, run, v: quark.best_run(v, storage_dir=root),
    "best_run mode": lambda root, run, v: quark.best_run("m", mode=v, storage_dir=root),
    "edit name": lambda root, run, v: quark.edit_run(run, name=v, storage_dir=root),
    "start capture": lambda root, run, v: quark.start_run(
        project="p", storage_dir=root, capture=v
    ).end_run(),
    "similar": lambda root, run, v: quark.find_similar_runs(v, storage_dir=root),
    "similar by": lambda root, run, v: quark.find_similar_runs(run, by=v, storage_dir=root),
    "explain": lambda root, run, v: quark.explain_change(v, run, storage_dir=root),
    "explain other": lambda root, run, v: quark.explain_change(run, v, storage_dir=root),
    "explain metric": lambda root, run, v: quark.explain_change(
        run, run, metric=v, storage_dir=root
    ),
    "project": lambda root, run, v: quark.project(v, storage_dir=root).load(),
    "description": lambda root, run, v: quark.project("p", storage_dir=root).update(description=v),
    "fields": lambda root, run, v: quark.project("p", storage_dir=root).update(fields=v),
    "tags": lambda root, run, v: quark.project("p", storage_dir=root).update(tags=v),
    "group": lambda root, run, v: quark.project("p", storage_dir=root).group(v),
    "sources": lambda root, run, v: quark.read_sources(v, root),
    "sources attempt": lambda root, run, v: quark.read_sources(run, root, attempt=v),
    "traces": lambda root, run, v: quark.trace_statistics(v, storage_dir=root),
    "traces name": lambda root, run, v: quark.trace_statistics("p", v, storage_dir=root),
    "traces metric": lambda root, run, v: quark.trace_statistics("p", metric=v, storage_dir=root),
}


def log_run(root):
    with quark.start_run(project="p", storage_dir=root) as session:
        quark.MetricsLogger(session).log("m", 1.0, step=0)
    return session.run_id


@pytest.mark.sampled
@pytest.mark.parametrize("name", STORE_CALLS)
def test_every_oddity_that_is_asked_for_gets_an_answer_or_an_error_of_quark(tmp_path, name):
    run_id, wrong = log_run(tmp_path), []
    for number, value in enumerate(VALUES):
        try:
            STORE_CALLS[name](tmp_path, run_id, value)
        except quark.QuarkError:
            continue
        except Exception as error:
            if not is_own(error):
                wrong.append(f"oddity {number} {type(value).__name__}: {error!r:.80}")
    assert not wrong, "\n".join(wrong)
    assert quark.open_run(run_id, tmp_path).status == "completed"


def test_words_of_a_configuration_are_words():
    calls = (
        lambda v: quark.MetricTargetSpec("m", 1.0, v),
        lambda v: quark.ComparisonEngineConfig(pairing=v),
        lambda v: quark.ComparisonEngineConfig(directions={"m": v}),
        lambda v: quark.AnalyzerEngineConfig(mode=v),
    )
    for call in calls:
        for value in VALUES:
            with pytest.raises(quark.SchemaValidationError):
                call(value)


@pytest.mark.long
@pytest.mark.parametrize("argument", START_CALLS)
def test_every_oddity_that_a_run_is_started_with_is_kept_or_refused(tmp_path, argument):
    wrong = []
    for number, value in enumerate(VALUES):
        try:
            quark.start_run(project="p", storage_dir=tmp_path, **{argument: value}).end_run()
        except quark.QuarkError:
            continue
        except Exception as error:
            if not is_own(error):
                wrong.append(f"oddity {number} {type(value).__name__}: {error!r:.80}")
    assert not wrong, "\n".join(wrong)
