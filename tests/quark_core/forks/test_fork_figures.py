"""What the store knows of a fork's metrics without reading them is what reading them gives."""

import math

import msgspec
from hypothesis import example, given, settings
from hypothesis import strategies as st
from stores import Store, Writer
from tiers import count_examples

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
