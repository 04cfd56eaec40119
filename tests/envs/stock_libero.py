"""LIBERO's own environment, driven as everyone drives it: the truth that tests compare with."""

from __future__ import annotations

import numpy as np

from rlinf_wamrl.envs.libero import OPEN_GRIPPER
from rlinf_wamrl.envs.libero_setup import bootstrap_libero, point_libero_at
from rlinf_wamrl.envs.suites import TaskSpec, load_init_states


class StockEnv:
    """``OffScreenRenderEnv`` with its defaults: every step renders, every reset rebuilds."""

    def __init__(self, task: TaskSpec, image_size: int, hard_reset: bool = True) -> None:
        bootstrap_libero()
        from libero.libero.envs import OffScreenRenderEnv

        if task.assets_root is not None:
            point_libero_at(task.assets_root)
        self._task = task
        self.env = OffScreenRenderEnv(
            bddl_file_name=str(task.bddl_file),
            camera_heights=image_size,
            camera_widths=image_size,
            hard_reset=hard_reset,
        )

    def reset(self, init_state_id: int, seed: int, settle_steps: int) -> dict:
        self.env.seed(seed)
        self.env.reset()
        obs = self.env.set_init_state(load_init_states(self._task)[init_state_id])
        for _ in range(settle_steps):
            obs, *_ = self.env.step(OPEN_GRIPPER)
        return obs

    def step(self, action: np.ndarray) -> tuple[dict, bool]:
        obs, _, done, _ = self.env.step(action)
        return obs, done

    def state(self) -> np.ndarray:
        return self.env.get_sim_state()


def state_of(env) -> np.ndarray:
    """Time, positions and velocities of a :class:`LiberoEnv`."""
    return env._env.sim.get_state().flatten()


def assert_same_observation(ours, stock: dict) -> None:
    """Pictures rotated by 180 degrees, proprio as position, axis-angle, fingers."""
    from robosuite.utils.transform_utils import quat2axisangle

    np.testing.assert_array_equal(ours.main, stock["agentview_image"][::-1, ::-1])
    np.testing.assert_array_equal(ours.wrist, stock["robot0_eye_in_hand_image"][::-1, ::-1])
    np.testing.assert_array_equal(ours.proprio[:3], stock["robot0_eef_pos"])
    np.testing.assert_allclose(
        ours.proprio[3:6], quat2axisangle(stock["robot0_eef_quat"]), atol=1e-12
    )
    np.testing.assert_array_equal(ours.proprio[6:], stock["robot0_gripper_qpos"])
