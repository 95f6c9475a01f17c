"""Tokens, samples and FLOPs per second, and the share of the peak."""

import logging
import os
import subprocess
import sys
import time

import pytest

import quark
from quark.analysis.rank_performance import measure_rates
from quark.cli.run_view import describe_rates
from quark_core.runs.run_search import summarize_run
from quark_core.writers.step_timing import PRECISIONS, find_peak_flops, read_precision

TOKENS = "system/runtime/tokens_per_s"
FLOPS = "system/runtime/flops_per_s"
MFU = "system/runtime/mfu_percent"


def read(session, key):
    return quark.MetricsLogger(session).read(metric_key=key)


def measure(session, **arguments):
    config = quark.SystemTelemetryConfig(
        capture_gpu=False, sample_every_n_steps=arguments.pop("every", 1)
    )
    return quark.SystemTelemetry(session, config=config, **arguments)


def test_times_that_the_caller_knows_give_exact_rates(session):
    telemetry = measure(
        session, tokens_per_step=1000, samples_per_step=lambda: 4, flops_per_token=6e6,
        peak_flops_per_s=1e12, every=2,
    )  # fmt: skip
    for step in range(5):
        telemetry.record_step(step, step_time_ms=50.0)
    rates = [(row.step, row.value) for row in read(session, TOKENS)]
    assert rates == [(0, 20_000.0), (2, 20_000.0), (4, 20_000.0)]
    assert read(session, "system/runtime/samples_per_s")[-1].value == 80.0
    assert read(session, FLOPS)[-1].value == pytest.approx(1.2e11)
    assert read(session, MFU)[-1].value == pytest.approx(12.0)
    (event,) = quark.EventLogger(session).read(event_type="throughput_measured")
    assert event.payload["peak_flops_per_s"] == 1e12
    telemetry.close()


def test_a_scope_counts_by_itself_and_wins_over_what_is_usual(session):
    telemetry = measure(session, tokens_per_step=1.0)
    for step in range(3):
        with telemetry.start_step(step) as scope:
            scope.count(tokens=500, samples=2)
            scope.count(tokens=500)
            time.sleep(0.01)
    telemetry.close()
    for row in read(session, TOKENS):
        assert 0 < row.value <= 1000 / 0.01
    assert len(read(session, "system/runtime/samples_per_s")) == 3


def test_counting_needs_no_argument(session):
    telemetry = measure(session)
    with telemetry.start_step(0) as scope:
        scope.count(tokens=10)
    with telemetry.start_step(1) as scope:
        pass
    telemetry.close()
    assert [row.step for row in read(session, TOKENS)] == [0]


def test_steps_that_the_cadence_leaves_out_count_too(session):
    telemetry = measure(session, tokens_per_step=100, every=10)
    began = time.perf_counter()
    for step in range(1, 21):
        with telemetry.start_step(step):
            time.sleep(0.001)
    took = time.perf_counter() - began
    telemetry.close()
    first, second = read(session, TOKENS)
    assert (first.step, second.step) == (10, 20)
    assert second.value * took > 100 * 10
    assert second.value <= 100 / 0.001


def test_a_function_that_raises_costs_one_warning(session, caplog):
    def fail():
        raise RuntimeError("no batch yet")

    telemetry = measure(session, tokens_per_step=fail, samples_per_step=3)
    with caplog.at_level(logging.WARNING, "quark"):
        for step in range(5):
            telemetry.record_step(step, step_time_ms=1.0)
    telemetry.close()
    assert caplog.text.count("tokens per second are not measured") == 1
    assert read(session, TOKENS) == ()
    assert len(read(session, "system/runtime/samples_per_s")) == 5


def test_a_device_that_is_not_known_has_no_share_and_says_so_once(session, caplog):
    telemetry = measure(session, flops_per_step=1e9)
    telemetry.sample()
    with caplog.at_level(logging.WARNING, "quark"):
        for step in range(5):
            telemetry.record_step(step, step_time_ms=1.0)
    telemetry.close()
    assert read(session, FLOPS)[0].value == pytest.approx(1e12)
    assert read(session, MFU) == ()
    assert len(quark.EventLogger(session).read(event_type="mfu_unknown")) <= 1
    assert caplog.text.count("is unknown, so MFU is not computed") <= 1


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"tokens_per_step": "many"}, "tokens_per_step"),
        ({"samples_per_step": -1}, "samples_per_step"),
        ({"flops_per_step": float("nan")}, "flops_per_step"),
        ({"flops_per_step": 1, "flops_per_token": 1}, "cannot be combined"),
        ({"tokens_per_step": 1, "precision": "int3"}, "precision"),
        ({"peak_flops_per_s": 0}, "peak_flops_per_s"),
    ],
)
def test_a_bad_argument_is_named(session, arguments, named):
    with pytest.raises(quark.SchemaValidationError, match=named):
        quark.SystemTelemetry(session, **arguments)
    telemetry = measure(session)
    scope = telemetry.start_step(0)
    with pytest.raises(quark.SchemaValidationError, match="tokens"):
        scope.count(tokens=-1)
    scope.finish()
    telemetry.close()


@pytest.mark.parametrize(
    ("name", "precision", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989.4),
        ("NVIDIA H100 PCIe", "bf16", 756),
        ("NVIDIA H100 NVL", "fp16", 835.5),
        ("NVIDIA H200", "fp8", 1978.9),
        ("NVIDIA GH200 480GB", "bf16", 989.4),
        ("NVIDIA B200", "bf16", 2250),
        ("NVIDIA A100-SXM4-80GB", "tf32", 156),
        ("NVIDIA A100 80GB PCIe", "bf16", 312),
        ("NVIDIA A10", "bf16", 125),
        ("NVIDIA A10G", "bf16", None),
        ("NVIDIA L4", "bf16", 121),
        ("NVIDIA L40S", "bf16", 362),
        ("Tesla T4", "fp16", 65),
        ("Tesla T4", "bf16", None),
        ("Tesla V100-SXM2-32GB", "fp16", 125),
        ("NVIDIA GeForce RTX 4090", "bf16", 165.2),
        ("AMD Instinct MI300X", "bf16", 1307.4),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "bf16", None),
        ("NVIDIA H20", "bf16", 148),
        ("Some Other Card 100", "bf16", None),
        ("", "bf16", None),
        (None, "bf16", None),
    ],
)
def test_peaks_are_those_of_the_data_sheets(name, precision, tflops):
    found = find_peak_flops(name, precision)
    assert found == (None if tflops is None else pytest.approx(tflops * 1e12))


def test_precisions_are_read_from_names_and_dtypes():
    torch = pytest.importorskip("torch")
    assert read_precision(torch.bfloat16) == "bf16"
    assert read_precision("float16") == "fp16"
    assert all(read_precision(name) == name for name in PRECISIONS)
    assert read_precision(torch.int8) is None


def test_ranks_are_summed_and_their_share_is_of_all_devices(tmp_path):
    program = (
        "import sys, quark\n"
        "session = quark.start_run(project='p', storage_dir=sys.argv[1], ranks='all')\n"
        "rank = int(sys.argv[2])\n"
        "t = quark.SystemTelemetry(session, tokens_per_step=100 * (rank + 1),\n"
        "    flops_per_token=1e6, peak_flops_per_s=1e10)\n"
        "for step in range(3):\n"
        "    t.record_step(step, step_time_ms=100.0)\n"
        "session.end_run()\n"
    )
    for rank in range(2):
        environment = {
            **os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2",
            "QUARK_RUN_ID": "shared",
        }  # fmt: skip
        done = subprocess.run(
            [sys.executable, "-c", program, tmp_path, str(rank)],
            capture_output=True, text=True, env=environment, timeout=60,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
    reader = quark.open_run("shared", tmp_path).open_run.reader
    rates = measure_rates(reader, summarize_run(reader, "shared"))
    assert (rates.tokens_per_s, rates.ranks, rates.world_size) == (3000.0, 2, 2)
    assert rates.flops_per_s == pytest.approx(3e9)
    assert rates.mfu_percent == pytest.approx(15.0)
    told = describe_rates(rates)
    assert told == "3,000 tokens/s, 0.003 TFLOP/s, MFU 15.0 %, of 2 ranks together"
