"""Compilers of functions take traced ones as they take others."""

from __future__ import annotations

import warnings

import pytest

import quark

torch = pytest.importorskip("torch")


@quark.trace("outputs", output=True)
def add_sine(x):
    return torch.sin(x) + 1


@pytest.mark.sampled
@pytest.mark.parametrize(
    "compile_it",
    [
        lambda function: torch.compile(function, backend="eager", fullgraph=True),
        torch.jit.script,
        lambda function: torch.jit.trace(function, torch.ones(3)),
        lambda function: quark.trace("above", output=True)(
            torch.compile(function, backend="eager")
        ),
    ],
    ids=["compile", "script", "jit trace", "below"],
)
def test_a_compiled_function_gives_what_it_gave(tmp_path, caplog, compile_it):
    with quark.start_run(project="p", storage_dir=tmp_path), warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        # PyTorch says of its own older compiler that it is one.
        warnings.simplefilter("ignore", DeprecationWarning)
        compiled = compile_it(add_sine)
        for _ in range(2):
            assert torch.equal(compiled(torch.ones(3)), torch.sin(torch.ones(3)) + 1)
    assert [each.getMessage() for each in caplog.records if each.levelname == "WARNING"] == []
