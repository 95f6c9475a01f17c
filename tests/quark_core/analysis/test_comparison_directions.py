"""Which way is better, by name."""

import pytest

from quark_core.analysis.comparison.directions import infer_direction, is_rate_name
from quark_core.records.names import encode_name


@pytest.mark.parametrize(
    "key",
    """
    loss train/loss val/loss_ema val_loss training/ce_loss eval/perplexity word_error_rate val/WER
    error valError system/runtime/step_time_ms system/ram_used_bytes regression/rmse loss/total
    val/loss_mean latency_ms fid_score epoch_seconds brier
    """.split(),
)
def test_lower(key):
    assert infer_direction(key) == "lower"


@pytest.mark.parametrize(
    "key",
    """
    accuracy val/acc val/top5 my_eval/f1_macro test/AUC episode/return mean_reward score
    samples_per_second tokens_per_sec env/win_rate success_rate bleu valAccuracy
    """.split(),
)
def test_higher(key):
    assert infer_direction(key) == "higher"


@pytest.mark.parametrize(
    "key",
    """
    optimizer/lr learning_rate loss_scale grad_norm return_std temperature x steps_per_epoch
    accuracy/threshold 3 gradient/loss_ratio
    """.split(),
)
def test_unknown(key):
    assert infer_direction(key) == "none"


def test_stored_names_are_read_as_they_were_logged():
    assert infer_direction(encode_name("accuracy@1")) == "higher"
    assert is_rate_name("val/accuracy")
    assert not is_rate_name("val/loss")
