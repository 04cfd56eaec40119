"""The video's keys and values over an update: made once or sent along, the same bits."""

import copy

import pytest
import torch
from lone_learner import LoneLearner, recorded_rows
from tiny_parts import BATCH, observations, tiny_policy, tiny_wam
from tiny_run import EXAMPLES

from rlinf_wamrl.config.compose import compose_run
from rlinf_wamrl.wam.lora import inject_lora, select_trainable


@pytest.fixture(autouse=True)
def one_thread():
    """Two threads may share a sum differently from call to call, on some processors."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def run_with(**overrides):
    given = {
        "actor.micro_batch_size": BATCH,
        "actor.global_batch_size": BATCH,
        "RL.action_lr": 1e-2,
        "RL.recompute_logprobs": "true",
        **overrides,
    }
    return compose_run(EXAMPLES / "libero_wamrl.yaml", [f"{k}={v}" for k, v in given.items()])


def learner_of(choice, mode="first_frame", **overrides):
    wam = tiny_wam(variant="optional_idm", action_infer_mode=mode)
    inject_lora(wam, generator=torch.Generator().manual_seed(0), rank=2)
    policy = tiny_policy(wam, keep_video_cache=choice == "store")
    select_trainable(wam, root=policy)
    return LoneLearner(run_with(**{"RL.wam_cache": choice, **overrides}), policy)


def count_prefills(policy):
    calls = []
    policy.wam.video_expert.text_embedding.register_forward_pre_hook(
        lambda *_: calls.append("prefill")
    )
    return calls


def weights_after(learner, rows, times=1):
    for update in range(times):
        learner._update(copy.deepcopy(rows), {}, is_first=update == 0)
    return torch.cat([p.detach().flatten() for p in learner.action_parameters])


@pytest.mark.parametrize("mode", ["first_frame", "idm"])
def test_stored_and_recomputed_caches_give_the_same_update_bit_for_bit(mode):
    results = {}
    for choice in ("store", "recompute"):
        learner = learner_of(choice, mode)
        rows = recorded_rows(learner.model, observations())
        assert ("video_cache" in rows["forward_inputs"]) == (choice == "store")
        # two updates: after the first one, what was stored is no longer of these weights
        results[choice] = weights_after(learner, rows, times=2)
    start = torch.cat([p.flatten() for p in learner_of("store", mode).action_parameters])
    assert torch.equal(results["store"], results["recompute"])
    assert not torch.equal(results["store"], start)


def test_a_single_step_is_the_same_without_a_cache():
    once = {"RL.update_epochs": 1}
    results = {}
    for choice in ("recompute", "none"):
        learner = learner_of(choice, **once)
        results[choice] = weights_after(learner, recorded_rows(learner.model, observations()))
    assert torch.equal(results["recompute"], results["none"])


@pytest.mark.parametrize(("choice", "prefills"), [("store", 0), ("recompute", 1), ("none", 4)])
def test_one_prefill_serves_all_passes_of_an_update(choice, prefills):
    learner = learner_of(choice, **{"RL.update_epochs": 3})
    rows = recorded_rows(learner.model, observations())
    calls = count_prefills(learner.model)
    learner._update(rows, {}, is_first=True)
    assert len(calls) == 2 * prefills  # its text in two parts: re-scoring and three epochs


@pytest.mark.parametrize("reason", ["other version", "adapters trained"])
def test_stored_caches_of_other_weights_are_made_again(reason):
    learner = learner_of("store", **{"RL.update_epochs": 1, "RL.recompute_logprobs": "false"})
    version = 3 if reason == "other version" else 0
    rows = recorded_rows(learner.model, observations(), version=version)
    expected = learner.model.forward("video_cache", records=rows["forward_inputs"])
    rows["forward_inputs"]["video_cache"] = torch.zeros_like(expected)
    if reason == "adapters trained":
        learner._step(learner.video_optimizer, learner.video_parameters)
    metrics = {}
    learner._provide_video_caches(rows, metrics)
    assert torch.equal(rows["forward_inputs"]["video_cache"], expected)
    assert metrics["actor/stored_caches_stale"] == [1.0]


def test_fresh_stored_caches_are_taken_as_they_are():
    learner = learner_of("store")
    rows = recorded_rows(learner.model, observations())
    rows["forward_inputs"]["video_cache"] += 1.0
    before, metrics = rows["forward_inputs"]["video_cache"].clone(), {}
    learner._provide_video_caches(rows, metrics)
    assert torch.equal(rows["forward_inputs"]["video_cache"], before)
    assert metrics["actor/stored_caches_stale"] == [0.0]
