"""One LIBERO task as an environment: reset to a stored state, step, draw pictures when asked."""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import TYPE_CHECKING

import numpy as np

from rlinf_wamrl.envs.libero_setup import bootstrap_libero
from rlinf_wamrl.envs.settings import EnvSettings, Observation
from rlinf_wamrl.envs.suites import TaskSpec, load_init_states

if TYPE_CHECKING:
    from rlinf_wamrl.envs.physics import SimulationState

__all__ = ["CAMERAS", "OPEN_GRIPPER", "LiberoEnv"]

CAMERAS = ("agentview", "robot0_eye_in_hand")
OPEN_GRIPPER = np.array([0.0, 0.0, 0.0, 0.0, 0.0, 0.0, -1.0])
_SETTLED_STATES = 512  # a few kB each


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
        bootstrap_libero()
        # These import MuJoCo, which must find the renderer chosen.
        from rlinf_wamrl.envs.drawing import Drawing
        from rlinf_wamrl.envs.physics import ArmStepper
        from rlinf_wamrl.envs.problem import build_problem, place_objects

        self.task = task
        self.settings = settings
        self.settle_steps = settings.settle_steps or task.settle_steps
        self._init_states = load_init_states(task)
        self._env = build_problem(task, settings)
        self._place_objects = place_objects
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
        return self._stepper.save_state()

    def load_state(self, state: SimulationState) -> None:
        """Go back to a saved state. Poses are as of the next step, which recomputes them."""
        self._stepper.load_state(state)

    def close(self) -> None:
        """Free the drawing context."""
        self._drawing.close()
        self._env.close()

    def _place(self, init_state_id: int, scene_seed: int) -> None:
        if not 0 <= init_state_id < self.num_init_states:
            raise ValueError(
                f"initial state {init_state_id} of '{self.task.name}' does not exist: the task has "
                f"{self.num_init_states}"
            )
        self._place_objects(self._env, scene_seed)
        self._env.sim.set_state_from_flattened(self._init_states[init_state_id])
        self._env.sim.forward()
        self._env._post_process()

    def _observe(self) -> Observation:
        position, quaternion, fingers = self._stepper.end_effector()
        main, wrist = self._drawing.draw()
        proprio = np.concatenate([position, _axis_angle(quaternion), fingers])
        return Observation(main=main, wrist=wrist, proprio=proprio)


def _axis_angle(quaternion: np.ndarray) -> np.ndarray:
    """Rotation vector [3] of a unit xyzw quaternion, as LIBERO's data sets store it."""
    w = min(max(quaternion[3], -1.0), 1.0)
    sine = math.sqrt(1.0 - w * w)
    if math.isclose(sine, 0.0):
        return np.zeros(3)
    return quaternion[:3] * 2.0 * math.acos(w) / sine
