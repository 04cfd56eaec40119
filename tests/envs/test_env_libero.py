"""One environment against LIBERO's own: physics, pictures, initial states."""

import gc

import numpy as np
import pytest
from stock_libero import StockEnv, assert_same_observation, state_of

from rlinf_wamrl.envs.demo.expert import Expert
from rlinf_wamrl.envs.libero import LiberoEnv
from rlinf_wamrl.envs.settings import EnvSettings
from rlinf_wamrl.envs.suites import load_suite

PLACE = 2


@pytest.fixture(scope="module")
def task():
    return load_suite("wamrl_demo").tasks[PLACE]


@pytest.fixture(scope="module")
def light_env(task):
    env = LiberoEnv(task, EnvSettings(image_size=32, render_quality="light"))
    yield env
    env.close()


def expert_actions(env, count, noise=0.0):
    """Actions that the expert takes, as a list; the environment ends where they lead."""
    expert, rng = Expert(env.task.name), np.random.default_rng(0)
    for _ in range(count):
        action = expert.act(env.object_poses(), env.end_effector())
        action[:6] += noise * rng.normal(size=6)
        yield action


def test_physics_pictures_and_success_are_those_of_stock_libero(task):
    env = LiberoEnv(task, EnvSettings(image_size=64, render_quality="stock"))
    first = env.reset(3, scene_seed=11)
    record = []
    for step, action in enumerate(expert_actions(env, task.max_steps, noise=0.1), start=1):
        solved, observation = env.step(action, observe=step % 8 == 0)
        record.append((action, state_of(env), solved, observation))
        if solved:
            break
    assert solved
    # Stock LIBERO draws into whatever context is bound, so it must be the only one.
    env.close()
    stock = StockEnv(task, image_size=64)
    assert_same_observation(first, stock.reset(3, 11, env.settle_steps))
    for step, (action, state, solved, observation) in enumerate(record, start=1):
        expected, done = stock.step(action)
        np.testing.assert_array_equal(state, stock.state())
        assert solved == done
        assert (observation is not None) == (step % 8 == 0 or solved)
        if observation is not None:
            assert_same_observation(observation, expected)


def test_pictures_do_not_depend_on_which_others_are_drawn(light_env):
    actions = np.random.default_rng(1).uniform(-0.5, 0.5, (12, 7))
    light_env.reset(0)
    always = [light_env.step(action, observe=True)[1] for action in actions]
    light_env.reset(0)
    sometimes = [light_env.step(a, observe=i % 4 == 3)[1] for i, a in enumerate(actions)]
    for i in (3, 7, 11):
        np.testing.assert_array_equal(always[i].main, sometimes[i].main)
        np.testing.assert_array_equal(always[i].wrist, sometimes[i].wrist)
    assert sum(observation is None for observation in sometimes) == 9


def test_pictures_are_rotated_not_mirrored(light_env, task):
    poses = {}
    observation = light_env.reset(0)
    poses = light_env.object_poses()
    # Plate at larger y than the cube: the camera faces the robot, so it appears left of it.
    assert poses["green_plate_1"][0][1] > poses["red_cube_1"][0][1]
    picture = observation.main.astype(int)
    red = np.argwhere((picture[..., 0] > 100) & (picture[..., 1] < 60)).mean(axis=0)
    green = np.argwhere((picture[..., 1] > 80) & (picture[..., 0] < 90)).mean(axis=0)
    hand = np.argwhere(picture.min(axis=-1) > 120).mean(axis=0)
    assert green[1] < red[1]
    assert hand[0] < red[0]  # the hand is above the table: the picture stands upright


@pytest.mark.parametrize("quality", ["fast", "light"])
def test_render_quality_leaves_physics_alone(task, quality):
    trajectories = []
    for name in ("stock", quality):
        env = LiberoEnv(task, EnvSettings(image_size=32, render_quality=name))
        env.reset(5)
        for action in np.random.default_rng(2).uniform(-1, 1, (20, 7)):
            env.step(action)
        trajectories.append(state_of(env))
        env.close()
    np.testing.assert_array_equal(*trajectories)


def test_render_qualities_differ_and_show_the_same_scene(task):
    pictures = {}
    for name in ("stock", "fast", "light"):
        env = LiberoEnv(task, EnvSettings(image_size=64, render_quality=name))
        pictures[name] = env.reset(5).main.astype(float)
        env.close()
    for a, b in (("stock", "fast"), ("fast", "light")):
        difference = np.abs(pictures[a] - pictures[b])
        assert 0.0 < difference.mean() < 6.0


def test_initial_state_is_a_function_of_its_number_alone(light_env, task):
    fresh = LiberoEnv(task, EnvSettings(image_size=32, render_quality="light"))
    expected = fresh.reset(7, scene_seed=3)
    expected_state = state_of(fresh)
    # The used environment has a history, and a cached start of another episode.
    light_env.reset(1)
    for action in np.random.default_rng(0).uniform(-1, 1, (9, 7)):
        light_env.step(action)
    np.random.seed(99)
    for _ in range(2):  # built anew, then from the settled states it keeps
        observation = light_env.reset(7, scene_seed=3)
        np.testing.assert_array_equal(state_of(light_env), expected_state)
        np.testing.assert_array_equal(observation.main, expected.main)
        np.testing.assert_array_equal(observation.proprio, expected.proprio)
    assert not np.array_equal(light_env.reset(8, scene_seed=3).proprio, None)
    assert not np.array_equal(state_of(light_env), expected_state)
    fresh.close()


def test_resetting_leaves_the_global_generator_alone(light_env):
    np.random.seed(5)
    light_env.reset(9, scene_seed=1)
    drawn = np.random.rand()
    np.random.seed(5)
    assert drawn == np.random.rand()


def test_a_saved_state_goes_on_bit_for_bit(light_env):
    light_env.reset(2)
    actions = list(expert_actions(light_env, 30))
    light_env.reset(2)
    first = []
    for i, action in enumerate(actions):
        if i == 10:
            saved = light_env.save_state()
        light_env.step(action)
        first.append(state_of(light_env))
    light_env.reset(4)
    light_env.step(actions[0])
    light_env.load_state(saved)
    for action, expected in zip(actions[10:], first[10:], strict=True):
        light_env.step(action)
        np.testing.assert_array_equal(state_of(light_env), expected)


def test_a_collected_environment_takes_no_pictures_with_it(light_env, task):
    expected = light_env.reset(0).main
    other = LiberoEnv(task, EnvSettings(image_size=32, render_quality="light"))
    other.reset(0)
    del other
    gc.collect()
    np.testing.assert_array_equal(light_env.reset(0).main, expected)


@pytest.mark.parametrize("state", [-1, 200])
def test_unknown_initial_state_is_an_error(light_env, state):
    with pytest.raises(ValueError, match="does not exist: the task has 200"):
        light_env.reset(state)


def test_errors_of_a_reset_reach_the_caller(task, monkeypatch):
    env = LiberoEnv(task, EnvSettings(image_size=32, render_quality="light"))

    def broken():
        raise KeyError("broken sampler")

    monkeypatch.setattr(env._env, "reset", broken)
    with pytest.raises(KeyError, match="broken sampler"):
        env.reset(0)


def test_impossible_placement_ends_with_an_error(task, monkeypatch):
    env = LiberoEnv(task, EnvSettings(image_size=32, render_quality="light"))
    from robosuite.utils.errors import RandomizationError

    def crowded():
        raise RandomizationError("no room")

    monkeypatch.setattr(env._env, "reset", crowded)
    with pytest.raises(RuntimeError, match="no valid placement"):
        env.reset(0)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"image_size": 0}, "image_size=0"),
        ({"render_quality": "best"}, "stock, fast, light"),
        ({"max_texture_size": 4}, "max_texture_size=4"),
        ({"settle_steps": 0}, "num_settle_steps=0"),
    ],
)
def test_impossible_settings_are_told_in_words(values, message):
    with pytest.raises(ValueError, match=message):
        EnvSettings(**values)
