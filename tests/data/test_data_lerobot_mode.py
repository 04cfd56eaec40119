"""LeRobot mode: episodes with the right frames, whatever chunks they cross."""

import copy

import numpy as np
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
from rlinf_wamrl.data.embodied_types import (
    EnvPart,
    EnvTransition,
    PolicyOutput,
    PolicyPart,
    TrajectoryKey,
    TrajectorySource,
)
from rlinf_wamrl.data.success_episode import SuccessEpisode

ROWS, CHUNK, WIDTH = 2, 2, 3


def observation(mark: float, task: str = "lift"):
    """Observation of all environments that carries a number in state and image."""
    return {
        "states": torch.full((ROWS, 2), mark) + torch.arange(ROWS)[:, None] / 10,
        "main_images": torch.full((ROWS, 2, 2, 3), int(mark), dtype=torch.uint8),
        "wrist_images": torch.full((ROWS, 1, 2, 2, 3), int(mark) + 1, dtype=torch.uint8),
        "task_descriptions": [f"{task} {row}" for row in range(ROWS)],
    }


def payload(first_mark: float, *, terminations=None, truncations=None, infos=None, **fields):
    none = torch.zeros(ROWS, CHUNK, dtype=torch.bool)
    return {
        "chunk_actions": torch.arange(ROWS * CHUNK * WIDTH * 1.0).reshape(ROWS, CHUNK, WIDTH)
        + 100 * first_mark,
        "obs_list": [observation(first_mark + step) for step in range(CHUNK)],
        "terminations": none if terminations is None else torch.tensor(terminations),
        "truncations": none if truncations is None else torch.tensor(truncations),
        "infos_list": infos or [{} for _ in range(CHUNK)],
        **fields,
    }


def collector_for(**options):
    cfg = run_config(
        env__train__total_num_envs=ROWS,
        algorithm__dagger__online_lerobot__enabled=True,
        **options,
    )
    actors = options.get("actors", 1)
    geometry = RolloutGeometry.from_world_sizes(cfg, env_world_size=1, actor_world_size=actors)
    collector = TrajectoryCollector(TrajectoryPlan(TrajectoryMode.LEROBOT, geometry))
    collector.setup(ChannelContext(cfg=cfg))
    return collector


def feed(collector, payloads, *, step=0, output=None, external=False):
    outputs = []
    for chunk_id, data in enumerate(payloads):
        key = TrajectoryKey(step, 0, 0, 0, chunk_id)
        source = [TrajectorySource(key, ROWS)]
        policy = PolicyPart(
            sources=source,
            obs={},
            output=None if external else output or PolicyOutput(forward_inputs={}),
            external_actions=torch.zeros(ROWS, CHUNK, WIDTH) if external else None,
        )
        env = EnvPart(
            sources=source,
            transition=EnvTransition(episode_data=data),
            initial_transition=EnvTransition() if chunk_id == 0 else None,
        )
        outputs += [*collector.collect(policy, "any"), *collector.collect(env, "any")]
    assert all(key == "default_queue" for key, _ in outputs)
    return [episodes for _, episodes in outputs]


ONE_CHUNK = {"env__train__max_steps_per_rollout_epoch": CHUNK}
SUCCESS = {"episode": {"success_once": torch.ones(ROWS, dtype=torch.bool)}}


def states(episode):
    return [round(float(frame["state"][0]), 1) for frame in episode]


def test_frames_have_the_layout_of_the_dataset_writer():
    end = [[False, True], [False, True]]
    (episodes,) = feed(
        collector_for(**ONE_CHUNK), [payload(3, terminations=end, infos=[SUCCESS] * 2)]
    )
    assert len(episodes) == ROWS
    first, last = episodes[1]
    assert set(first) == {
        "state",
        "actions",
        "task",
        "is_success",
        "done",
        "intervene_flag",
        "segment_id",
        "image",
        "wrist_image",
    }
    assert first["state"].dtype == np.float32 and first["state"].tolist() == [
        np.float32(3.1),
        np.float32(3.1),
    ]
    assert first["actions"].dtype == np.float32 and first["actions"].tolist() == [306, 307, 308]
    assert first["task"] == "lift 1" and last["image"].dtype == np.uint8
    assert (first["image"] == 3).all() and (first["wrist_image"] == 4).all()
    assert [frame["done"].tolist() for frame in (first, last)] == [[False], [True]]
    assert first["is_success"].all() and last["segment_id"].dtype == np.uint8


def test_episodes_go_on_over_chunks_and_iterations():
    collector = collector_for()
    assert feed(collector, [payload(0), payload(2), payload(4)], step=0) == [[]]
    end = [[True, False], [False, False]]
    (episodes,) = feed(collector, [payload(6, terminations=end), payload(8), payload(10)], step=1)
    (episode,) = episodes
    assert states(episode) == [0, 1, 2, 3, 4, 5, 6]
    assert not episode[0]["is_success"].any()
    end = [[False, False], [False, True]]
    (episodes,) = feed(collector, [payload(12, truncations=end), payload(14), payload(16)], step=2)
    assert states(episodes[0]) == [value + 0.1 for value in range(14)]


def test_an_automatic_reset_is_cut_where_the_episodes_meet():
    """The done step's own observation belongs to the next episode's first action."""
    end = [[True, False], [False, False]]
    infos = [
        {
            "final_observation": observation(50),
            "final_info": {"episode": {"success_at_end": torch.tensor([True, False])}},
        },
        {},
    ]
    (episodes,) = feed(
        collector_for(env__train__max_steps_per_rollout_epoch=2 * CHUNK),
        [payload(0, terminations=end, infos=infos), payload(2, terminations=[[False, True]] * 2)],
    )
    assert [states(episode) for episode in episodes] == [[50], [0, 2, 3], [0.1, 1.1, 2.1, 3.1]]
    assert [bool(episode[0]["is_success"]) for episode in episodes] == [True, False, False]


def test_with_a_validity_mask_observations_come_before_their_actions():
    """Unexecuted slots give no frame; a flag on one counts on the last executed slot."""
    valid = torch.tensor([[True, False], [True, True]])
    end = [[False, True], [False, True]]
    infos = [{}, {"final_observation": observation(50), "final_info": SUCCESS}]
    (episodes,) = feed(
        collector_for(**ONE_CHUNK),
        [payload(0, terminations=end, infos=infos, valid_action_mask=valid)],
    )
    assert [states(episode) for episode in episodes] == [[0], [0.1, 1.1]]


def test_only_successes_that_ended_naturally_are_kept_on_request():
    option = {"algorithm__dagger__online_lerobot__only_success": True, **ONE_CHUNK}
    success = {"success": torch.tensor([True, True])}
    (episodes,) = feed(
        collector_for(**option),
        [
            payload(
                0,
                terminations=[[False, True], [False, False]],
                truncations=[[False, False], [False, True]],
                infos=[success, success],
            )
        ],
    )
    assert len(episodes) == 1 and states(episodes[0]) == [0, 1]


def test_episodes_are_dealt_out_over_the_shards():
    end = [[True, True], [True, True]]
    shards = feed(collector_for(actors=2, **ONE_CHUNK), [payload(0, terminations=end)])
    assert [[states(e)[0] for e in shard] for shard in shards] == [[0, 1], [0.1, 1.1]]
    assert feed(collector_for(actors=2, **ONE_CHUNK), [payload(0)]) == [[], []]


def test_the_experts_actions_are_recorded_where_it_took_over():
    expert = torch.full((ROWS, CHUNK * WIDTH), -1.0)
    output = PolicyOutput(
        forward_inputs={"action": expert}, intervene_flags=torch.tensor([[True, False]] * ROWS)
    )
    end = [[False, True]] * ROWS
    (episodes,) = feed(collector_for(**ONE_CHUNK), [payload(0, terminations=end)], output=output)
    first, last = episodes[0]
    assert first["intervene_flag"].all() and (first["actions"] == -1).all()
    assert not last["intervene_flag"].any() and last["actions"].tolist() == [3, 4, 5]
    # What the environment reports goes before what the policy says.
    infos = [
        {
            "intervene_action": torch.full((ROWS, WIDTH), -2.0),
            "intervene_flag": torch.tensor([[True], [False]]),
        },
        {},
    ]
    (episodes,) = feed(
        collector_for(**ONE_CHUNK), [payload(0, terminations=end, infos=infos)], external=True
    )
    assert (episodes[0][0]["actions"] == -2).all() and episodes[0][0]["intervene_flag"].all()
    assert not episodes[1][0]["intervene_flag"].any()


def test_recording_marks_of_real_robots():
    infos = [
        {"segment_advance": torch.tensor([True, False]), "pre_record": torch.tensor([False, True])},
        {"record_reset": torch.tensor([False, True])},
    ]
    end = [[False, True]] * ROWS
    (episodes,) = feed(
        collector_for(env__train__max_steps_per_rollout_epoch=2 * CHUNK),
        [payload(0, infos=infos), payload(2, terminations=end)],
    )
    assert [states(episode) for episode in episodes] == [[0, 1, 2, 3], [1.1, 3.1]]
    assert episodes[0][0]["segment_id"].tolist() == [1]


def test_several_views_and_float_images():
    data = payload(0, terminations=[[False, True]] * ROWS)
    for obs in data["obs_list"]:
        obs["extra_view_images"] = torch.zeros(ROWS, 2, 2, 2, 3)
        obs["main_images"] = torch.full((ROWS, 2, 2, 3), 0.5)
    (episodes,) = feed(collector_for(**ONE_CHUNK), [data])
    assert {"extra_view_image-0", "extra_view_image-1"} <= set(episodes[0][0])
    assert (episodes[0][0]["image"] == 128).all()


def test_a_failed_emission_does_not_advance_the_episodes():
    good = payload(0, terminations=[[False, True]] * ROWS)
    bad = copy.copy(good)
    bad["infos_list"] = [{}]
    collector = collector_for(**ONE_CHUNK)
    with pytest.raises(ValueError, match="2 observations but 1 infos"):
        feed(collector, [bad])
    key = TrajectoryKey(0, 0, 0, 0, 0)
    env = EnvPart(
        sources=[TrajectorySource(key, ROWS)],
        transition=EnvTransition(episode_data=good),
        initial_transition=EnvTransition(),
    )
    ((_, episodes),) = collector.collect(env, "any")
    assert batch_values_equal(episodes, feed(collector_for(**ONE_CHUNK), [good])[0])


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (None, "needs episode_data"),
        (payload(0, chunk_actions=torch.zeros(ROWS, 5)), r"must be \[2, C, 3\]"),
        (payload(0, chunk_actions=torch.zeros(ROWS, 3, WIDTH)), "2 observations for 3 actions"),
    ],
)
def test_payloads_of_another_layout_are_named(data, words):
    with pytest.raises(ValueError, match=words):
        feed(collector_for(**ONE_CHUNK), [data])


def test_an_emitted_episode_becomes_one_of_the_success_buffer():
    end = [[False, True]] * ROWS
    (episodes,) = feed(
        collector_for(**ONE_CHUNK), [payload(3, terminations=end, infos=[SUCCESS] * 2)]
    )
    episode = SuccessEpisode.from_frames(episodes[0], task_id=4, initial_state_id=9)
    assert episode.frames.shape == (2, 3, 2, 4) and episode.frames.dtype == torch.uint8
    assert episode.frames[0, 0].tolist() == [[3, 3, 4, 4], [3, 3, 4, 4]]
    assert episode.executed_actions.tolist() == [[300, 301, 302], [303, 304, 305]]
    assert episode.info.instruction == "lift 0" and episode.task_id == 4
    failed = feed(collector_for(**ONE_CHUNK), [payload(3, terminations=end)])[0][0]
    with pytest.raises(ValueError, match="not marked as a success"):
        SuccessEpisode.from_frames(failed, task_id=0, initial_state_id=0)
    with pytest.raises(ValueError, match=r"no \['other'\]"):
        SuccessEpisode.from_frames(episodes[0], task_id=0, initial_state_id=0, views=["other"])


def test_rollouts_without_payload_are_refused_when_they_arrive():
    pair = Rollouts(rows=ROWS).epoch(1)[0]
    collector = collector_for(**ONE_CHUNK)
    list(collector.collect(pair.policy, "any"))
    with pytest.raises(ValueError, match="needs episode_data"):
        list(collector.collect(pair.env, "any"))
