"""Builds LIBERO's simulation of a task. Import it after ``bootstrap_libero()``."""

from __future__ import annotations

import contextlib
import xml.etree.ElementTree as ET

import libero.libero.envs.bddl_utils as bddl_utils
import mujoco
import numpy as np
import robosuite
from libero.libero.envs import TASK_MAPPING
from robosuite.utils.binding_utils import MjSim
from robosuite.utils.errors import RandomizationError

from rlinf_wamrl.envs.libero_setup import point_libero_at
from rlinf_wamrl.envs.model_xml import draw_arm_by_collision_shapes, shrink_textures
from rlinf_wamrl.envs.settings import EnvSettings
from rlinf_wamrl.envs.suites import TaskSpec

__all__ = ["build_problem", "place_objects"]

_PLACEMENT_TRIES = 20


def build_problem(task: TaskSpec, settings: EnvSettings):
    """Construct LIBERO's problem class as its ``OffScreenRenderEnv`` does, without observables.

    Raises:
        FileNotFoundError: A mesh, texture or scene file is missing.
    """
    if task.assets_root is not None:
        point_libero_at(task.assets_root)

    def initialize_sim(self, xml_string=None):
        model = ET.fromstring(xml_string or self.model.get_xml())
        files = {}
        if settings.render_quality == "light":
            draw_arm_by_collision_shapes(model)
        if settings.max_texture_size is not None:
            files = shrink_textures(model, settings.max_texture_size)
        xml = ET.tostring(model, encoding="unicode")
        self.sim = MjSim(mujoco.MjModel.from_xml_string(xml, files))
        # MuJoCo keeps every decoded mesh and picture, hundreds of MB, for a model that may come.
        mujoco.mj_clearCache(mujoco.mj_getCache())
        self.sim.forward()
        self.initialize_time(self.control_freq)

    problem = TASK_MAPPING[bddl_utils.get_problem_info(str(task.bddl_file))["problem_name"]]
    # LIBERO compares the name of the class with the name in the BDDL file.
    problem = type(problem.__name__, (problem,), {"_initialize_sim": initialize_sim})
    # Construction draws from numpy's global generator, which is not this function's to move.
    saved = np.random.get_state()
    env = problem(
        str(task.bddl_file),
        robots=["Panda"],
        controller_configs=robosuite.load_controller_config(default_controller="OSC_POSE"),
        initialization_noise=None,
        has_renderer=False,
        has_offscreen_renderer=False,
        use_camera_obs=False,
        control_freq=20,
        ignore_done=True,
        hard_reset=False,
    )
    np.random.set_state(saved)
    env._observables.clear()  # polled 25 times per control step, and read by nobody here
    return env


def place_objects(env, seed: int) -> None:
    """Reset a simulation and let LIBERO place everything; a pure function of ``seed``.

    LIBERO's own wrapper swallows every exception of a reset and tries for ever. Here only a failed
    placement is tried again, with the next seed.

    Raises:
        RuntimeError: No valid placement in many tries.
    """
    # LIBERO draws from numpy's global generator: seed it, then put it back.
    saved = np.random.get_state()
    try:
        for attempt in range(_PLACEMENT_TRIES):
            np.random.seed((seed + attempt) % 2**32)
            with contextlib.suppress(RandomizationError):
                env.reset()
                return
    finally:
        np.random.set_state(saved)
    raise RuntimeError(
        f"LIBERO finds no valid placement in {env.bddl_file_name} with seeds {seed} to "
        f"{seed + _PLACEMENT_TRIES - 1}"
    )
