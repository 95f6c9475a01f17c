"""Replicas of two ranks under torchrun: which part, from which step and layer on."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import quark
from quark_torch.parameters.diagnostics import digest_tensors

TRAINING = Path(__file__).with_name("replicated_training.py")
HEALTHY, FAULTY = ("ddp", "views", "fsdp"), ("no_sync", "edited", "seeds")

needs_launcher = pytest.mark.skipif(
    not torch.distributed.is_available(), reason="torch without distributed"
)


@pytest.fixture(scope="module")
def analyze(tmp_path_factory):
    """Of a kind of training: its analysis."""
    folder = tmp_path_factory.mktemp("replicas")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    kinds = ",".join((*HEALTHY, *FAULTY))
    finished = subprocess.run(
        [*launcher, "--nproc_per_node=2", str(TRAINING), str(folder), kinds],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TORCHELASTIC_LOG_LEVEL": "ERROR"},
        timeout=280,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr[-4000:]

    def read(kind):
        session = quark.open_run((folder / f"{kind}.txt").read_text(), folder)
        return quark.AnalyzerEngine(session).analyze()

    return read


def find(result):
    return [alert for alert in result.alerts if alert.rule_id == "replicas_differ"]


@pytest.mark.long
@needs_launcher
@pytest.mark.parametrize("kind", HEALTHY)
def test_what_is_kept_the_same_or_in_parts(analyze, kind):
    result = analyze(kind)
    assert not find(result)
    assert result.verdicts["replicas_differ"].state == "quiet"
    word = "sharded" if kind == "fsdp" else "same"
    assert word in result.verdicts["replicas_differ"].reason
    assert result.verdicts["gradients_not_cleared"].state == "quiet"


@pytest.mark.long
@needs_launcher
@pytest.mark.parametrize(
    ("kind", "step", "culprit"), [("no_sync", 6, "0"), ("edited", 6, "2"), ("seeds", 0, "0")]
)
def test_the_first_step_and_layer_where_replicas_part(analyze, kind, step, culprit):
    result = analyze(kind)
    (alert,) = find(result)
    assert (alert.severity, alert.step, alert.culprit) == ("error", step, culprit)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64])
def test_a_digest_sees_the_last_bit_and_no_order(dtype):
    values = torch.randn(300).to(dtype)
    other = values.clone()
    other[7] = torch.nextafter(other[7].real, torch.tensor(9.0).to(values.real.dtype)).to(dtype)
    same, turned, changed, none = digest_tensors(
        [values, values.flip(0), other, torch.empty(3, device="meta")]
    )
    assert same == turned != changed
    assert none is None
