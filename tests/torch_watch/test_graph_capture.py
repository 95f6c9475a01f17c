"""While a CUDA graph is captured nothing is measured, and that is told once."""

import pytest
import torch
from torch import nn

import quark
from quark import EventLogger, HookEngine, ParameterDiagnostics

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


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


@needs_gpu
def test_layers_while_capturing(session):
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU()).cuda()
    values = torch.ones(2, 3, device="cuda")
    with torch.no_grad():
        model(values)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with HookEngine(session, model) as hooks:
        with hooks.step(0), torch.no_grad(), torch.cuda.graph(graph):
            output = model(values)
        graph.replay()
        torch.testing.assert_close(output, model(values))
        assert hooks.read() == ()
    (event,) = EventLogger(session).read(event_type="probe_skipped")
    assert event.payload["reason"] == "cuda_graph_capture"
