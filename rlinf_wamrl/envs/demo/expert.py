"""Scripted experts for the demo tasks.

An expert is a function of the current state alone: it works out from the poses what remains to be
done and takes one step of it. Noise on its actions, pushes and dropped cubes therefore need no
special case; it goes on from wherever it finds the scene.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from rlinf_wamrl.envs.demo import TASK_NAMES

__all__ = ["Expert"]

Pose = tuple[np.ndarray, np.ndarray]  # position [3] in m, xyzw quaternion [4]

_OPEN, _CLOSE = -1.0, 1.0
_POSITION_GAIN = 15.0  # action per m of error; an action of 1 asks for 5 cm
_YAW_GAIN = 1.5  # action per rad of error
_HALF_CUBE = 0.02
_HOVER = 0.08  # height of the gripper above a cube it approaches
_CARRY = 0.07  # height of a carried cube above its goal
_RED, _BLUE, _PLATE = "red_cube_1", "blue_cube_1", "green_plate_1"
_ZONE = "main_table_goal_zone"

# Height of a cube's centre above the centre of what it stands on.
_STANDS_ON = {_PLATE: 0.005 + _HALF_CUBE, _RED: 2 * _HALF_CUBE}


class Expert:
    """Solves one demo task from the state of the scene.

    Args:
        task_name: One of :data:`rlinf_wamrl.envs.demo.TASK_NAMES`.

    Raises:
        ValueError: There is no expert for the task.
    """

    def __init__(self, task_name: str) -> None:
        if task_name not in TASK_NAMES:
            raise ValueError(f"no scripted expert for task {task_name!r}; there are {TASK_NAMES}")
        lift, push, place, stack = TASK_NAMES
        self._plan = {
            lift: self._lift,
            push: self._push,
            place: lambda: self._place((_RED, _PLATE)),
            stack: lambda: self._place((_RED, _PLATE), (_BLUE, _RED)),
        }[task_name]

    def act(
        self,
        poses: Mapping[str, Pose],
        end_effector: tuple[np.ndarray, np.ndarray, np.ndarray],
    ) -> np.ndarray:
        """Next action.

        Args:
            poses: As returned by :meth:`rlinf_wamrl.envs.libero.LiberoEnv.object_poses`.
            end_effector: Position [3], xyzw quaternion [4] and finger positions [2].

        Returns:
            float64 [7] in [-1, 1]: position delta 3, rotation delta 3, gripper.
        """
        self._poses = poses
        self._hand, self._hand_quat, fingers = end_effector
        self._width = fingers[0] - fingers[1]
        return self._plan()

    def _lift(self) -> np.ndarray:
        if self._holds(_RED):
            return self._move(self._hand + [0.0, 0.0, 0.1], _CLOSE)
        return self._grasp(_RED)

    def _place(self, *pairs: tuple[str, str]) -> np.ndarray:
        placed = None
        for cube, support in pairs:
            if not self._stands(cube, support):
                if placed is not None and self._near(placed, 0.05) and not self._holds(cube):
                    break
                return self._bring(cube, support)
            placed = cube
        if self._near(placed) and self._width < 0.06:
            return self._move(self._hand, _OPEN)
        return self._move(self._hand + [0.0, 0.0, 0.1], _OPEN)

    def _bring(self, cube: str, support: str) -> np.ndarray:
        if not self._holds(cube):
            return self._grasp(cube)
        position = self._poses[cube][0]
        goal = self._poses[support][0] + [0.0, 0.0, _STANDS_ON[support]]
        offset = np.linalg.norm(position[:2] - goal[:2])
        height = position[2] - goal[2]
        grip = self._hand - position
        if offset > 0.02 and height < _CARRY - 0.02:
            # Straight up, and only then sideways: other things stand on the table.
            return self._move(self._hand + [0.0, 0.0, 0.06], _CLOSE)
        if offset > 0.008:
            return self._move(goal + [0.0, 0.0, _CARRY] + grip, _CLOSE)
        return self._move(goal + grip - [0.0, 0.0, 0.012], _CLOSE)

    def _push(self) -> np.ndarray:
        cube = self._poses[_RED][0]
        zone = self._poses[_ZONE][0]
        if cube[2] > zone[2] + _HALF_CUBE + 0.02:
            # It stuck to the fingertips and came up with them.
            return self._move(self._hand + [-0.05, 0.0, 0.0], _OPEN)
        if np.all(np.abs(cube[:2] - zone[:2]) < [0.05, 0.12]):
            return self._move(self._hand + [-0.05, 0.0, 0.0], _CLOSE)
        behind = np.array([cube[0] - 0.055, cube[1], cube[2] - 0.003])
        x, y = self._hand[:2] - cube[:2]
        height = self._hand[2] - cube[2]
        if abs(y) < 0.015 and -0.12 < x < -0.02 and height < 0.015:
            ahead = np.clip(zone[0] - cube[0] + 0.01, 0.0, 0.03)
            return self._move([self._hand[0] + ahead, *behind[1:]], _CLOSE)
        if abs(y) < 0.015 and -0.09 < x < -0.04:
            return self._move([self._hand[0], *behind[1:]], _CLOSE)
        if height < 0.045:
            return self._move(self._hand + [0.0, 0.0, 0.06], _CLOSE)
        return self._move(behind + [0.0, 0.0, 0.06], _CLOSE)

    def _grasp(self, cube: str) -> np.ndarray:
        position = self._poses[cube][0]
        error = position - self._hand
        turn = self._yaw_error(cube)
        sideways = np.linalg.norm(error[:2])
        if self._near(cube) and abs(turn) < 0.15:
            return self._move(position, _CLOSE, turn)
        if sideways > 0.03 and error[2] > -0.055:
            return self._move(self._hand + [0.0, 0.0, 0.08], _OPEN, turn)
        if sideways > 0.012 or abs(turn) > 0.1:
            return self._move(position + [0.0, 0.0, _HOVER], _OPEN, turn)
        return self._move(position, _OPEN, turn)

    def _holds(self, cube: str) -> bool:
        return self._near(cube, 0.025) and 0.03 < self._width < 0.048

    def _near(self, cube: str, distance: float = 0.014) -> bool:
        return bool(np.linalg.norm(self._poses[cube][0] - self._hand) < distance)

    def _stands(self, cube: str, support: str) -> bool:
        offset = self._poses[cube][0] - self._poses[support][0]
        level = abs(offset[2] - _STANDS_ON[support]) < 0.004
        return bool(level and np.linalg.norm(offset[:2]) < 0.02)

    def _yaw_error(self, cube: str) -> float:
        """Smallest turn that brings the fingers parallel to two sides of the cube, rad."""
        error = _yaw(self._poses[cube][1]) - _yaw(self._hand_quat)
        return (error + np.pi / 4) % (np.pi / 2) - np.pi / 4

    def _move(self, target, grip: float, turn: float = 0.0) -> np.ndarray:
        delta = np.clip((np.asarray(target) - self._hand) * _POSITION_GAIN, -1.0, 1.0)
        return np.array([*delta, 0.0, 0.0, np.clip(turn * _YAW_GAIN, -1.0, 1.0), grip])


def _yaw(quaternion: np.ndarray) -> float:
    """Heading of a body's x axis in the table plane, rad."""
    x, y, z, w = quaternion
    return np.arctan2(2.0 * (w * z + x * y), 1.0 - 2.0 * (y * y + z * z))
