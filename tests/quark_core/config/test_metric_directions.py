"""Which way is better, by name, and that roles, which are read from the same words, agree."""

import pytest

from quark.analysis.metric_roles import is_loss, is_reward, is_score
from quark_core.config.objective import (
    Objective,
    find_mode,
    infer_direction,
    infer_mode,
    is_rate_name,
)
from quark_core.records.names import encode_name

LOWER = """
    val/error_rate val/word_error_rate val/mape val/bpb val/brier val/ece val/score_loss
    eval/return_loss val/latency_ms val/lpips val/kid val/nce val/hinge val/cost val/regret
    val/logloss loss train/loss val/loss_ema val_loss training/ce_loss eval/perplexity
    word_error_rate val/WER error valError system/runtime/step_time_ms system/ram_used_bytes
    regression/rmse loss/total val/loss_mean latency_ms fid_score epoch_seconds brier
    training/loss Loss/train loss/train train_loss train.loss trainLoss TrainLoss trainloss
    loss_train train_loss_epoch train_loss_step train/loss_step train/loss_epoch avg_loss
    running_loss epoch_loss mean_loss total_loss mse train_mse nll train/nll perplexity
    train/perplexity ppl bpc bits_per_dim cross_entropy ce_loss train/ce bce cost objective
    mean_squared_error neg_log_likelihood train_error lm_loss Metrics/Loss/Train loss@train
    LOSS reconstruction_loss policy_loss td_error bellman_error prediction/error info_nce
    train/info_nce val/loss validation/loss valid_loss eval_loss eval/loss test_loss
    test/loss Loss/val Loss/validation Loss/test loss/eval val_mse val/nll val_perplexity
    valLoss dev/ce val_loss_epoch val/loss_epoch validation_loss loss_val valid/avg_loss
    Loss_D Loss_G loss_d d_loss g_loss D/loss G/loss errD errG lossG generator/loss
    discriminator_loss critic/loss loss/judge adversarial_loss error_top1 top1_error
    top5_err err@1 brier_score kid_score loss_cls loss_bbox losses/dice losses/giou
    ms_per_token s/it ms/step loss_per_token nan_count num_errors error_count
    false_positive_rate fpr false_negative_rate neg_loss negative_elbo log_loss val_log_loss
    errors_per_second frechet_inception_distance edit_distance train_runtime latency_p99
    time_ms step_ms optimality_gap cost_return bits_per_byte val/bits_per_char
    collision_rate MSELoss KID FVD val/cer ttft_ms phoneme_per val/per l1_loss loss1 mse2
    val/accuracy_gap accuracy_error smoothl1
""".split()
HIGHER = """
    val/ndcg val/mrr val/dice val/kappa val/mcc val/hit_rate val/win_rate val/throughput
    train/tokens_per_second val/elbo val/jaccard val/exact_match val/meteor val/rouge1
    val/loss_reward val/sensitivity val/err_acc val/auprc accuracy val/acc val/top5
    my_eval/f1_macro test/AUC episode/return mean_reward score samples_per_second
    tokens_per_sec env/win_rate success_rate bleu valAccuracy acc@1 acc_top5 prec@1_recall
    recall@10 ndcg@10 nDCG@10 hits@1 pass@1 pass_at_1 top1 top-1 top_5_accuracy mIoU
    val/mIoU IoU mAP mAP50 mAP@0.5 map_50 ap50 AP75 bbox_mAP_50 F1Score F1-score f1_macro
    macro_f1 ROUGE-1 rougeL rouge_l rougeLsum BLEU-4 bleu4 chrF CIDEr BERTScore METEOR
    WinRate winrate rollout/ep_rew_mean episodic_return charts/episodic_return
    eval/mean_reward reward_max train_samples_per_second train_steps_per_second
    tokens_per_second_per_gpu tokens/s train/it/s it_s images_sec fps mfu psnr_db val/psnr
    dice_coefficient jaccard_index matthews_corrcoef log_likelihood neg_mean_squared_error
    neg_log_loss neg_mse true_positive_rate tpr explained_variance pr_auc roc_auc aucROC R2
    r2_score pearsonr exact_match em hit_rate precision_at_5 recall_rate accuracy/epoch
    best_val_acc acc_avg val/accuracy_per_class reward_per_step rewards/accuracies
    loss_accuracy inception_score elo eval/success explained_var
""".split()
UNKNOWN = """
    optimizer/lr learning_rate loss_scale grad_norm return_std temperature x steps_per_epoch
    accuracy/threshold 3 gradient/loss_ratio lr entropy policy/entropy amp/loss_scale
    loss_weight loss_std epoch total_flos energy dropout_rate clip_fraction approx_kl kl
    episode_length ep_len_mean rewards/margins loss_coef loss/weight batch_size gpu_util
    num_tokens tokens reward_std acc_std momentum beta1 loss/std
""".split()


@pytest.mark.parametrize("key", LOWER)
def test_lower(key):
    assert (infer_direction(key), infer_mode(key)) == ("lower", "min")
    assert not is_score(key)


@pytest.mark.parametrize("key", HIGHER)
def test_higher(key):
    assert (infer_direction(key), infer_mode(key)) == ("higher", "max")
    assert not is_loss(key)


@pytest.mark.parametrize("key", UNKNOWN)
def test_unknown(key):
    assert infer_mode(key) is None
    assert infer_direction(key) == "none"
    assert not is_loss(key)
    assert not is_score(key)


@pytest.mark.parametrize("prefix", ["val/", "eval_", "Metrics/"])
def test_where_a_metric_is_measured_changes_nothing(prefix):
    for key in (*LOWER, *HIGHER, *UNKNOWN):
        assert infer_mode(prefix + key) == infer_mode(key), key


def test_speeds_and_times_are_no_results():
    for key in ("throughput", "tokens_per_second", "tokens/s", "fps", "latency_ms", "fid"):
        assert not is_reward(key)
        assert not is_loss(key)


def test_stored_names_are_read_as_they_were_logged():
    assert infer_direction(encode_name("accuracy@1")) == "higher"
    assert is_rate_name("val/accuracy")
    assert not is_rate_name("val/loss")


@pytest.mark.parametrize("name", ["val/acc", "val/acc@1", "entropy"])
def test_what_was_declared_goes_before_the_name(name):
    for key in (name, encode_name(name)):
        assert find_mode(key, Objective(name, "min")) == "min"
        assert find_mode(key, Objective(encode_name(name), "max")) == "max"
        assert find_mode(key, Objective("another", "min")) == infer_mode(name)


def test_an_objective_of_which_nothing_is_known_is_to_fall():
    assert find_mode("entropy", Objective("entropy")) == "min"
    assert find_mode("val/acc", Objective("val/acc")) == "max"
    assert find_mode("entropy") is None
