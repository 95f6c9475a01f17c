"""While a CUDA graph is captured nothing is measured, and that is told once."""

import pytest
import torch
from torch import nn

import quark
from quark import EventLogger, HookEngine, HookEngineConfig, ParameterDiagnostics


@pytest.fixture
def session(tmp_path):
    with quark.start_run(project="p", storage_dir=tmp_path) as opened:
        yield opened


def test_a_snapshot_while_capturing_does_nothing(session, monkeypatch):
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ParameterDiagnostics(session, model, optimizer) as diagnostics:
        with monkeypatch.context() as patch:
            # Only a GPU captures; what is asked there is all that differs.
            patch.setattr(torch.cuda, "is_available", lambda: True)
            patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
            for step in range(2):
                optimizer.step()
                assert diagnostics.snapshot(step) == ((), ())
        assert diagnostics.kept_bytes == 0
        assert len(EventLogger(session).read(event_type="cuda_graph_capture")) == 1
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        assert [r.update_norm > 0 for r in diagnostics.snapshot(2)[0]] == [True, True]


@pytest.mark.gpu
def test_layers_while_capturing(session):
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU()).cuda()
    values = torch.ones(2, 3, device="cuda")
    with torch.no_grad():
        model(values)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    config = HookEngineConfig(include_eval=True)
    with HookEngine(session, model, config=config) as hooks:
        with hooks.step(0), torch.no_grad(), torch.cuda.graph(graph):
            output = model(values)
        graph.replay()
        torch.testing.assert_close(output, model(values))
        assert hooks.read() == ()
    (event,) = EventLogger(session).read(event_type="probe_skipped")
    assert event.payload["reason"] == "cuda_graph_capture"


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_whole_captured_step(session):
    """Forward, backward and the optimizer's step in one graph: nothing is measured, all is told."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 1)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, capturable=True)
    values = torch.randn(8, 3, device="cuda")

    def train():
        optimizer.zero_grad(set_to_none=True)
        model(values).square().sum().backward()
        optimizer.step()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            train()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    optimizer.zero_grad(set_to_none=True)
    with (
        HookEngine(session, model) as hooks,
        ParameterDiagnostics(session, model, optimizer) as seen,
    ):
        with hooks.step(0), torch.cuda.graph(graph):
            train()
            assert seen.snapshot(0) == ((), ())
        before = model[0].weight.detach().clone()
        graph.replay()
        torch.cuda.synchronize()
        assert not torch.equal(before, model[0].weight)
        assert hooks.read() == ()
        summaries, _ = seen.snapshot(1)
        for record, parameter in zip(summaries, model.parameters(), strict=True):
            assert record.value_norm == pytest.approx(parameter.norm().item(), rel=1e-5)
            assert record.gradient_norm == pytest.approx(parameter.grad.norm().item(), rel=1e-5)
            assert record.update_norm is None
    events = EventLogger(session)
    assert len(events.read(event_type="cuda_graph_capture")) == 1
    assert len(events.read(event_type="probe_skipped")) == 1
