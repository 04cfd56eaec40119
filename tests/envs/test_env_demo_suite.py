"""The self-contained suite: files, tasks, success and experts."""

from pathlib import Path

import numpy as np
import pytest

from rlinf_wamrl.envs import demo
from rlinf_wamrl.envs.demo.expert import Expert
from rlinf_wamrl.envs.libero import LiberoEnv
from rlinf_wamrl.envs.libero_setup import bootstrap_libero
from rlinf_wamrl.envs.settings import EnvSettings
from rlinf_wamrl.envs.suites import load_init_states, load_suite

LIFT, PUSH, PLACE, STACK = range(4)
SETTINGS = EnvSettings(image_size=16, render_quality="light")


@pytest.fixture(scope="module")
def environments():
    built = {}

    def get(task_id):
        if task_id not in built:
            built[task_id] = LiberoEnv(load_suite("wamrl_demo").tasks[task_id], SETTINGS)
        return built[task_id]

    yield get
    for env in built.values():
        env.close()


def run_expert(env, state, noise=0.0, seed=0):
    """Number of steps to success, None without."""
    env.reset(state)
    expert, rng = Expert(env.task.name), np.random.default_rng(seed)
    for step in range(1, env.task.max_steps + 1):
        action = expert.act(env.object_poses(), env.end_effector())
        action[:3] += noise * rng.normal(size=3)
        if env.step(np.clip(action, -1, 1))[0]:
            return step
    return None


@pytest.mark.parametrize("task_id", [LIFT, PUSH, PLACE, STACK])
def test_expert_solves_every_task(environments, task_id):
    steps = [run_expert(environments(task_id), state) for state in (0, 199)]
    assert None not in steps


@pytest.mark.slow
@pytest.mark.parametrize("task_id", [LIFT, PUSH, PLACE, STACK])
def test_expert_solves_95_percent_of_50_states(environments, task_id):
    steps = [run_expert(environments(task_id), state) for state in range(80, 130)]
    assert sum(step is not None for step in steps) >= 48


@pytest.mark.parametrize("task_id", [LIFT, PUSH, PLACE])
def test_expert_recovers_from_noise_and_pushes(environments, task_id):
    env = environments(task_id)
    expert = Expert(env.task.name)
    env.reset(4)
    rng = np.random.default_rng(1)
    solved = False
    for step in range(2 * env.task.max_steps):
        action = expert.act(env.object_poses(), env.end_effector())
        action[:3] += 0.3 * rng.normal(size=3)
        if 25 <= step < 31:
            action = np.array([0.8, -0.8, 0.5, 0, 0, 0, -1.0])  # torn away, gripper opened
        if env.step(np.clip(action, -1, 1))[0]:
            solved = True
            break
    assert solved


def test_doing_nothing_solves_nothing(environments):
    for task_id in (LIFT, PUSH, PLACE, STACK):
        env = environments(task_id)
        env.reset(0)
        assert not any(env.step(np.zeros(7))[0] for _ in range(20))


def test_placing_counts_only_when_released(environments):
    env = environments(PLACE)
    env.reset(0)
    expert = Expert(env.task.name)
    for _ in range(env.task.max_steps):
        action = expert.act(env.object_poses(), env.end_effector())
        if action[6] < 0 and env.object_poses()["red_cube_1"][0][1] > 0.08:
            break  # above the plate, about to let go
        env.step(action)
    holding = np.array([0, 0, -0.05, 0, 0, 0, 1.0])
    assert not any(env.step(holding)[0] for _ in range(10))
    letting_go = np.array([0, 0, 0, 0, 0, 0, -1.0])
    raising = np.array([0, 0, 1.0, 0, 0, 0, -1.0])
    actions = [letting_go] * 4 + [raising] * 10
    assert any(env.step(action)[0] for action in actions)


def test_lifting_must_last(environments):
    """The cube has to stay up for a quarter of a second, not to be thrown past the height."""
    env = environments(LIFT)
    env.reset(0)
    expert = Expert(env.task.name)
    high = 0
    for _ in range(env.task.max_steps):
        solved, _ = env.step(expert.act(env.object_poses(), env.end_effector()))
        # The predicate is evaluated on the poses of the last substep, as is this.
        high = high + 1 if env.object_poses()["red_cube_1"][0][2] >= 1.0 else 0
        assert solved == (high >= 5)
        if solved:
            return
    raise AssertionError("not lifted")


def test_initial_states_are_as_the_script_makes_them():
    from rlinf_wamrl.envs.demo.make_init_states import make_states

    task = load_suite("wamrl_demo").tasks[STACK]
    stored = load_init_states(task)
    np.testing.assert_array_equal(make_states(task, 3).astype(np.float64), stored[:3])


def test_two_hundred_different_settled_states_per_task():
    for task in load_suite("wamrl_demo").tasks:
        states = load_init_states(task)
        assert len(states) == 200
        assert len(np.unique(states, axis=0)) == 200
        objects = (states.shape[1] - 19) // 13  # 1 + (9 + 7 k) + (9 + 6 k) numbers
        speeds = np.abs(states[:, 1 + 9 + 7 * objects :])
        assert speeds[:, 9:].max() < 0.02  # objects rest
    assert demo.INIT_STATES_FILE.stat().st_size < 200_000


def test_libero_lists_the_suite():
    pytest.importorskip("torch")
    bootstrap_libero(with_benchmark=True)
    from libero.libero import benchmark

    suite = benchmark.get_benchmark_dict()["wamrl_demo"]()
    assert suite.get_num_tasks() == 4
    assert suite.get_task(PLACE).language == (
        "pick up the red cube and place it on the green plate"
    )
    assert suite.get_task_init_states(LIFT).shape[0] == 200
    for i in range(4):
        assert suite.get_task(i).language in Path(suite.get_task_bddl_file_path(i)).read_text()


def test_unknown_task_has_no_expert():
    with pytest.raises(ValueError, match="no scripted expert"):
        Expert("fold_the_towel")
