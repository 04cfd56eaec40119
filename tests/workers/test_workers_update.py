"""The learner's update on recorded rows: what it compares with, and what it trains on."""

import pytest
import torch
from lone_learner import LoneLearner, recorded_rows
from model_parts import example_run, observations, policy_of
from rlinf.scheduler import AcceleratorType


def lone_learner(*overrides):
    run = example_run(
        "actor.micro_batch_size=6", "actor.global_batch_size=6", "RL.update_epochs=1", *overrides
    )
    return LoneLearner(run, policy_of("small", run))


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("rescore", [True, False])
def test_unchanged_weights_have_a_ratio_of_one(reduction, rescore):
    learner = lone_learner(
        f"RL.logprob_reduction={reduction}", f"RL.recompute_logprobs={str(rescore).lower()}"
    )
    rows = recorded_rows(learner.model, observations(6))
    rows["forward_inputs"]["executed_mask"][2, 3:] = False
    rows["prev_logprobs"][2, 3:] = 0.0
    metrics = {}
    learner._update(rows, metrics, is_first=True)
    assert metrics["actor/first_ratio"][0] == pytest.approx(1.0, abs=1e-4)
    assert metrics["actor/clip_fraction"][0] == 0.0


def test_without_an_action_half_every_executed_row_counts():
    learner = lone_learner("+ablation=video_only")
    rows = {
        "advantages": torch.zeros(4, 1),  # all of a group succeeded
        "loss_mask": torch.tensor([[True], [True], [False], [True]]),
    }
    assert learner.optimizer is None
    assert learner._counting(rows).tolist() == [0, 1, 3]


@pytest.mark.parametrize(("counting", "trainings"), [([0, 0], 0), ([0, 5], 1)])
def test_rounds_that_teach_nothing_do_not_train_the_video(monkeypatch, counting, trainings):
    learner = lone_learner("env.train.rollout_epoch=2")
    learner.is_weight_offloaded = learner.is_optimizer_offloaded = False
    learner.video, learner.lr_scheduler = (
        object(),
        torch.optim.lr_scheduler.ConstantLR(learner.optimizer),
    )
    counts, calls = iter(counting), []
    monkeypatch.setattr(learner, "_receive_epoch", lambda channel: {})
    monkeypatch.setattr(learner, "_judge", lambda batch: {})
    monkeypatch.setattr("rlinf_wamrl.workers.learner.flatten_time", lambda batch: batch)
    monkeypatch.setattr(learner, "_update", lambda *_, **__: next(counts))
    monkeypatch.setattr(learner, "_train_video", calls.append)
    learner._timer_metrics, learner._accelerator_type = {}, AcceleratorType.NO_ACCEL
    trained = learner.run_training(input_channel=object())
    assert len(calls) == trainings and trained["macro_steps"] == sum(counting)


@pytest.mark.parametrize("imagines", [True, False])
def test_weights_are_back_on_the_device_before_they_imagine(monkeypatch, imagines):
    learner = lone_learner()
    learner._timer_metrics, learner._accelerator_type = {}, AcceleratorType.NO_ACCEL
    learner.is_weight_offloaded, learner.imagination = True, object() if imagines else None
    learner.rollout_batch, order = {}, []
    monkeypatch.setattr(learner, "load_param_and_grad", lambda device: order.append("load"))
    monkeypatch.setattr(learner, "_judge", lambda batch: order.append("judge"))
    monkeypatch.setattr(learner, "_counting", lambda rows: torch.arange(3))
    monkeypatch.setattr("rlinf_wamrl.workers.learner.flatten_time", lambda batch: batch)
    assert learner.compute_advantages_and_returns() == {"macro_steps": 3.0}
    assert order == (["load", "judge"] if imagines else ["judge"])
