"""ParameterDiagnostics as a writer: schedule, reading, misuse, failures, copies of models."""

import copy
import gc
import pickle
import subprocess
import sys
import weakref

import numpy as np
import pytest
import torch
from parameter_scenes import CopiedParameters, make_classifier, run_backward
from torch import nn

import quark
from quark import EventLogger, ParameterDiagnostics, ParameterDiagnosticsConfig
from quark_core.errors import InvalidRunStateError, SchemaValidationError
from quark_torch.parameters import diagnostics as module
from quark_torch.schedule import HookScheduleConfig

ALL = ("value", "gradient", "update")


@pytest.fixture
def scene(observe):
    model = make_classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, observe(model, optimizer)


def take_steps(scene, steps, *, run=None):
    model, optimizer, diagnostics = scene
    for step in steps:
        run_backward(model)
        optimizer.step()
        yield diagnostics.snapshot(step, epoch=step // 2)


def test_off_schedule_nothing_is_returned(observe):
    diagnostics = observe(make_classifier(), every=5)
    assert [bool(diagnostics.snapshot(step)[0]) for step in range(11)] == [
        step % 5 == 0 for step in range(11)
    ]
    assert diagnostics.snapshot(7, metadata={"never": object()}) == ((), ())


def test_what_is_read_equals_what_snapshot_returned(observe):
    model = make_classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    diagnostics = observe(model, optimizer, capture_distributions=True, distribution_types=ALL)
    taken = list(take_steps((model, optimizer, diagnostics), range(4)))
    summaries = tuple(record for pair in taken for record in pair[0])
    distributions = tuple(record for pair in taken for record in pair[1])
    assert len(summaries) == 32
    assert len(distributions) == 96
    assert diagnostics.read() == (summaries, distributions)
    assert diagnostics.read_summaries(step_min=1, step_max=2) == summaries[8:24]
    assert diagnostics.read_summaries(epoch=1, limit=3) == summaries[-3:]
    assert diagnostics.read_summaries(parameter_name="4.bias", latest_only=True) == (summaries[-3],)
    assert diagnostics.read_summaries(latest_only=True) == summaries[-8:]
    assert diagnostics.read_summaries(latest_only=True, step_max=1) == summaries[8:16]
    assert diagnostics.read_summaries(latest_only=True, limit=2) == summaries[-2:]
    assert diagnostics.read_summaries(latest_only=True, step=99) == ()
    chosen = diagnostics.read_summaries(module_type="Conv2d", parameter_role="bias")
    assert [record.parameter_name for record in chosen] == ["0.bias"] * 4
    assert diagnostics.read_distributions(latest_only=True) == distributions[-24:]
    updates = diagnostics.read_distributions(
        module_name="4", parameter_name="4.weight", distribution_type="update", latest_only=True
    )
    assert updates == tuple(
        record
        for record in distributions[-24:]
        if (record.parameter_name, record.distribution_type) == ("4.weight", "update")
    )
    assert diagnostics.read_distributions(module_name="absent") == ()


def test_flush_returns_what_came_since_the_last(observe):
    diagnostics = observe(make_classifier(), capture_distributions=True)
    first = diagnostics.snapshot(0)
    assert diagnostics.flush() == first
    assert diagnostics.flush() == ((), ())
    bounded = observe(make_classifier(), batch_size=10)
    for step in range(3):
        last = bounded.snapshot(step)[0]
    # The 24 records have filled 10 twice.
    assert bounded.flush() == (last[-4:], ())


def test_close(scene):
    _, optimizer, diagnostics = scene
    list(take_steps(scene, range(2)))
    assert diagnostics.kept_bytes > 0
    assert len(optimizer._optimizer_step_pre_hooks) == 1
    with diagnostics as entered:
        assert entered is diagnostics
    diagnostics.close()
    assert diagnostics.kept_bytes == 0
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    optimizer.step()
    with pytest.raises(InvalidRunStateError, match="this ParameterDiagnostics is closed"):
        diagnostics.snapshot(2)
    assert len(diagnostics.read_summaries()) == 16


def test_steps_after_the_end_of_the_run_leave_the_optimizer(tmp_path):
    model = make_classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with quark.start_run(project="p", storage_dir=tmp_path) as session:
        diagnostics = ParameterDiagnostics(session, model, optimizer)
    with pytest.raises(InvalidRunStateError):
        diagnostics.snapshot(0)
    optimizer.step()
    assert not optimizer._optimizer_step_pre_hooks
    assert diagnostics.kept_bytes == 0


def test_steps_after_the_end_of_the_run_call_the_hooks_of_others(tmp_path):
    """PyTorch goes through the hooks meanwhile, and would raise into the step if one went."""
    model = make_classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with quark.start_run(project="p", storage_dir=tmp_path) as session:
        diagnostics = ParameterDiagnostics(session, model, optimizer)
    called = []
    optimizer.register_step_pre_hook(lambda *_: called.append("before"))
    optimizer.register_step_post_hook(lambda *_: called.append("after"))
    for _ in range(2):
        optimizer.step()
    assert called == ["before", "after"] * 2
    assert len(optimizer._optimizer_step_pre_hooks) == 1
    diagnostics.close()
    assert len(optimizer._optimizer_step_post_hooks) == 1


@pytest.mark.long
def test_a_forgotten_object_leaves_no_trace_in_the_optimizer(session):
    model = make_classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    diagnostics = ParameterDiagnostics(session, model, optimizer)
    run_backward(model)
    optimizer.step()
    gone = weakref.ref(diagnostics)
    del diagnostics
    gc.collect()
    assert gone() is None
    optimizer.step()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"schedule": 5}, "schedule must be a HookScheduleConfig"),
        ({"batch_size": 0}, "batch_size"),
        ({"batch_size": True}, "batch_size"),
        ({"capture_summaries": 1}, "capture_summaries"),
        ({"histogram_bins": 0}, "histogram_bins"),
        ({"histogram_bins": 5000}, "histogram_bins must be from 1 to 4096"),
        ({"max_histogram_values": -1}, "max_histogram_values"),
        ({"near_zero_epsilon": -1}, "near_zero_epsilon"),
        ({"near_zero_epsilon": float("nan")}, "near_zero_epsilon"),
        ({"near_zero_epsilon": "small"}, "near_zero_epsilon"),
        ({"distribution_types": "value"}, "distribution_types must be a tuple"),
        ({"distribution_types": ("values",)}, "'value', 'gradient', 'update', got 'values'"),
        ({"capture_distributions": True, "distribution_types": ()}, "distribution_types"),
        ({"include_parameter_patterns": ("(",)}, "include_parameter_patterns has .* '\\('"),
        ({"exclude_parameter_patterns": (3,)}, "exclude_parameter_patterns must be a tuple of str"),
        ({"include_parameter_patterns": "weight"}, "include_parameter_patterns must be a tuple"),
        ({"include_parameter_roles": ("kernel",)}, "include_parameter_roles"),
        ({"grad_scaler": 65536.0}, "grad_scaler"),
    ],
)
def test_a_bad_config(arguments, message):
    with pytest.raises(SchemaValidationError, match=message):
        ParameterDiagnosticsConfig(**arguments)


def test_numbers_of_other_types_become_plain_ones():
    config = ParameterDiagnosticsConfig(
        batch_size=np.int64(7), near_zero_epsilon=np.float32(0.5), distribution_types=["update"] * 2
    )
    assert (config.batch_size, config.near_zero_epsilon) == (7, 0.5)
    assert type(config.batch_size) is int
    assert config.distribution_types == ("update",)
    assert config == copy.deepcopy(config) == pickle.loads(pickle.dumps(config))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((nn.Linear(1, 1).parameters(),), "model must be a torch.nn.Module"),
        ((nn.Linear(1, 1), "adam"), "optimizer must be a torch.optim.Optimizer.*not str"),
        ((nn.Linear(1, 1), [None]), "optimizer must be .*not NoneType"),
    ],
)
def test_bad_arguments(session, arguments, message):
    with pytest.raises(SchemaValidationError, match=message):
        ParameterDiagnostics(session, *arguments)
    with pytest.raises(SchemaValidationError, match="session"):
        ParameterDiagnostics(None, nn.Linear(1, 1))
    with pytest.raises(SchemaValidationError, match="config"):
        ParameterDiagnostics(session, nn.Linear(1, 1), config=HookScheduleConfig())


@pytest.mark.parametrize("step", [-1, 1.5, None, True, "3", 2**63])
def test_bad_steps(scene, step):
    with pytest.raises(SchemaValidationError, match="step"):
        scene[2].snapshot(step)
    with pytest.raises(SchemaValidationError, match="epoch"):
        scene[2].snapshot(0, epoch=-1)
    with pytest.raises(SchemaValidationError, match="metadata"):
        scene[2].snapshot(0, metadata={"tensor": torch.ones(2)})
    assert scene[2].snapshot(np.int64(4))[0][0].step == 4


@pytest.mark.parametrize(
    "arguments",
    [
        {"latest_only": 1},
        {"limit": -1},
        {"step_min": "a"},
        {"parameter_name": 3},
        {"module_name": ("a",)},
    ],
)
def test_bad_filters(scene, arguments):
    (name,) = arguments
    with pytest.raises(SchemaValidationError, match=name):
        scene[2].read_summaries(**arguments)
    with pytest.raises(SchemaValidationError, match=name):
        scene[2].read_distributions(**arguments)
    with pytest.raises(SchemaValidationError, match="distribution_type must be one of"):
        scene[2].read_distributions(distribution_type="values")


def test_what_gives_nothing_is_told_of_once(observe, notices):
    model = make_classifier()
    foreign = torch.optim.Adam(nn.Linear(2, 2).parameters())
    diagnostics = observe(model, [foreign])
    assert [record.in_optimizer for record in diagnostics.snapshot(0)[0]] == [False] * 8
    diagnostics.snapshot(1)
    assert observe(nn.ReLU()).snapshot(0) == ((), ())
    assert observe(model, include_parameter_patterns=("absent",)).snapshot(0) == ((), ())
    never = HookScheduleConfig(every_n_steps=None)
    assert observe(model, schedule=never).snapshot(0) == ((), ())
    assert observe(model, capture_summaries=False).snapshot(0) == ((), ())
    told = notices()
    assert [event_type for event_type, _ in told] == [
        "optimizer_of_another_model",
        "model_without_parameters",
        "filter_matches_nothing",
        "schedule_never_fires",
        "nothing_captured",
    ]
    assert "Adam" in told[0][1]["message"]
    assert all(payload["component"] == "ParameterDiagnostics" for _, payload in told)


def test_the_callers_metadata_wins(observe):
    model = nn.Embedding(3, 3)
    model.other = model.weight
    record = observe(model).snapshot(0, metadata={"aliases": "mine", "more": [1]})[0][0]
    assert record.metadata == {"aliases": "mine", "more": [1]}


@pytest.mark.parametrize("strict", [False, True])
def test_failures_stay_inside_unless_strict(tmp_path, monkeypatch, strict):
    def fail(*_arguments, **_keywords):
        raise MemoryError("no room")

    model = make_classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with quark.start_run(project="p", storage_dir=tmp_path, strict_mode=strict) as session:
        diagnostics = ParameterDiagnostics(session, model, optimizer)
        run_backward(model)
        with monkeypatch.context() as patch:
            patch.setattr(torch, "_foreach_copy_", fail)
            before = CopiedParameters(model)
            if strict:
                with pytest.raises(MemoryError, match="no room"):
                    optimizer.step()
            else:
                optimizer.step()
                assert before.difference(model, "4.weight").norm() > 0
        assert diagnostics.kept_bytes == 0
        (record, *_), _ = diagnostics.snapshot(0)
        assert record.metadata == {"update_missing": "copy_failed"}
        assert record.value_norm > 0
        with monkeypatch.context() as patch:
            patch.setattr(module, "read_parameters", fail)
            if strict:
                with pytest.raises(MemoryError, match="no room"):
                    diagnostics.snapshot(1)
            else:
                assert diagnostics.snapshot(1) == ((), ())
                assert diagnostics.snapshot(2) == ((), ())
        optimizer.step()
        assert len(diagnostics.snapshot(3)[0]) == 8
        told = [
            (event.severity, event.step, event.payload["where"], event.payload["reason"])
            for event in EventLogger(session).read(event_type="instrumentation_failed")
        ]
        assert told == [
            ("error", None, "copy_failed", "MemoryError: no room"),
            ("error", 1, "snapshot_failed", "MemoryError: no room"),
        ]


def test_quark_alone_does_not_import_torch():
    code = "import sys, quark; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
