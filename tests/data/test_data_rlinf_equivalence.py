"""Rollout mode gives the very batch that RLinf 0.3.0 makes of the same rollouts."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from synthetic_rollout import Rollouts, run_config

from rlinf_wamrl.data.batch_values import batch_values_equal
from rlinf_wamrl.data.embodied_trajectory import (
    ChannelContext,
    RolloutGeometry,
    TrajectoryCollector,
    TrajectoryMode,
    TrajectoryPlan,
)
from rlinf_wamrl.data.embodied_types import Trajectory

struct = pytest.importorskip("rlinf.data.embodied_io_struct", reason="needs RLinf 0.3.0's own path")
reference = pytest.importorskip("rlinf_reference_path")

CHUNKS = 3


def own_trajectories(cfg, sources, *, env_ranks, actors):
    geometry = RolloutGeometry.from_world_sizes(
        cfg, env_world_size=env_ranks, actor_world_size=actors
    )
    collector = TrajectoryCollector(TrajectoryPlan(TrajectoryMode.ROLLOUT, geometry))
    collector.setup(ChannelContext(cfg=cfg))
    return [
        trajectory
        for epochs in sources
        for pairs in epochs
        for pair in pairs
        for part in (pair.policy, pair.env)
        for _, trajectory in collector.collect(part, "any")
    ]


def assert_same(cfg, sources, *, env_ranks=1, actors=1):
    own = own_trajectories(cfg, sources, env_ranks=env_ranks, actors=actors)
    shards = len(own) // len(sources)
    theirs = [
        trajectory
        for epochs in sources
        for trajectory in reference.collect_source(epochs, cfg).to_splited_trajectories(shards)
    ]
    for mine, other in zip(own, theirs, strict=True):
        for name in other.__dataclass_fields__:
            assert batch_values_equal(getattr(mine, name), getattr(other, name)), name
    # Each actor merges what it drew; here every second shard, then all of them.
    for part in (slice(None, None, 2), slice(None)):
        expected = struct.convert_trajectories_to_batch(theirs[part])
        batch = Trajectory.to_batch(own[part])
        assert batch.keys() == expected.keys()
        for key in expected:
            assert batch_values_equal(batch[key], expected[key]), key
    return own


@pytest.mark.parametrize("epochs", [1, 2])
@pytest.mark.parametrize(("env_ranks", "stages", "actors"), [(1, 1, 1), (1, 1, 2), (2, 2, 2)])
def test_plain_rollouts(epochs, env_ranks, stages, actors):
    cfg = run_config(
        env__train__rollout_epoch=epochs,
        rollout__pipeline_stage_num=stages,
        env__train__total_num_envs=4 * env_ranks * stages,
    )
    sources = []
    for rank in range(env_ranks):
        for stage in range(stages):
            rollouts = Rollouts(seed=10 * rank + stage)
            sources.append(
                [
                    rollouts.epoch(CHUNKS, epoch=epoch, env_rank=rank, stage=stage)
                    for epoch in range(epochs)
                ]
            )
    assert_same(cfg, sources, env_ranks=env_ranks, actors=actors)


def test_half_precision_leaves_and_no_values():
    pairs = Rollouts(with_values=False).epoch(CHUNKS)
    for pair in pairs:
        inputs = pair.policy.output.forward_inputs
        inputs["chain"] = inputs["chain"].bfloat16()
    (trajectory,) = assert_same(run_config(), [[pairs]])
    assert trajectory.forward_inputs["chain"].dtype == torch.bfloat16


def test_one_chunk_of_one_environment():
    cfg = run_config(env__train__total_num_envs=1, env__train__max_steps_per_rollout_epoch=2)
    assert_same(cfg, [[Rollouts(rows=1).epoch(1)]])


@pytest.mark.parametrize("bootstrap_type", ["standard", "always"])
def test_bootstrapped_and_scored_rewards(bootstrap_type):
    cfg = run_config(
        env__train__auto_reset=True,
        algorithm__bootstrap_type=bootstrap_type,
        algorithm__gamma=0.9,
        reward__env_reward_weight=0.5,
        reward__reward_weight=2.0,
    )
    rollouts = Rollouts()
    pairs = rollouts.epoch(CHUNKS)
    for pair in pairs:
        transition = pair.env.transition
        transition.truncations = rollouts.flags(4, 2, probability=0.5)
        transition.dones = transition.terminations | transition.truncations
        pair.env.bootstrap_values = rollouts.normal(4, 1)
        transition.reward_model_output = rollouts.normal(4, 2)
        transition.reward_assign_lengths = [1, 2, 3, 0]
    (trajectory,) = assert_same(cfg, [[pairs]])
    assert not torch.equal(trajectory.rewards[0], pairs[0].env.transition.rewards)


def test_interventions():
    rollouts = Rollouts()
    pairs = rollouts.epoch(CHUNKS)
    for pair in pairs[:2]:
        pair.env.transition.intervene_actions = rollouts.normal(4, 6)
        pair.env.transition.intervene_flags = rollouts.flags(4, 2, probability=0.5)
        pair.policy.output.forward_inputs["model_action"] = torch.zeros(4, 6)
    for pair in pairs[2:]:
        pair.env.transition.intervene_actions = rollouts.normal(4, 6)
        pair.env.transition.intervene_flags = torch.zeros(4, 2, dtype=torch.bool)
        pair.policy.output.forward_inputs["model_action"] = torch.zeros(4, 6)
    (trajectory,) = assert_same(run_config(), [[pairs]])
    extracted = trajectory.extract_intervene_traj()
    theirs = reference.collect_source([pairs], run_config()).to_trajectory()
    theirs.prev_values = None  # its mask has no room for the final value
    for mine, other in zip(extracted, theirs.extract_intervene_traj(), strict=True):
        for name in ("actions", "rewards", "dones", "terminations", "intervene_flags"):
            assert batch_values_equal(getattr(mine, name), getattr(other, name)), name


def test_the_benchmark_of_both_paths_runs(capsys, monkeypatch):
    path = Path(__file__).resolve().parents[1] / "benchmarks" / "bench_trajectory_path.py"
    spec = importlib.util.spec_from_file_location("bench_trajectory_path", path)
    bench = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, bench)  # dataclasses look their module up
    spec.loader.exec_module(bench)
    bench.main(["--image", "8", "16", "--chunks", "2", "--environments", "2", "--repeats", "2"])
    table = capsys.readouterr().out
    assert "RLinf 0.3.0" in table and "kB per macro-step" in table
