"""The real LIBERO suites, from a folder that holds their files."""

import os
from pathlib import Path

import numpy as np
import pytest
from stock_libero import StockEnv, assert_same_observation, state_of

from rlinf_wamrl.envs.assets import ASSETS_VARIABLE, verify_libero_assets
from rlinf_wamrl.envs.libero import LiberoEnv
from rlinf_wamrl.envs.settings import EnvSettings
from rlinf_wamrl.envs.suites import load_init_states, load_suite

FILES = Path(
    os.environ.get(ASSETS_VARIABLE) or Path(__file__).parents[3] / "shared" / "libero_assets"
)

pytestmark = pytest.mark.skipif(
    not FILES.is_dir(), reason="needs the files of libero_spatial and libero_object"
)


@pytest.mark.parametrize("suite", ["libero_spatial", "libero_object"])
def test_files_are_upstreams(suite):
    task = load_suite(suite, FILES).tasks[0]
    assert verify_libero_assets(task.assets_root, suite) > 30


def test_initial_states_equal_what_torch_reads():
    torch = pytest.importorskip("torch")
    task = load_suite("libero_object", FILES / "object").tasks[3]
    expected = torch.load(task.init_states_file, weights_only=False)
    np.testing.assert_array_equal(load_init_states(task), expected)


def test_language_is_the_tasks():
    languages = [task.language for task in load_suite("libero_object", FILES).tasks]
    assert languages[3] == "pick up the bbq sauce and place it in the basket"


def test_spatial_task_equals_stock_libero_bit_for_bit():
    task = load_suite("libero_spatial", FILES).tasks[0]
    env = LiberoEnv(task, EnvSettings(image_size=64, render_quality="stock", settle_steps=3))
    first = env.reset(2, scene_seed=5)
    actions = np.random.default_rng(0).uniform(-1, 1, (4, 7))
    record = []
    for step, action in enumerate(actions, start=1):
        _, observation = env.step(action, observe=step % 4 == 0)
        record.append((state_of(env), observation))
    env.close()
    stock = StockEnv(task, image_size=64)
    assert_same_observation(first, stock.reset(2, 5, settle_steps=3))
    for action, (state, observation) in zip(actions, record, strict=True):
        expected, _ = stock.step(action)
        np.testing.assert_array_equal(state, stock.state())
        if observation is not None:
            assert_same_observation(observation, expected)
    stock.env.close()


def test_small_textures_change_pictures_little_and_physics_not():
    task = load_suite("libero_object", FILES).tasks[0]
    results = []
    for limit in (None, 256):
        settings = EnvSettings(
            image_size=64, render_quality="fast", max_texture_size=limit, settle_steps=2
        )
        env = LiberoEnv(task, settings)
        picture = env.reset(0).main.astype(float)
        results.append((picture, state_of(env)))
        env.close()
    np.testing.assert_array_equal(results[0][1], results[1][1])
    assert np.abs(results[0][0] - results[1][0]).mean() < 4.0
