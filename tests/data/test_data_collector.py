"""The collector joins halves in any order and pieces, and loses nothing silently."""

import copy
import logging

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic_rollout import Rollouts, run_config

from rlinf_wamrl.data.batch_values import batch_values_equal
from rlinf_wamrl.data.embodied_trajectory import (
    ChannelContext,
    RolloutGeometry,
    TrajectoryCollector,
    TrajectoryMode,
    TrajectoryPlan,
)
from rlinf_wamrl.data.embodied_types import (
    PolicyOutput,
    PolicyPart,
    Trajectory,
    TrajectoryKey,
    TrajectorySource,
)

CHUNKS = 3


def collector_for(cfg, *, env_ranks=1, actors=1, mode=TrajectoryMode.ROLLOUT):
    geometry = RolloutGeometry.from_world_sizes(
        cfg, env_world_size=env_ranks, actor_world_size=actors
    )
    collector = TrajectoryCollector(TrajectoryPlan(mode, geometry))
    collector.setup(ChannelContext(cfg=cfg))
    return collector


def feed(collector, *parts):
    return [output for part in parts for output in collector.collect(part, "any")]


def feed_pairs(collector, pairs):
    return [out for pair in pairs for out in feed(collector, pair.policy, pair.env)]


def twin(part):
    """An equal part that shares no tensor."""
    return copy.deepcopy(part)


def different(part):
    """The same half with other numbers."""
    changed = copy.deepcopy(part)
    if isinstance(changed, PolicyPart):
        changed.output.forward_inputs["action"] += 1
    else:
        changed.transition.rewards += 1
    return changed


def reference(pairs, last_chunk=CHUNKS - 1):
    """The trajectory by the plainest way: stack in order."""
    rows = []
    for pair in pairs:
        output, env = pair.policy.output, pair.env
        rows.append(
            {
                "actions": output.forward_inputs["action"],
                "rewards": env.transition.rewards,
                "prev_logprobs": output.prev_logprobs,
                "versions": output.versions,
                **{f"f::{key}": value for key, value in output.forward_inputs.items()},
            }
        )
    stacked = {key: torch.stack([row[key] for row in rows]) for key in rows[0]}
    dones, values = [], []
    for pair in pairs:
        if pair.env.initial_transition is not None:
            dones.append(pair.env.initial_transition.dones)
        dones.append(pair.env.transition.dones)
        values.append(pair.policy.output.prev_values)
        if pair.key.chunk_id == last_chunk:
            values.append(pair.env.final_prev_values)
    return {**stacked, "dones": torch.stack(dones), "prev_values": torch.stack(values)}


def as_reference(trajectory: Trajectory):
    names = ("actions", "rewards", "prev_logprobs", "versions", "dones", "prev_values")
    flat = {f"f::{key}": value for key, value in trajectory.forward_inputs.items()}
    return {**{name: getattr(trajectory, name) for name in names}, **flat}


# ---------------------------------------------------------------- set-up


def test_the_collector_needs_the_run_config():
    with pytest.raises(ValueError, match="needs the run config"):
        TrajectoryCollector().setup(ChannelContext())
    with pytest.raises(RuntimeError, match="setup"):
        TrajectoryCollector().unjoined()


def test_the_geometry_comes_from_the_config_by_default(monkeypatch):
    geometry = RolloutGeometry(1, CHUNKS, 1, 1)
    monkeypatch.setattr(RolloutGeometry, "from_cfg", classmethod(lambda cls, cfg: geometry))
    collector = TrajectoryCollector()
    collector.setup(ChannelContext(cfg=run_config()))
    assert len(feed_pairs(collector, Rollouts().epoch(CHUNKS))) == 1


def test_nothing_happens_before_the_result_is_iterated():
    collector = collector_for(run_config())
    collector.collect("nonsense", "any")
    with pytest.raises(ValueError, match="takes PolicyPart and EnvPart, not str"):
        feed(collector, "nonsense")


# ---------------------------------------------------------------- rollout mode


@pytest.mark.parametrize("epochs", [1, 2])
@pytest.mark.parametrize("actors", [1, 2])
def test_rollout_mode_emits_a_sources_trajectory_in_shards(epochs, actors):
    cfg = run_config(env__train__rollout_epoch=epochs)
    collector = collector_for(cfg, actors=actors)
    rollouts = Rollouts()
    pairs = [pair for epoch in range(epochs) for pair in rollouts.epoch(CHUNKS, epoch=epoch)]
    outputs = feed_pairs(collector, pairs)
    assert [key for key, _ in outputs] == ["default_queue"] * actors
    merged = Trajectory.to_batch([trajectory for _, trajectory in outputs])
    expected = reference(pairs)
    for name in ("actions", "rewards", "dones", "prev_values", "prev_logprobs", "versions"):
        assert torch.equal(merged[name], expected[name])
    assert outputs[0][1].max_episode_length == 6
    assert collector.unjoined() == []


def test_sources_flush_alone():
    cfg = run_config(env__train__total_num_envs=8, rollout__pipeline_stage_num=2)
    collector = collector_for(cfg)
    first = Rollouts(seed=1).epoch(CHUNKS, stage=0)
    second = Rollouts(seed=2).epoch(CHUNKS, stage=1)
    outputs = []
    for one, two in zip(first, second, strict=True):
        outputs += feed(collector, one.policy, two.policy, two.env, one.env)
    assert len(outputs) == 2
    assert batch_values_equal(as_reference(outputs[0][1]), reference(second))
    assert batch_values_equal(as_reference(outputs[1][1]), reference(first))


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_any_order_and_any_fragments_give_the_same_trajectory(data):
    """Halves of one chunk arrive whole or in pieces, interleaved with the other half's pieces."""
    pairs = Rollouts(seed=3).epoch(CHUNKS)
    collector = collector_for(run_config())
    outputs = []
    for pair in pairs:
        pieces = []
        for part in (pair.policy, pair.env):
            cuts = data.draw(st.sets(st.integers(1, 3)))
            bounds = [0, *sorted(cuts), 4]
            sizes = [end - start for start, end in zip(bounds, bounds[1:], strict=False)]
            sources = TrajectorySource.split(part.sources, sizes)
            if isinstance(part, PolicyPart):
                pieces += [
                    PolicyPart(sources=source, obs={}, output=output)
                    for source, output in zip(sources, part.output.split(sizes), strict=True)
                ]
            else:
                pieces += part.split(sizes)
        for piece in data.draw(st.permutations(pieces)):
            outputs += feed(collector, piece)
    assert len(outputs) == 1
    assert batch_values_equal(as_reference(outputs[0][1]), reference(pairs))


def test_a_part_routed_for_several_sources_is_taken_apart():
    cfg = run_config(
        env__train__total_num_envs=8,
        rollout__pipeline_stage_num=2,
        env__train__max_steps_per_rollout_epoch=2,
    )
    collector = collector_for(cfg)
    pairs = [Rollouts(seed=stage).epoch(1, stage=stage)[0] for stage in (0, 1)]
    routed = PolicyPart(
        sources=[source for pair in pairs for source in pair.policy.sources],
        obs={},
        output=PolicyOutput.merge([pair.policy.output for pair in pairs]),
    )
    assert feed(collector, pairs[0].env, pairs[1].env) == []
    outputs = feed(collector, routed)
    for (_, trajectory), pair in zip(outputs, pairs, strict=True):
        assert batch_values_equal(as_reference(trajectory), reference([pair], last_chunk=0))


def test_steps_are_stacked_in_the_order_of_their_completion():
    pairs = Rollouts().epoch(CHUNKS)
    collector = collector_for(run_config())
    order = [pairs[0], pairs[2], pairs[1]]
    ((_, trajectory),) = feed_pairs(collector, order)
    assert torch.equal(trajectory.actions, reference(order)["actions"])


def test_delayed_rewards_reach_back_inside_the_scope():
    pairs = Rollouts(rows=1).epoch(CHUNKS)
    for pair in pairs:
        pair.env.transition.rewards = torch.zeros(1, 2)
        pair.env.transition.reward_model_output = torch.zeros(1, 2)
        pair.env.transition.reward_assign_lengths = [0]
    pairs[2].env.transition.reward_model_output = torch.ones(1, 2)
    pairs[2].env.transition.reward_assign_lengths = [2]
    cfg = run_config(env__train__total_num_envs=1, reward__reward_weight=0.5)
    ((_, trajectory),) = feed_pairs(collector_for(cfg), pairs)
    assert trajectory.rewards[:, 0, 0].tolist() == [0.0, 0.5, 0.5]


def test_options_reach_the_steps():
    cfg = run_config(rollout__collect_prev_infos=False, reward__env_reward_weight=3.0)
    pairs = Rollouts().epoch(CHUNKS)
    for pair in pairs:
        pair.env.transition.reward_model_output = torch.zeros(4, 2)
    ((_, trajectory),) = feed_pairs(collector_for(cfg), pairs)
    assert trajectory.prev_logprobs is None and trajectory.prev_values is None
    assert torch.equal(trajectory.rewards, 3 * reference(pairs)["rewards"])


def test_external_actions_have_no_place_in_rollout_mode():
    pair = Rollouts().epoch(1)[0]
    external = PolicyPart(
        sources=pair.policy.sources, obs={}, external_actions=torch.zeros(4, 2, 3)
    )
    with pytest.raises(ValueError, match="skipped inference"):
        feed(collector_for(run_config()), external, pair.env)


# ---------------------------------------------------------------- contradictions


def test_only_the_first_chunk_of_an_epoch_carries_the_initial_state():
    pairs = Rollouts().epoch(CHUNKS)
    collector = collector_for(run_config())
    lost = twin(pairs[0].env)
    lost.initial_transition = None
    with pytest.raises(ValueError, match="missing its initial state"):
        feed(collector, pairs[0].policy, lost)
    surplus = twin(pairs[1].env)
    surplus.initial_transition = surplus.transition
    with pytest.raises(ValueError, match="Only chunk zero"):
        feed(collector, pairs[1].policy, surplus)


def test_a_refused_pair_can_be_repaired_by_sending_one_half_again():
    pairs = Rollouts().epoch(CHUNKS)
    collector = collector_for(run_config())
    lost = twin(pairs[0].env)
    lost.initial_transition = None
    with pytest.raises(ValueError, match="missing its initial state"):
        feed(collector, pairs[0].policy, lost)
    assert "refused" in collector.unjoined()[0].reason
    outputs = feed(collector, pairs[0].env) + feed_pairs(collector, pairs[1:])
    assert batch_values_equal(as_reference(outputs[0][1]), reference(pairs))


def test_a_chunk_is_collected_once():
    pairs = Rollouts().epoch(CHUNKS)
    collector = collector_for(run_config())
    feed_pairs(collector, pairs[:1])
    assert feed(collector, pairs[0].policy) == []
    with pytest.raises(ValueError, match="duplicate trajectory event"):
        feed(collector, pairs[0].env)
    outputs = feed_pairs(collector, pairs[1:])
    assert batch_values_equal(as_reference(outputs[0][1]), reference(pairs))


def test_after_the_flush_a_key_may_be_used_again():
    pairs = Rollouts().epoch(CHUNKS)
    collector = collector_for(run_config())
    assert len(feed_pairs(collector, pairs)) == len(feed_pairs(collector, pairs)) == 1


@pytest.mark.parametrize("half", ["policy", "env"])
def test_a_second_copy_must_be_identical(half):
    pairs = Rollouts().epoch(CHUNKS)
    collector = collector_for(run_config())
    part = getattr(pairs[0], half)
    assert feed(collector, part, twin(part), part) == []
    with pytest.raises(ValueError, match="second, different (policy|environment) part"):
        feed(collector, different(part))
    outputs = feed(collector, pairs[0].env if half == "policy" else pairs[0].policy)
    outputs += feed_pairs(collector, pairs[1:])
    assert batch_values_equal(as_reference(outputs[0][1]), reference(pairs))


def test_a_second_copy_of_a_fragment_must_be_identical():
    pair = Rollouts().epoch(1)[0]
    first, second = pair.env.split([1, 3])
    collector = collector_for(run_config(env__train__max_steps_per_rollout_epoch=2))
    assert feed(collector, first, twin(first)) == []
    with pytest.raises(ValueError, match="second, different environment fragment"):
        feed(collector, different(first))
    assert feed(collector, second) == []
    assert len(feed(collector, pair.policy)) == 1


def test_fragments_must_fit_the_source():
    pair = Rollouts().epoch(1)[0]
    first, second = pair.env.split([2, 2])
    collector = collector_for(run_config(env__train__max_steps_per_rollout_epoch=2))
    feed(collector, first)
    big = pair.env.split([1, 3])[1]
    with pytest.raises(ValueError, match=r"too many rows: the environment fragments .* have 5"):
        feed(collector, big)
    shifted = twin(second)
    shifted.sources = [TrajectorySource(pair.key, 2, offset=1)]
    with pytest.raises(ValueError, match="not gap-free: expected row 2, got 1"):
        feed(collector, shifted)
    assert len(feed(collector, second, pair.policy)) == 1
    wide = twin(pair.env)
    wide.sources = [TrajectorySource(pair.key, 9)]
    with pytest.raises(ValueError, match="has 9, its source has 4"):
        feed(collector, wide)
    wide.sources = []
    with pytest.raises(ValueError, match="without sources"):
        feed(collector, wide)


def test_a_chunk_outside_its_epoch_is_refused():
    collector = collector_for(run_config())
    pair = Rollouts().pair(TrajectoryKey(0, 0, 0, 0, CHUNKS))
    with pytest.raises(ValueError, match="outside its epoch of 3 chunks"):
        feed(collector, pair.policy, pair.env)


# ---------------------------------------------------------------- failed flushes, leftovers


def test_a_failed_flush_can_be_retried():
    pairs = Rollouts().epoch(CHUNKS)
    for pair in pairs:
        pair.env.transition.reward_model_output = torch.ones(4, 2)
        pair.env.transition.reward_assign_lengths = [2] * 4
    expected = feed_pairs(collector_for(run_config()), pairs)
    collector = collector_for(run_config())
    feed_pairs(collector, pairs[:-1])
    broken = twin(pairs[-1].policy)
    del broken.output.forward_inputs["chain"]
    for _ in range(2):
        with pytest.raises(ValueError, match=r"forward_inputs\['chain'\] is present on 2 of 3"):
            feed(collector, broken, pairs[-1].env)
    outputs = feed(collector, pairs[-1].policy)
    # Also the delayed rewards are those of one attempt.
    assert batch_values_equal(outputs[0][1], expected[0][1])


def test_what_stays_unjoined_is_reported_with_its_key(caplog):
    pairs = Rollouts().epoch(CHUNKS)
    later = Rollouts().epoch(CHUNKS, step=1)
    collector = collector_for(run_config())
    fragment = pairs[2].env.split([1, 3])[0]
    feed(collector, pairs[0].policy, pairs[0].env, pairs[1].policy, fragment, later[0].env)
    reasons = {part.key: part.reason for part in collector.unjoined()}
    assert reasons == {
        pairs[0].key: "joined, but other chunks of its scope are missing",
        pairs[1].key: "environment part is missing",
        pairs[2].key: "environment part has 1 of 4 rows",
        later[0].key: "policy part is missing",
    }
    with caplog.at_level(logging.WARNING):
        dropped = collector.finish_step(0)
    assert {part.key for part in dropped} == {pair.key for pair in pairs}
    assert str(pairs[1].key) in caplog.text and "3 parts of step 0" in caplog.text
    assert [part.key for part in collector.unjoined()] == [later[0].key]
    outputs = feed(collector, later[0].policy) + feed_pairs(collector, later[1:])
    assert batch_values_equal(as_reference(outputs[0][1]), reference(later))
    assert collector.finish_step(1) == []
