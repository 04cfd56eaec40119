"""Pipeline mode: the same training rows as whole trajectories, cut for actors after advantages."""

import math

import pytest
import torch
from omegaconf import OmegaConf
from synthetic_rollout import Rollouts, run_config

pytest.importorskip("rlinf.utils.utils")

from rlinf.algorithms.registry import calculate_adv_and_returns
from rlinf.utils.utils import flatten_embodied_batch, preprocess_embodied_batch, unpack_batch

from rlinf_wamrl.data.batch_values import batch_values_equal
from rlinf_wamrl.data.embodied_trajectory import (
    ChannelContext,
    RolloutGeometry,
    TrajectoryCollector,
    TrajectoryMode,
    TrajectoryPlan,
)
from rlinf_wamrl.data.embodied_types import Trajectory, TrajectoryKey

CHUNKS = 3


def config(**options):
    return run_config(runner__use_training_pipeline=True, **options)


def collector_for(cfg, *, env_ranks=1, actors=1, mode=TrajectoryMode.PIPELINE, sources=None):
    geometry = RolloutGeometry.from_world_sizes(
        cfg, env_world_size=env_ranks, actor_world_size=actors
    )
    collector = TrajectoryCollector(TrajectoryPlan(mode, geometry), sources=sources)
    collector.setup(ChannelContext(cfg=cfg))
    return collector


def feed_pairs(collector, pairs):
    return [
        output
        for pair in pairs
        for part in (pair.policy, pair.env)
        for output in collector.collect(part, "any")
    ]


def by_actor(outputs):
    batches = {}
    for key, item in outputs:
        batches.setdefault(int(key.split("_")[0]), []).append(unpack_batch(item))
        assert key == "{0}_{0}_pipeline_actor".format(key.split("_")[0])
    return batches


def joined(batches):
    """Flat rows of several micro-batches."""
    return {
        key: (
            joined([batch[key] for batch in batches])
            if isinstance(value, dict)
            else torch.cat([batch[key] for batch in batches])
        )
        for key, value in batches[0].items()
    }


def trained_rows(cfg, trajectory):
    """RLinf's own way from a trajectory of one epoch to the flat rows that an actor trains on."""
    batch = preprocess_embodied_batch(
        Trajectory.to_batch([trajectory]),
        rollout_epoch=1,
        auto_reset=cfg.env.train.auto_reset,
        ignore_terminations=cfg.env.train.ignore_terminations,
        reward_type=cfg.algorithm.reward_type,
        filter_rewards=False,
        group_size=cfg.algorithm.group_size,
    )
    batch.update(
        calculate_adv_and_returns(
            task_type="embodied",
            adv_type=cfg.algorithm.adv_type,
            rewards=batch["rewards"],
            dones=batch["dones"],
            values=batch.get("prev_values"),
            gamma=cfg.algorithm.gamma,
            gae_lambda=cfg.algorithm.gae_lambda,
            group_size=cfg.algorithm.group_size,
            reward_type=cfg.algorithm.reward_type,
            loss_mask=batch.get("loss_mask"),
            loss_mask_sum=batch.get("loss_mask_sum"),
            normalize_advantages=False,
        )
    )
    rows = batch["prev_logprobs"].shape[0] * batch["prev_logprobs"].shape[1]
    return flatten_embodied_batch(batch, torch.arange(rows))


def whole_trajectory(cfg, pairs):
    one_rank = {"env": {"train": {"total_num_envs": 4 * cfg.rollout.pipeline_stage_num}}}
    rollout_cfg = OmegaConf.merge(cfg, one_rank, {"runner": {"use_training_pipeline": False}})
    outputs = feed_pairs(collector_for(rollout_cfg, mode=TrajectoryMode.ROLLOUT), pairs)
    return outputs[0][1]


@pytest.mark.parametrize("adv_type", ["grpo", "gae"])
@pytest.mark.parametrize("reward_type", ["chunk_level", "action_level"])
def test_unshuffled_micro_batches_are_the_rows_of_rollout_mode(adv_type, reward_type):
    cfg = config(
        algorithm__adv_type=adv_type,
        algorithm__reward_type=reward_type,
        algorithm__shuffle_rollout=False,
    )
    pairs = Rollouts(with_values=adv_type == "gae").epoch(CHUNKS)
    if adv_type == "gae" and reward_type == "action_level":  # one value per reward
        for pair in pairs:
            pair.policy.output.prev_values = pair.policy.output.prev_values.repeat(1, 2)
            pair.env.final_prev_values = pair.env.final_prev_values.repeat(1, 2)
    batches = by_actor(feed_pairs(collector_for(cfg), pairs))[0]
    assert [len(batch["prev_logprobs"]) for batch in batches] == [2] * 6
    assert batch_values_equal(joined(batches), trained_rows(cfg, whole_trajectory(cfg, pairs)))


def test_advantages_of_a_group_are_not_cut_by_actor_routing():
    """Four environments of one group on two actors: each actor gets half of the group."""
    cfg = config(algorithm__group_size=4, algorithm__shuffle_rollout=False)
    pairs = Rollouts(with_values=False).epoch(CHUNKS)
    whole = trained_rows(cfg, whole_trajectory(cfg, pairs))
    advantages = whole["advantages"].reshape(CHUNKS, 4, 1)
    batches = by_actor(feed_pairs(collector_for(cfg, actors=2), pairs))
    for actor, rows in ((0, slice(0, 2)), (1, slice(2, 4))):
        flat = joined(batches[actor])
        assert torch.equal(flat["advantages"], advantages[:, rows].reshape(-1, 1))
        image = whole["forward_inputs"]["image"].reshape(CHUNKS, 4, 3, 4, 4)[:, rows]
        assert torch.equal(flat["forward_inputs"]["image"], image.reshape(-1, 3, 4, 4))


@pytest.mark.parametrize(("env_ranks", "stages", "actors"), [(2, 2, 2), (2, 1, 2), (1, 2, 1)])
def test_an_epoch_is_emitted_when_all_sources_are_in(env_ranks, stages, actors):
    sources = env_ranks * stages
    cfg = config(
        env__train__total_num_envs=4 * sources,
        rollout__pipeline_stage_num=stages,
        algorithm__shuffle_rollout=False,
    )
    collector = collector_for(cfg, env_ranks=env_ranks, actors=actors)
    pairs_of = {
        (rank, stage): Rollouts(seed=10 * rank + stage, with_values=False).epoch(
            CHUNKS, env_rank=rank, stage=stage
        )
        for rank in range(env_ranks)
        for stage in range(stages)
    }
    # Sources finish in reverse; the rows still come in the order of the sources.
    outputs = []
    for source in reversed(list(pairs_of)):
        assert outputs == []
        outputs = feed_pairs(collector, pairs_of[source])
    batches = by_actor(outputs)
    assert sorted(batches) == list(range(actors))
    expected = [trained_rows(cfg, whole_trajectory(cfg, pairs_of[source])) for source in pairs_of]
    per_actor = len(expected) // actors
    for actor in range(actors):
        own = expected[actor * per_actor : (actor + 1) * per_actor]
        assert batch_values_equal(joined(batches[actor]), joined(own))


def test_a_collector_may_serve_only_some_sources():
    cfg = config(env__train__total_num_envs=8, rollout__pipeline_stage_num=2)
    collector = collector_for(cfg, actors=2, sources=[1])
    outputs = feed_pairs(collector, Rollouts().epoch(CHUNKS, stage=1))
    assert set(by_actor(outputs)) == {1}
    with pytest.raises(ValueError, match="of source 0, this collector takes"):
        feed_pairs(collector, Rollouts().epoch(CHUNKS, stage=0))
    with pytest.raises(ValueError, match="not all among the 2"):
        collector_for(cfg, sources=[2])


def test_shuffling_is_seeded_per_actor_and_goes_on_between_batches():
    cfg = config(env__train__total_num_envs=8, rollout__pipeline_stage_num=2)
    pairs = [Rollouts(seed=s).epoch(CHUNKS, stage=s) for s in (0, 1)]
    batches = by_actor(feed_pairs(collector_for(cfg), [*pairs[0], *pairs[1]]))[0]
    generator = torch.Generator().manual_seed(cfg.actor.seed + 0)
    for index, source in enumerate(pairs):
        rows = trained_rows(cfg, whole_trajectory(cfg, source))
        order = torch.randperm(12, generator=generator)
        flat = joined(batches[6 * index : 6 * index + 6])
        assert torch.equal(flat["actions"], rows["actions"][order])
        assert torch.equal(
            flat["forward_inputs"]["k_star"], rows["forward_inputs"]["k_star"][order]
        )


def test_normalised_advantages_have_zero_mean_per_actor():
    cfg = config(
        env__train__total_num_envs=8,
        rollout__pipeline_stage_num=2,
        algorithm__normalize_advantages=True,
        algorithm__adv_type="gae",
    )
    pairs = [pair for s in (0, 1) for pair in Rollouts(seed=s).epoch(CHUNKS, stage=s)]
    batches = by_actor(feed_pairs(collector_for(cfg, actors=2), pairs))
    for actor in (0, 1):
        flat = joined(batches[actor])
        kept = flat["advantages"][flat["loss_mask"]].double()
        assert math.isclose(kept.mean(), 0.0, abs_tol=1e-5)
        assert math.isclose(kept.var(unbiased=False), 1.0, abs_tol=1e-3)


def test_filtered_groups_are_masked():
    cfg = config(
        algorithm__filter_rewards=True,
        algorithm__rewards_lower_bound=0.5,
        algorithm__rewards_upper_bound=9.0,
        algorithm__shuffle_rollout=False,
        env__train__ignore_terminations=True,
    )
    pairs = Rollouts(with_values=False).epoch(CHUNKS, ends=False)
    for pair in pairs:
        pair.env.transition.rewards = torch.tensor([[0.0, 0], [0, 0], [1, 0], [1, 0]])
    flat = joined(by_actor(feed_pairs(collector_for(cfg), pairs))[0])
    assert flat["loss_mask"].reshape(CHUNKS, 4).tolist() == [[False, False, True, True]] * CHUNKS
    assert "loss_mask_sum" not in flat


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"actor__micro_batch_size": 5},
            r"12 rows .* not divisible by actor.micro_batch_size \(5\)",
        ),
        ({"algorithm__adv_type": "gae"}, "needs prev_values"),
        ({"rollout__collect_prev_infos": False}, "set rollout.collect_prev_infos: True"),
        ({"algorithm__group_size": 3}, r"group_size \(3\) must divide the 4 environments"),
        ({"actor__micro_batch_size": None}, "actor.micro_batch_size, which is not set"),
    ],
)
def test_what_cannot_be_trained_is_named(options, words):
    cfg = config(**options)
    pairs = Rollouts(with_values=False).epoch(CHUNKS)
    with pytest.raises(ValueError, match=words):
        feed_pairs(collector_for(cfg), pairs)


def test_a_missing_boundary_entry_is_named():
    cfg = config(algorithm__adv_type="grpo")
    pairs = Rollouts().epoch(CHUNKS)
    pairs[-1].env.final_prev_values = None
    with pytest.raises(ValueError, match="prev_values has 3 entries for 3 chunks"):
        feed_pairs(collector_for(cfg), pairs)


def test_a_failed_flush_can_be_retried_without_moving_the_shuffle():
    cfg = config()
    pairs = Rollouts().epoch(CHUNKS)
    expected = feed_pairs(collector_for(cfg), pairs)
    collector = collector_for(cfg)
    feed_pairs(collector, pairs[:-1])
    final_values, pairs[-1].env.final_prev_values = pairs[-1].env.final_prev_values, None
    with pytest.raises(ValueError, match="boundary entry is missing"):
        feed_pairs(collector, pairs[-1:])
    pairs[-1].env.final_prev_values = final_values
    assert batch_values_equal(list(collector.collect(pairs[-1].env, "any")), expected)


def test_epochs_are_emitted_one_by_one():
    cfg = config(env__train__rollout_epoch=2)
    collector = collector_for(cfg)
    rollouts = Rollouts(with_values=False)
    assert len(feed_pairs(collector, rollouts.epoch(CHUNKS, epoch=0))) == 6
    assert len(feed_pairs(collector, rollouts.epoch(CHUNKS, epoch=1))) == 6
    stray = Rollouts(with_values=False).pair(TrajectoryKey(0, 0, 5, 0, 0))
    with pytest.raises(ValueError, match="of source 5"):
        feed_pairs(collector, [stray])
