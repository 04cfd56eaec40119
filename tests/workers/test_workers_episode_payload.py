"""Episodes that the collector emits from real environments, against a plain replay."""

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from rlinf_wamrl.data.interface import (
    ChannelContext,
    EnvOutput,
    EnvPart,
    EnvTransition,
    PolicyPart,
    RolloutGeometry,
    TrajectoryCollector,
    TrajectoryKey,
    TrajectoryMode,
    TrajectoryPlan,
    TrajectorySource,
)
from rlinf_wamrl.data.recorded_episode import Episode
from rlinf_wamrl.data.success_buffer import SuccessBuffer
from rlinf_wamrl.data.success_episode import SuccessEpisode
from rlinf_wamrl.data.wire import pack_message, unpack_message
from rlinf_wamrl.envs.demo import SUITE_NAME
from rlinf_wamrl.envs.demo.expert import Expert
from rlinf_wamrl.envs.libero import EnvSettings, LiberoEnv
from rlinf_wamrl.envs.rendering import choose_renderer
from rlinf_wamrl.envs.rlinf_env import WAMLiberoEnv
from rlinf_wamrl.envs.suites import load_suite
from rlinf_wamrl.workers.episode_payload import episode_payload

ROWS, CHUNK, STEPS = 2, 8, 100  # 100 steps end inside a chunk
CHUNKS = -(-STEPS // CHUNK)


def play(env, init_state, seed, constant=None):
    """Observations and actions of an episode of the expert, or of one action all the time."""
    expert = Expert(env.task.name)
    seen, done = [env.reset(init_state, seed)], []
    for _ in range(STEPS):
        action = constant
        if constant is None:
            action = expert.act(env.object_poses(), env.end_effector())
        action = np.clip(action, -1.0, 1.0).astype(np.float32)
        solved, observation = env.step(action, observe=True)
        seen.append(observation)
        done.append(action)
        if solved:
            break
    return seen, np.stack(done), solved


def collector(only_success):
    cfg = OmegaConf.create(
        {
            "env": {
                "train": {
                    "total_num_envs": ROWS,
                    "rollout_epoch": 1,
                    "max_steps_per_rollout_epoch": CHUNK * CHUNKS,
                }
            },
            "actor": {"model": {"num_action_chunks": CHUNK, "action_dim": 7}},
            "rollout": {"pipeline_stage_num": 1},
            "algorithm": {
                "dagger": {"online_lerobot": {"enabled": True, "only_success": only_success}}
            },
        }
    )
    geometry = RolloutGeometry.from_world_sizes(cfg, env_world_size=1, actor_world_size=1)
    made = TrajectoryCollector(TrajectoryPlan(TrajectoryMode.LEROBOT, geometry))
    made.setup(ChannelContext(name="test", cfg=cfg))
    return made


@pytest.fixture(scope="module")
def collected():
    """Frames from the collector, and what a plain environment showed for the same actions."""
    choose_renderer()
    section = {
        "task_suite_name": SUITE_NAME,
        "task_ids": [0],
        "init_state_range": [0, 8],
        "total_num_envs": ROWS,
        "group_size": 1,
        "rollout_epoch": 1,
        "max_episode_steps": STEPS,
        "image_size": 32,
        "render_quality": "light",
        "action_video_freq_ratio": 1,
        "num_future_frames": CHUNK - 1,
        "num_processes": 1,
        "seed": 3,
    }
    env = WAMLiberoEnv(section, ROWS, 0, 1)
    try:
        observation, _ = env.reset()
        task = load_suite(SUITE_NAME).tasks[0]
        ids = [(int(observation["init_state_id"][r]), int(observation["seed"][r])) for r in (0, 1)]
        plain = LiberoEnv(task, EnvSettings(image_size=32, render_quality="light"))
        truth = [play(plain, *ids[0]), play(plain, *ids[1], constant=np.zeros(7))]
        plain.close()
        plan = np.zeros((ROWS, CHUNKS * CHUNK, 7), dtype=np.float32)
        for row, (_, actions, _) in enumerate(truth):
            plan[row, : len(actions)] = actions
        before = EnvOutput(obs=observation, transition=EnvTransition())
        parts = []
        for chunk in range(CHUNKS):
            actions = torch.from_numpy(plan[:, chunk * CHUNK : (chunk + 1) * CHUNK])
            (observation,), rewards, terminations, truncations, (info,) = env.chunk_step(actions)
            after = EnvOutput(
                obs=observation,
                transition=EnvTransition(
                    rewards=rewards,
                    terminations=terminations,
                    truncations=truncations,
                    executed_mask=observation["executed_mask"],
                ),
            )
            payload = episode_payload(before, after, actions, info["episode"])
            source = [TrajectorySource(TrajectoryKey(0, 0, 0, 0, chunk), ROWS)]
            parts += [
                PolicyPart(sources=source, obs={}, external_actions=actions),
                EnvPart(
                    sources=source,
                    transition=after.transition.with_trajectory_data(episode_data=payload),
                    initial_transition=EnvTransition() if chunk == 0 else None,
                ),
            ]
            before = after
    finally:
        env.close()
    return parts, truth, ids


def emitted(parts, *, only_success=False):
    made = collector(only_success)
    outputs = [out for part in parts for _, out in made.collect(part, "any")]
    (episodes,) = outputs
    return sorted(episodes, key=lambda frames: frames[0]["episode_id"])


def test_frames_are_what_a_plain_replay_sees_before_each_action_and_after_the_last(collected):
    parts, truth, ids = collected
    for frames, (seen, actions, solved), (init_state, seed) in zip(
        emitted(parts), truth, ids, strict=True
    ):
        episode = Episode.from_frames(frames)
        assert episode.success == solved
        assert len(episode.actions) == len(actions)
        assert np.array_equal(episode.executed_actions, actions)
        assert np.array_equal(episode.main, np.stack([s.main for s in seen]))
        assert np.array_equal(episode.wrist, np.stack([s.wrist for s in seen]))
        proprio = np.stack([s.proprio for s in seen]).astype(np.float32)
        assert np.array_equal(episode.proprio, proprio)
        assert (episode.init_state_id, episode.seed, episode.task_id) == (init_state, seed, 0)
        assert episode.instruction == "lift the red cube"
    assert [solved for *_, solved in truth] == [True, False]


def test_the_way_through_channels_and_shards_changes_nothing(collected):
    parts, *_ = collected
    travelled = [unpack_message(pack_message(part)) for part in parts]
    shards = [
        shard
        for part in travelled
        for shard in (part.split([1, 1]) if isinstance(part, EnvPart) else [part])
    ]
    for direct, sharded in zip(emitted(parts), emitted(shards), strict=True):
        first, second = Episode.from_frames(direct), Episode.from_frames(sharded)
        assert all(np.array_equal(v, getattr(second, k)) for k, v in vars(first).items())


def test_successes_alone_are_emitted_on_request_and_feed_the_success_buffer(collected, tmp_path):
    parts, truth, ids = collected
    (frames,) = emitted(parts, only_success=True)
    episode = SuccessEpisode.from_frames(frames)
    seen, actions, _ = truth[0]
    both = np.stack([np.concatenate([s.main, s.wrist], axis=1) for s in seen[:-1]])
    assert np.array_equal(episode.frames.permute(0, 2, 3, 1).numpy(), both)
    assert np.array_equal(episode.executed_actions.numpy(), actions)
    assert (episode.initial_state_id, episode.seed) == ids[0]
    buffer = SuccessBuffer(capacity_bytes=2**24, memory_bytes=2**24, directory=tmp_path)
    buffer.add(episode)
    windows = buffer.sample(
        2, action_horizon=8, ratio=4, generator=torch.Generator().manual_seed(0)
    )
    assert windows is not None and len(buffer) == 1


def test_frames_without_ids_or_an_end_are_refused(collected):
    parts, *_ = collected
    frames = emitted(parts)[0]
    with pytest.raises(ValueError, match="final_image"):
        Episode.from_frames(frames[:-1])
    bare = [{k: v for k, v in frame.items() if k != "task_id"} for frame in frames]
    with pytest.raises(ValueError, match=r"do not say the episode's \['task_id'\]"):
        SuccessEpisode.from_frames(bare)


def test_a_chunk_without_a_picture_of_every_step_is_refused():
    obs = {"future_frames": torch.zeros(1, 2, 3, 4, 8), "future_states": torch.zeros(1, 2, 8)}
    output = EnvOutput(obs=obs, transition=EnvTransition())
    with pytest.raises(ValueError, match="action_video_freq_ratio=1"):
        episode_payload(output, output, torch.zeros(1, 8, 7), {})
