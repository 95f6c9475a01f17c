"""Which metric is the loss, by names as people write them."""

import pytest
from run_builder import RunBuilder

from quark.analysis.metric_roles import (
    choose_loss,
    find_part,
    is_player_loss,
    is_score,
)
from quark_core.records.names import encode_name

TRAIN_LOSSES = """
loss train/loss training/loss Loss/train loss/train train_loss train.loss trainLoss TrainLoss
trainloss loss_train train_loss_epoch train_loss_step train/loss_step train/loss_epoch avg_loss
running_loss epoch_loss mean_loss total_loss loss/total mse train_mse nll train/nll perplexity
train/perplexity ppl bpc bits_per_dim cross_entropy ce_loss train/ce bce cost objective
mean_squared_error neg_log_likelihood train_error lm_loss Metrics/Loss/Train
loss@train LOSS reconstruction_loss policy_loss td_error bellman_error prediction/error info_nce
train/info_nce
""".split()
HELD_OUT_LOSSES = """
val/loss validation/loss val_loss valid_loss eval_loss eval/loss test_loss test/loss Loss/val
Loss/validation Loss/test loss/eval val_mse val/nll val_perplexity eval/perplexity valLoss
dev/ce val_loss_epoch val/loss_epoch validation_loss loss_val valid/avg_loss
""".split()
NO_LOSSES = """
lr learning_rate accuracy val/accuracy entropy policy/entropy loss_scale amp/loss_scale
loss_weight best_val_loss min_loss loss_std grad_norm epoch throughput train_runtime
standard_error io_error train_steps_per_second reward system/runtime/step_time_ms quark/loss fid
energy
""".split()


@pytest.mark.parametrize("name", TRAIN_LOSSES)
def test_names_of_training_losses(name):
    key = encode_name(name)
    metrics = RunBuilder().metric("lr", [0.1]).metric(key, [2.0, 1.0]).build().metrics
    found = find_part(metrics, "train loss")
    assert found is not None
    assert found.key == key
    assert find_part(metrics, "validation loss") is None
    assert choose_loss({"lr": 1, key: 2}) == key


@pytest.mark.parametrize("name", HELD_OUT_LOSSES)
def test_names_of_losses_of_what_is_held_out(name):
    metrics = RunBuilder().metric("lr", [0.1]).metric(name, [2.0, 1.0]).build().metrics
    found = find_part(metrics, "validation loss")
    assert found is not None
    assert found.key == name
    assert find_part(metrics, "train loss") is None


@pytest.mark.parametrize("name", NO_LOSSES)
def test_what_is_no_loss_is_not_taken_for_one(name):
    metrics = RunBuilder().metric(name, [2.0, 1.0]).build().metrics
    assert find_part(metrics, "train loss") is None
    assert find_part(metrics, "validation loss") is None
    assert choose_loss({name: 2}) is None


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("aux_loss", "train_loss", "kl_loss"), "train_loss"),
        (("train_mse", "train_loss"), "train_loss"),
        (("policy_loss", "loss", "value_loss"), "loss"),
        (("loss_scale", "nll"), "nll"),
        (("running_loss", "loss"), "loss"),
        (("val_loss", "train_loss"), "train_loss"),
        (("accuracy", "val_loss"), "val_loss"),
        (("test_loss", "val_loss"), "val_loss"),
        (("my/loss", "train/loss"), "train/loss"),
        (("loss/judge", "reconstruction_error"), "reconstruction_error"),
        (("Loss_D", "Loss_G", "mse"), "mse"),
    ],
)
def test_of_several_the_plainest_is_taken(names, expected):
    assert choose_loss(dict.fromkeys(names, 5)) == expected


def test_of_two_that_are_called_alike_the_one_with_more_points_is_taken():
    assert choose_loss({"loss": 1000, "train_loss": 1}) == "loss"
    assert choose_loss({"train_loss_epoch": 10, "train_loss_step": 400}) == "train_loss_step"


@pytest.mark.parametrize(
    ("name", "held_out"),
    [
        ("accuracy", False), ("train_acc", False), ("acc@1", False), ("Accuracy/train", False),
        ("sparse_categorical_accuracy", False), ("val_acc", True), ("val_f1", True),
        ("val_categorical_accuracy", True), ("test/top1", True), ("eval_accuracy", True),
    ],
)  # fmt: skip
def test_names_of_accuracies(name, held_out):
    key = encode_name(name)
    metrics = RunBuilder().metric(key, [0.1, 0.9]).build().metrics
    data, other = ("validation", "train") if held_out else ("train", "validation")
    found = find_part(metrics, f"{data} accuracy")
    assert found is not None
    assert found.key == key
    assert find_part(metrics, f"{other} accuracy") is None


@pytest.mark.parametrize("name", ["reward", "rollout/ep_rew_mean", "episode_return", "val/bleu"])
def test_names_of_scores(name):
    assert is_score(name)
    assert not is_score("loss")


@pytest.mark.parametrize(
    "name",
    """
    Loss_D Loss_G loss_d d_loss g_loss D/loss G/loss errD errG lossG generator/loss
    discriminator_loss critic/loss loss/judge adversarial_loss
    """.split(),
)
def test_losses_of_one_of_two_players(name):
    assert is_player_loss(name)
    assert choose_loss({name: 5}) == name


@pytest.mark.parametrize("name", ["loss", "train/loss", "dice_loss", "loss_gap", "gradient/loss"])
def test_losses_of_one_model(name):
    assert not is_player_loss(name)
