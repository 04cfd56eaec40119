"""RLinf's environment interface, as its EnvWorker uses it."""

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from rlinf_wamrl.envs.demo.expert import Expert
from rlinf_wamrl.envs.libero import LiberoEnv
from rlinf_wamrl.envs.rlinf_env import WAMLiberoEnv
from rlinf_wamrl.envs.suites import load_suite

LIFT, PUSH = 0, 1


def section(**changes):
    return OmegaConf.create(
        {
            "task_suite_name": "wamrl_demo",
            "task_ids": [LIFT],
            "init_state_range": [0, 80],
            "image_size": 16,
            "render_quality": "light",
            "num_processes": 2,
            "seed": 1,
            "group_size": 2,
            "total_num_envs": 4,
            "max_episode_steps": None,
            "auto_reset": False,
            "ignore_terminations": False,
            "video_cfg": {"save_video": False},
            **changes,
        }
    )


def make_env(rank=0, ranks=1, num_envs=4, **changes):
    return WAMLiberoEnv(section(**changes), num_envs, rank, ranks, None)


@pytest.fixture(scope="module")
def env():
    made = make_env(task_ids=[LIFT, PUSH])
    yield made
    made.close()


def zeros(length=8, n=4):
    return torch.zeros(n, length, 7)


def test_observation_has_what_the_workers_read(env):
    observation, _ = env.reset()
    [observation], rewards, terminations, truncations, [infos] = env.chunk_step(zeros())
    shapes = {k: (tuple(v.shape), v.dtype) for k, v in observation.items() if torch.is_tensor(v)}
    assert shapes == {
        "main_images": ((4, 16, 16, 3), torch.uint8),
        "wrist_images": ((4, 16, 16, 3), torch.uint8),
        "states": ((4, 8), torch.float32),
        "future_frames": ((4, 2, 3, 16, 32), torch.uint8),
        "future_states": ((4, 2, 8), torch.float32),
        "future_frames_mask": ((4, 2), torch.bool),
        "executed_mask": ((4, 8), torch.bool),
        "task_id": ((4,), torch.int64),
        "seed": ((4,), torch.int64),
        "group_id": ((4,), torch.int64),
        "episode_id": ((4,), torch.int64),
        "init_state_id": ((4,), torch.int64),
        "elapsed_steps": ((4,), torch.int64),
    }
    assert (
        observation["task_descriptions"]
        == ["lift the red cube"] * 2 + ["push the red cube into the green zone"] * 2
    )
    assert rewards.shape == terminations.shape == truncations.shape == (4, 8)
    assert rewards.dtype == torch.float32
    assert terminations.dtype == truncations.dtype == torch.bool
    assert all(value.shape == (4,) for value in infos["episode"].values())


def test_reset_states_what_results_depend_on(env):
    _, infos = env.reset()
    told = infos["environment"]
    assert told["render_quality"] == "light"
    assert told["num_settle_steps"] == 5
    assert told["max_episode_steps"] == [88, 120]
    assert told["mujoco"].count(".") == 2


def test_members_of_a_group_share_task_and_initial_state(env):
    observation, _ = env.reset()
    pairs = [(0, 1), (2, 3)]
    for key in ("main_images", "wrist_images", "states", "task_id", "seed", "init_state_id"):
        for a, b in pairs:
            assert torch.equal(observation[key][a], observation[key][b])
    assert observation["group_id"].tolist() == [0, 0, 1, 1]
    assert observation["episode_id"].tolist() == [0, 1, 2, 3]
    assert observation["task_id"].tolist() == [LIFT, LIFT, PUSH, PUSH]


def test_earlier_observations_are_not_overwritten(env):
    observation, _ = env.reset()
    kept = {k: v.clone() for k, v in observation.items() if torch.is_tensor(v)}
    env.chunk_step(torch.ones(4, 8, 7) * 0.5)
    assert all(torch.equal(observation[key], value) for key, value in kept.items())


class ExpertGroup:
    """Lone environments that follow the same episodes and tell the experts' actions."""

    def __init__(self, env, chosen):
        self.lone = {}
        for slot in chosen:
            assignment = env.assignments[slot // env.group_size]
            task = load_suite("wamrl_demo").tasks[assignment.task_id]
            lone = LiberoEnv(task, env.config.env_settings())
            lone.reset(assignment.init_state_id)
            self.lone[slot] = (lone, Expert(lone.task.name))

    def chunk(self, n, length):
        actions = np.zeros((n, length, 7))
        for slot, (lone, expert) in self.lone.items():
            for step in range(length):
                actions[slot, step] = expert.act(lone.object_poses(), lone.end_effector())
                lone.step(actions[slot, step])
        return actions


def test_success_ends_an_episode_where_it_happens(env):
    env.reset()
    experts = ExpertGroup(env, [0])
    rewards, masks, terminations, truncations = [], [], [], []
    for _ in range(11):
        [observation], reward, termination, truncation, [infos] = env.chunk_step(
            experts.chunk(4, 8)
        )
        rewards.append(reward)
        masks.append(observation["executed_mask"])
        terminations.append(termination)
        truncations.append(truncation)
        if termination[0].any() and len(rewards) < 10:
            frames = observation["future_frames_mask"][0].tolist()
            solved_at = int(observation["executed_mask"][0].sum())
            image = observation["main_images"][0].clone()
            assert frames == [solved_at >= 4, solved_at >= 8]
            [later], reward, *_ = env.chunk_step(zeros())
            assert not later["executed_mask"][0].any()
            assert not later["future_frames_mask"][0].any()
            assert torch.equal(later["main_images"][0], image)
            break
    rewards, executed = torch.cat(rewards, 1), torch.cat(masks, 1)
    terminations, truncations = torch.cat(terminations, 1), torch.cat(truncations, 1)
    steps = int(executed[0].sum())
    assert rewards[0].sum() == 1.0
    assert rewards[0, steps - 1] == 1.0
    assert executed[0, :steps].all()
    assert not terminations[0, : steps - 1].any()
    assert terminations[0, steps - 1 :].all()
    assert not truncations[0].any()
    assert infos["episode"]["success_once"].tolist() == [True, False, False, False]
    assert infos["episode"]["episode_len"][0] == steps
    assert infos["episode"]["return"].tolist() == [1.0, 0.0, 0.0, 0.0]
    assert infos["episode"]["task_id"].tolist() == [LIFT, LIFT, PUSH, PUSH]


def test_limit_truncates_and_later_chunks_execute_nothing():
    env = make_env(max_episode_steps=10)
    env.reset()
    env.chunk_step(zeros())
    [observation], rewards, terminations, truncations, _ = env.chunk_step(zeros())
    assert observation["executed_mask"].tolist() == [[True] * 2 + [False] * 6] * 4
    assert truncations.tolist() == [[False] + [True] * 7] * 4
    assert not terminations.any()
    [observation], rewards, _, truncations, [infos] = env.chunk_step(zeros())
    assert truncations.all()
    assert not observation["executed_mask"].any()
    assert not rewards.any()
    assert infos["episode"]["episode_len"].tolist() == [10] * 4
    env.close()


def test_chunks_may_differ_in_length(env):
    env.reset()
    for length in (2, 8, 5):
        [observation], _, terminations, truncations, _ = env.chunk_step(zeros(length))
        assert observation["executed_mask"].shape == (4, length)
        assert observation["executed_mask"].all()
        assert not (terminations | truncations).any()


def test_ignoring_terminations_truncates_all_together():
    """RLinf then records metrics when all environments are truncated in the same chunk."""
    env = make_env(max_episode_steps=16, ignore_terminations=True)
    env.reset()
    for last in (False, True):
        _, _, terminations, truncations, _ = env.chunk_step(zeros())
        assert not terminations.any()
        assert truncations[:, -1].tolist() == [last] * 4
    env.close()


def test_rollouts_repeat_exactly_and_differ_from_each_other(env):
    env.load_state_dict({"iteration": 5, "task_weights": None})
    first, _ = env.reset()
    actions = np.random.default_rng(0).uniform(-1, 1, (4, 8, 7))
    [moved], *_ = env.chunk_step(actions)
    state = env.state_dict()
    env.update_reset_state_ids()
    other, _ = env.reset()
    assert not torch.equal(other["init_state_id"], first["init_state_id"])
    assert not set(other["group_id"].tolist()) & set(first["group_id"].tolist())
    env.load_state_dict(state)
    again, _ = env.reset()
    [moved_again], *_ = env.chunk_step(actions)
    for a, b in ((first, again), (moved, moved_again)):
        assert all(torch.equal(a[key], b[key]) for key in a if torch.is_tensor(a[key]))


def test_task_weights_choose_later_tasks(env):
    env.set_task_weights([0.0, 1.0])
    env.update_reset_state_ids()
    observation, _ = env.reset()
    assert set(observation["task_id"].tolist()) == {PUSH}
    env.set_task_weights(None)
    env.update_reset_state_ids()
    assert {assignment.task_id for assignment in env.assignments} == {LIFT, PUSH}


@pytest.mark.parametrize("weights", [[1.0], [1.0, -1.0], [0.0, 0.0], [1.0, float("nan")]])
def test_impossible_task_weights_are_told(env, weights):
    with pytest.raises(ValueError, match="give 2 non-negative numbers"):
        env.set_task_weights(weights)


def test_evaluation_covers_every_pair_once_over_ranks_and_epochs():
    seen = []
    for rank in range(2):
        env = make_env(
            rank,
            ranks=2,
            num_envs=2,
            is_eval=True,
            group_size=1,
            task_ids=[LIFT, PUSH],
            init_state_range=[80, 85],
            rollout_epoch=3,
        )
        for _ in range(3):
            seen += [(a.task_id, a.init_state_id) for a in env.assignments if a is not None]
            env.update_reset_state_ids()
        # The next evaluation is the same.
        assert env.assignments[0] == env._assign(0)
        assert env._iteration % 3 == 0
    assert sorted(seen) == [(task, state) for task in (LIFT, PUSH) for state in range(80, 85)]


def test_places_without_an_episode_count_for_nothing():
    env = make_env(is_eval=True, group_size=1, init_state_range=[80, 83], max_episode_steps=8)
    env.reset()
    [observation], _, terminations, truncations, _ = env.chunk_step(zeros())
    assert truncations[:, -1].tolist() == [True, True, True, False]
    assert not terminations.any()
    assert observation["init_state_id"].tolist() == [80, 81, 82, -1]
    assert not observation["executed_mask"][3].any()
    env.close()


def test_incomplete_evaluation_warns(caplog):
    make_env(is_eval=True, group_size=1, init_state_range=[80, 120], rollout_epoch=2)
    assert "covers 8 of the 40" in caplog.text


def test_offload_frees_processes_and_reset_starts_them_again():
    env = make_env()
    before, _ = env.reset()
    assert len(env.vector.process_ids()) == 2
    env.offload()
    assert env.vector.process_ids() == []
    after, _ = env.reset()
    assert torch.equal(before["main_images"], after["main_images"])
    env.close()


def test_rlinf_video_wrapper_accepts_it(tmp_path):
    wrappers = pytest.importorskip("rlinf.envs.wrappers")
    env = make_env()
    video_cfg = OmegaConf.create(
        {"save_video": True, "video_base_dir": str(tmp_path), "info_on_video": False, "fps": 5}
    )
    recorder = wrappers.RecordVideo(env, video_cfg)
    recorder.is_start = True
    recorder.reset()
    recorder.chunk_step(zeros())
    recorder.update_reset_state_ids()
    recorder.flush_video()
    recorder.close()
    assert list(tmp_path.rglob("*.mp4"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task_suite_name": "libero_kitchen"}, "task_suite_name='libero_kitchen' is not known"),
        ({"task_ids": [4]}, r"task_ids=\[4\]: give distinct task numbers .*0: lift the red cube"),
        ({"task_ids": [0, 0]}, "give distinct task numbers"),
        ({"init_state_range": [0, 201]}, r"init_state_range=\[0, 201\]: .* 200 stored"),
        ({"init_state_range": [5, 5]}, "init_state_range"),
        ({"init_state_range": [1]}, "init_state_range"),
        ({"group_size": 3}, "total_num_envs=4: it must be a multiple of group_size=3"),
        ({"group_size": 0}, "group_size=0"),
        ({"group_size": 4, "total_num_envs": 8, "_num_envs": 2}, "does not divide the 2"),
        ({"image_size": 4}, "image_size=4"),
        ({"render_quality": "nice"}, "render_quality='nice'"),
        ({"max_episode_steps": 0}, "max_episode_steps=0"),
        ({"num_settle_steps": 0}, "num_settle_steps=0"),
        ({"num_processes": 0}, "num_processes=0"),
        ({"auto_reset": True}, "auto_reset=True: only false"),
        ({"action_video_freq_ratio": 0}, "action_video_freq_ratio=0"),
        ({"num_future_frames": -1}, "num_future_frames=-1"),
        ({"watchdog_seconds": 0}, "watchdog_seconds=0"),
        ({"seed": None}, "lacks seed"),
        ({"image_size": "large"}, "image_size='large': give a value of type int"),
        ({"group_size": True}, "group_size=True: give a value of type int"),
        ({"task_ids": ["lift"]}, "give a list of integers"),
    ],
)
def test_impossible_configuration_is_told_in_words(changes, message):
    num_envs = changes.pop("_num_envs", 4)
    with pytest.raises(ValueError, match=message):
        make_env(num_envs=num_envs, **changes)


@pytest.mark.parametrize(
    ("actions", "message"),
    [
        (torch.zeros(3, 8, 7), r"shape \[3, 8, 7\], not \[4, C, 7\]"),
        (torch.zeros(4, 8, 6), "shape"),
        (torch.zeros(4, 0, 7), "0 actions"),
        (torch.full((4, 8, 7), float("nan")), "not finite"),
    ],
)
def test_impossible_actions_are_told_in_words(env, actions, message):
    with pytest.raises(ValueError, match=message):
        env.chunk_step(actions)


def test_partial_resets_are_refused(env):
    with pytest.raises(ValueError, match="start together"):
        env.reset(env_idx=[0])
