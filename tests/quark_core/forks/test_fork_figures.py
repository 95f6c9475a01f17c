"""What the store knows of a fork's metrics without reading them is what reading them gives."""

import math

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from stores import Store, Writer
from tiers import count_examples

import quark
import quark_backends.store.upkeep.compaction as compaction
from quark_backends.store.reading.reader import StoreReader
from quark_backends.store.writing import metrics
from quark_core.search.fallback import summarize_by_reading
from quark_core.system.process import current_process

VALUES = st.one_of(st.floats(-100, 100), st.just(math.nan), st.just(math.inf), st.just(-math.inf))


@st.composite
def parents(draw):
    """Attempts of ranks of a parent: batches of points, whose steps mostly rise."""
    attempts = []
    for _ in range(draw(st.integers(1, 3))):
        from_step = draw(st.one_of(st.none(), st.integers(0, 60))) if attempts else None
        ranks = []
        for _ in range(draw(st.integers(1, 2))):
            start = draw(st.integers(0, 40)) if from_step is None else from_step
            count = draw(st.sampled_from([3, 400, 300]))
            values = draw(st.lists(VALUES, min_size=1, max_size=7))
            slip = draw(st.integers(0, 9))
            ranks.append(
                [
                    (
                        key,
                        values[(n * step_by + n) % len(values)] + n % 5,
                        start + n // 4 - slip * (n % 50 == 49),
                    )
                    for n in range(count)
                    for key, step_by in (("a", 1), ("b", 3))
                    if key == "a" or n % 3 == 0
                ]
            )
        attempts.append((from_step, ranks))
    return attempts


def repeat_step(step):
    return [("a", 0.0, step), ("b", 0.0, step), ("a", 1.0, step), ("a", 2.0, step)]


def start_fork(store, parent, step):
    writer = Writer(store, 0)
    data = {
        "project": {"id": "p0", "name": "project", "root_path": str(store.storage_dir)},
        "run": {
            "name": None, "notes": None, "parent_run_id": parent, "lineage_root_run_id": parent,
            "run_path": str(store.layout.run_path(store.run_id)), "git_commit": None,
            "strict_mode": False, "tags": [],
        },
        "process": msgspec.to_builtins(current_process()),
        "fork": {"run_id": parent, "step": step},
    }  # fmt: skip
    writer.lifecycle("start", data)
    return writer


def fill(store, attempts):
    for from_step, ranks in attempts:
        leader = store.start(from_step=from_step)
        for rank, points in enumerate(ranks):
            writer = leader if rank == 0 else Writer(store, store.attempt, rank)
            for begin in range(0, len(points), 50):
                writer.log(*[(k, v, max(s, 0)) for k, v, s in points[begin : begin + 50]])


def describe(summary):
    return {
        "newest": summary.newest_step,
        **{
            key: (m.count, m.non_finite, m.first, m.last, m.low, m.high, m.last_step)
            for key, m in summary.metrics.items()
        },
    }


@settings(max_examples=count_examples(200), deadline=None)
@given(
    attempts=parents(),
    steps=st.tuples(st.integers(60, 150), st.integers(0, 150)),
    compacts=st.booleans(),
    own=st.lists(st.tuples(st.sampled_from("ab"), VALUES, st.integers(0, 200)), max_size=9),
)
@example(  # the second rank of the third attempt goes beyond all steps of earlier attempts at once
    attempts=[
        (None, [repeat_step(1)]),
        (None, [repeat_step(0)]),
        (None, [repeat_step(0), repeat_step(2)]),
    ],
    steps=(60, 0),
    compacts=False,
    own=[],
)
def test_figures_of_forks_are_those_of_their_curves(
    tmp_path_factory, attempts, steps, compacts, own
):
    folder = tmp_path_factory.mktemp("store")
    store = Store(folder, "parent", begins=False)
    child, grandchild = Store(folder, "child", begins=False), Store(folder, "last", begins=False)
    try:
        compaction.CHUNK_ROWS, whole = 64, compaction.CHUNK_ROWS
        # Figures are made again at each batch that repeats steps, and not now and then.
        metrics._SHARE, share = 0, metrics._SHARE
        try:
            fill(store, attempts)
            if compacts:
                store.compact()
        finally:
            compaction.CHUNK_ROWS, metrics._SHARE = whole, share
        writer = start_fork(child, "parent", steps[0])
        if own:
            writer.log(*own)
        start_fork(grandchild, "child", steps[1])
        finder = StoreReader(store.connect_reader)
        try:
            for run_id in ("parent", "child", "last"):
                expected = describe(summarize_by_reading(store.reader, run_id))
                assert describe(finder.summarize(run_id)) == expected
        finally:
            finder.close()
    finally:
        for one in (store, child, grandchild):
            one.close()


# What `start_run(fork_from=…)` takes, refuses, and says of the new run.


@pytest.fixture
def parent(tmp_path):
    with quark.start_run(
        project="p", storage_dir=tmp_path, config={"lr": 0.1, "layers": [1, 2]}
    ) as session:
        quark.MetricsLogger(session).log("loss", 1.0, step=0)
    return session


@pytest.mark.parametrize("given", ["id", "beginning", "session", "context", "list"])
def test_the_run_may_be_given_by_id_session_or_context(tmp_path, parent, given):
    run_id = parent.run_id
    run = {"beginning": run_id[:6], "session": parent, "context": parent.context}.get(given, run_id)
    fork = [run, 0] if given == "list" else (run, 0)
    with quark.start_run(project="q", storage_dir=tmp_path, fork_from=fork) as child:
        record = child.reload().run
    assert (record.parent_run_id, record.fork_step) == (run_id, 0)
    assert record.lineage_root_run_id == run_id
    assert record.project_name == "q"


def test_a_fork_that_is_given_no_configuration_has_its_parents(tmp_path, parent):
    with quark.start_run(project="p", storage_dir=tmp_path, fork_from=(parent, 0)) as child:
        assert dict(child.config) == {"lr": 0.1, "layers": [1, 2]}
    with quark.start_run(
        project="p", storage_dir=tmp_path, fork_from=(parent, 0), objective="loss", mode="min"
    ) as child:
        assert dict(child.config)["lr"] == 0.1
        assert "loss" in str(dict(child.config))
    with quark.start_run(
        project="p", storage_dir=tmp_path, fork_from=(parent, 0), config={"lr": 0.2}
    ) as child:
        assert dict(child.config) == {"lr": 0.2}
    found = quark.search_runs(storage_dir=tmp_path, where="config.lr == 0.1")
    assert len(found) == 3


def test_a_step_beyond_the_parents_end_takes_all_of_it(tmp_path, parent):
    for step in (1, 2**62, 2**63 - 1):
        with quark.start_run(project="p", storage_dir=tmp_path, fork_from=(parent, step)) as child:
            assert len(quark.MetricsLogger(child).read()) == 1
        (found,) = [r for r in quark.search_runs(storage_dir=tmp_path) if r.run_id == child.run_id]
        assert found.metrics["loss"].count == 1


@pytest.mark.parametrize(
    ("fork", "message"),
    [
        ("abcd", r"fork_from must be a pair"),
        ("abcd?_step=12", r"fork_from must be a pair .*\('abcd', 12\) here"),
        (("abcd",), r"fork_from must be a pair"),
        (("abcd", 1, 2), r"fork_from must be a pair"),
        (("abcd", None), r"its step must not be None"),
        (("abcd", -1), r"fork_from\[1\] must not be negative"),
        (("../x", 1), r"fork_from\[0\] may contain"),
        ((None, 1), r"its run must be an ID, a session"),
        ((7, 1), r"its run must be an ID, a session"),
        (7, r"fork_from must be a pair"),
    ],
)
def test_what_is_no_fork_is_refused_by_name(tmp_path, fork, message):
    with pytest.raises(quark.SchemaValidationError, match=message):
        quark.start_run(project="p", storage_dir=tmp_path, fork_from=fork)
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_is_not_there_cannot_be_forked(tmp_path, parent):
    with pytest.raises(quark.RunNotFoundError, match=r"^fork_from nope: .*no run with this ID"):
        quark.start_run(project="p", storage_dir=tmp_path, fork_from=("nope", 1))
    assert len(quark.search_runs(storage_dir=tmp_path)) == 1


def test_the_parent_may_be_said_again_and_no_other_one(tmp_path, parent):
    fork = (parent, 0)
    with quark.start_run(
        project="p", storage_dir=tmp_path, fork_from=fork, parent_run_id=parent.run_id
    ) as child:
        assert child.context.run.parent_run_id == parent.run_id
    with pytest.raises(quark.SchemaValidationError, match=r"parent_run_id .* name two runs"):
        quark.start_run(
            project="p", storage_dir=tmp_path, fork_from=fork, parent_run_id=child.run_id
        )


def test_a_run_that_keeps_nothing_may_be_started_as_a_fork(tmp_path, parent):
    with quark.start_run(
        project="p", storage_dir=tmp_path, fork_from=(parent, 0), backends="none"
    ) as child:
        quark.MetricsLogger(child).log("loss", 1.0, step=1)
        assert quark.MetricsLogger(child).read() in ((), [])
