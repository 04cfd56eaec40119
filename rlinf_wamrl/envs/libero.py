"""One LIBERO task as an environment: reset to a stored state, step, draw pictures when asked."""

from __future__ import annotations

import contextlib
import math
import xml.etree.ElementTree as ET
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

import mujoco
import numpy as np

from rlinf_wamrl.envs.libero_setup import bootstrap_libero, point_libero_at
from rlinf_wamrl.envs.model_xml import draw_arm_by_collision_shapes, shrink_textures
from rlinf_wamrl.envs.suites import TaskSpec, load_init_states

__all__ = [
    "CAMERAS",
    "RENDER_QUALITIES",
    "EnvSettings",
    "LiberoEnv",
    "Observation",
    "SimulationState",
    "build_problem",
    "private_numpy_seed",
]

CAMERAS = ("agentview", "robot0_eye_in_hand")
RENDER_QUALITIES = ("stock", "fast", "light")
OPEN_GRIPPER = np.array([0.0, 0.0, 0.0, 0.0, 0.0, 0.0, -1.0])
_PLACEMENT_TRIES = 20
_SETTLED_STATES = 512


@dataclass(frozen=True, kw_only=True)
class EnvSettings:
    """How an environment draws and settles.

    ``render_quality``: ``stock`` as LIBERO draws (what released checkpoints were trained on);
    ``fast`` without multisampling and mirror reflections; ``light`` also draws the arm by its
    collision meshes (a tenth of the faces).
    """

    image_size: int = 128  # height and width of both cameras, pixels
    render_quality: str = "stock"
    max_texture_size: int | None = None  # larger textures are shrunk, to save memory
    settle_steps: int | None = None  # None: the suite's own number

    def __post_init__(self) -> None:
        if not 16 <= self.image_size <= 1024:
            raise ValueError(f"image_size={self.image_size}: give a size from 16 to 1024 pixels")
        if self.render_quality not in RENDER_QUALITIES:
            raise ValueError(
                f"render_quality={self.render_quality!r}: choose one of "
                f"{', '.join(RENDER_QUALITIES)}"
            )
        if self.max_texture_size is not None and self.max_texture_size < 16:
            raise ValueError(
                f"max_texture_size={self.max_texture_size}: give at least 16 pixels, or null"
            )
        if self.settle_steps is not None and self.settle_steps < 1:
            raise ValueError(
                f"num_settle_steps={self.settle_steps}: give at least 1 step, or null for the "
                "suite's own number"
            )


@dataclass(frozen=True, kw_only=True)
class Observation:
    """What the policy sees."""

    main: np.ndarray  # uint8 [H, W, 3], agentview camera, upright (rotated by 180 degrees)
    wrist: np.ndarray  # uint8 [H, W, 3], eye-in-hand camera, rotated likewise
    proprio: np.ndarray  # float64 [8]: position 3 (m), axis-angle 3 (rad), fingers 2 (m)


@dataclass(frozen=True, kw_only=True)
class SimulationState:
    """Everything that decides how an episode goes on; restoring it continues bit for bit."""

    physics: np.ndarray  # MuJoCo's integration state
    body_pos: np.ndarray  # [nbody, 3], fixtures are placed by moving bodies of the model
    body_quat: np.ndarray  # [nbody, 4]
    site_rgba: np.ndarray  # [nsite, 4], a lit stove is a visible site
    gripper_command: np.ndarray  # [2]
    controller: dict = field(repr=False)
    progress: dict = field(repr=False)  # counters of the problem class


_CONTROLLER_STATE = (
    "goal_pos",
    "goal_ori",
    "ee_pos",
    "ee_ori_mat",
    "ee_pos_vel",
    "ee_ori_vel",
    "joint_pos",
    "joint_vel",
    "J_pos",
    "J_ori",
    "J_full",
    "mass_matrix",
    "new_update",
)


class LiberoEnv:
    """One task of one suite in this process.

    Actions are float [7]: end-effector position delta 3 and rotation delta 3 in [-1, 1] (5 cm and
    0.5 rad per control step at 20 Hz), gripper: -1 opens, +1 closes (its sign counts).

    An initial state is a pure function of ``(task, init_state_id, scene_seed)``: the stored state
    fixes the movable things, the seed the few centimetres by which LIBERO shifts furniture.

    Args:
        task: From :func:`rlinf_wamrl.envs.suites.load_suite`.
        settings: Drawing and settling.

    Raises:
        FileNotFoundError: A mesh or texture is missing.
        RuntimeError: The renderer is missing.
    """

    def __init__(self, task: TaskSpec, settings: EnvSettings) -> None:
        self.task = task
        self.settings = settings
        self.settle_steps = settings.settle_steps or task.settle_steps
        self._init_states = load_init_states(task)
        with private_numpy_seed(0):
            self._env = build_problem(task, settings)
        from rlinf_wamrl.envs.drawing import Drawing
        from rlinf_wamrl.envs.physics import ArmStepper

        self._stepper = ArmStepper(self._env)
        self._drawing = Drawing(self._env, CAMERAS, settings)
        self._settled: OrderedDict[tuple[int, int], SimulationState] = OrderedDict()

    @property
    def num_init_states(self) -> int:
        """How many stored initial states the task has."""
        return len(self._init_states)

    def reset(self, init_state_id: int, scene_seed: int = 0) -> Observation:
        """Start an episode and return its first observation.

        The settled state is kept for the next episode that starts the same way.

        Raises:
            ValueError: No such initial state.
            RuntimeError: LIBERO finds no valid placement for this seed.
        """
        key = (init_state_id, scene_seed)
        if key in self._settled:
            self._settled.move_to_end(key)
            self.load_state(self._settled[key])
        else:
            self._place(init_state_id, scene_seed)
            for _ in range(self.settle_steps - 1):
                self.step(OPEN_GRIPPER)
            self._settled[key] = self.save_state()
            if len(self._settled) > _SETTLED_STATES:
                self._settled.popitem(last=False)
        _, observation = self._advance(OPEN_GRIPPER)
        self._env._steps_goal_held = 0
        return observation

    def step(self, action: np.ndarray, observe: bool = False) -> tuple[bool, Observation | None]:
        """Execute one action.

        Args:
            action: float [7].
            observe: Draw pictures of the state reached. They are also drawn when the step solves
                the task, as this ends an episode.

        Returns:
            Whether the task is solved, and the observation if it was drawn.
        """
        action = np.asarray(action, dtype=np.float64)
        if observe:
            return self._advance(action)
        before = self.save_state()
        self._stepper.step(action)
        self._env._post_process()
        if not self._env._check_success():
            return False, None
        # Whether to draw is only known now: take the same step once more.
        self.load_state(before)
        return self._advance(action)

    def _advance(self, action: np.ndarray) -> tuple[bool, Observation]:
        captured = []
        self._stepper.step(action, lambda: captured.append(self._observe()))
        self._env._post_process()
        return bool(self._env._check_success()), captured[0]

    def object_poses(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Name -> (position [3], m, xyzw quaternion [4]) of each movable object and zone."""
        data, env = self._env.sim.data, self._env
        poses = {}
        for name, body in env.obj_body_id.items():
            poses[name] = (data.xpos[body].copy(), data.xquat[body][[1, 2, 3, 0]])
        for name in env.object_sites_dict:
            site = env.sim.model.site_name2id(name)
            poses[name] = (data.site_xpos[site].copy(), np.array([0.0, 0.0, 0.0, 1.0]))
        return poses

    def end_effector(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Position [3], xyzw quaternion [4] and finger positions [2] of the gripper."""
        return self._stepper.end_effector()

    def save_state(self) -> SimulationState:
        """Copy of the state, to be restored by :meth:`load_state`."""
        model, data = self._stepper.model, self._stepper.data
        physics = np.empty(mujoco.mj_stateSize(model, mujoco.mjtState.mjSTATE_INTEGRATION))
        mujoco.mj_getState(model, data, physics, mujoco.mjtState.mjSTATE_INTEGRATION)
        robot = self._env.robots[0]
        return SimulationState(
            physics=physics,
            body_pos=model.body_pos.copy(),
            body_quat=model.body_quat.copy(),
            site_rgba=model.site_rgba.copy(),
            gripper_command=robot.gripper.current_action,
            # The stepper replaces these arrays, it never writes into them.
            controller={name: getattr(robot.controller, name) for name in _CONTROLLER_STATE},
            progress={"_steps_goal_held": getattr(self._env, "_steps_goal_held", 0)},
        )

    def load_state(self, state: SimulationState) -> None:
        """Go back to a saved state. Poses are as of the next step, which recomputes them."""
        model, data = self._stepper.model, self._stepper.data
        mujoco.mj_setState(model, data, state.physics, mujoco.mjtState.mjSTATE_INTEGRATION)
        model.body_pos[:] = state.body_pos
        model.body_quat[:] = state.body_quat
        model.site_rgba[:] = state.site_rgba
        robot = self._env.robots[0]
        robot.gripper.current_action = state.gripper_command
        for name, value in state.controller.items():
            setattr(robot.controller, name, value)
        for name, value in state.progress.items():
            setattr(self._env, name, value)

    def close(self) -> None:
        """Free the drawing context."""
        self._drawing.close()
        self._env.close()

    def _place(self, init_state_id: int, scene_seed: int) -> None:
        from robosuite.utils.errors import RandomizationError

        if not 0 <= init_state_id < self.num_init_states:
            raise ValueError(
                f"initial state {init_state_id} of '{self.task.name}' does not exist: the task has "
                f"{self.num_init_states}"
            )
        for attempt in range(_PLACEMENT_TRIES):
            with private_numpy_seed(scene_seed + attempt):
                try:
                    self._env.reset()
                    break
                except RandomizationError:
                    continue
        else:
            raise RuntimeError(
                f"LIBERO found no valid placement for '{self.task.name}' with seed {scene_seed} "
                f"in {_PLACEMENT_TRIES} tries"
            )
        self._env.sim.set_state_from_flattened(self._init_states[init_state_id])
        self._env.sim.forward()
        self._env._post_process()

    def _observe(self) -> Observation:
        position, quaternion, fingers = self._stepper.end_effector()
        main, wrist = self._drawing.draw()
        proprio = np.concatenate([position, _axis_angle(quaternion), fingers])
        return Observation(main=main, wrist=wrist, proprio=proprio)


def build_problem(task: TaskSpec, settings: EnvSettings):
    """Construct LIBERO's problem class as its ``OffScreenRenderEnv`` does, without observables.

    Raises:
        FileNotFoundError: A mesh, texture or scene file is missing.
    """
    bootstrap_libero()
    import libero.libero.envs.bddl_utils as bddl_utils
    import robosuite
    from libero.libero.envs import TASK_MAPPING
    from robosuite.utils.binding_utils import MjSim

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
    env._observables.clear()  # polled 25 times per control step, and read by nobody here
    return env


@contextlib.contextmanager
def private_numpy_seed(seed: int) -> Iterator[None]:
    """LIBERO draws placements from numpy's global generator: seed it, then put it back."""
    saved = np.random.get_state()
    np.random.seed(seed % 2**32)
    try:
        yield
    finally:
        np.random.set_state(saved)


def _axis_angle(quaternion: np.ndarray) -> np.ndarray:
    """Rotation vector [3] of a unit xyzw quaternion, as LIBERO's data sets store it."""
    w = min(max(quaternion[3], -1.0), 1.0)
    sine = math.sqrt(1.0 - w * w)
    if math.isclose(sine, 0.0):
        return np.zeros(3)
    return quaternion[:3] * 2.0 * math.acos(w) / sine
