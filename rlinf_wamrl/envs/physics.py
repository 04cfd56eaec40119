"""One control step of LIBERO's arm with the work robosuite repeats left out.

robosuite advances MuJoCo 25 times per control step, runs the full forward dynamics three times in
each (``mj_forward`` twice, then inside ``mj_step``), polls some forty observables each time and
looks names up by string. Here the dynamics run once: ``mj_step1`` gives the controller what it
reads, ``mj_step2`` integrates. The arithmetic is robosuite's own, operation by operation, so the
trajectory is the same to the last bit (a test compares them).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import mujoco
import numpy as np
from robosuite.models.grippers.panda_gripper import PandaGripper
from robosuite.utils.control_utils import (
    nullspace_torques,
    opspace_matrices,
    orientation_error,
    set_goal_orientation,
)

__all__ = ["ArmStepper", "SimulationState"]

# After `set_init_state` a stock environment samples its observables in the 24th of 25 substeps
# (its sampling clock runs two substeps early), so this is what every recorded dataset shows.
OBSERVED_SUBSTEP = 24
_FINGER_DIRECTIONS = np.array([-1.0, 1.0])  # of a closing gripper


@dataclass(frozen=True, kw_only=True)
class SimulationState:
    """Everything that decides how an episode goes on; restoring it continues bit for bit."""

    physics: np.ndarray  # MuJoCo's integration state
    body_pos: np.ndarray  # [nbody, 3], fixtures are placed by moving bodies of the model
    body_quat: np.ndarray  # [nbody, 4]
    site_rgba: np.ndarray  # [nsite, 4], a lit stove is a visible site
    gripper_command: np.ndarray  # [2]
    controller: dict = field(repr=False)
    steps_goal_held: int  # of the demo suite's problem class


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


class ArmStepper:
    """Steps a robosuite single-arm environment under its OSC_POSE controller.

    Args:
        env: A constructed and reset robosuite environment (``BDDLBaseDomain``) with one robot,
            fixed-impedance OSC_POSE deltas, no interpolation and Panda's gripper, LIBERO's only
            configuration.

    Raises:
        ValueError: The environment uses another controller or gripper.
    """

    def __init__(self, env) -> None:
        robot = env.robots[0]
        controller = robot.controller
        if controller.name != "OSC_POSE" or controller.impedance_mode != "fixed":
            raise ValueError(f"only fixed-impedance OSC_POSE is supported, not {controller.name}")
        if not controller.uncoupling or controller.interpolator_pos is not None:
            raise ValueError("only uncoupled, uninterpolated OSC_POSE is supported")
        if type(robot.gripper) is not PandaGripper:
            raise ValueError(
                f"only Panda's gripper is supported, not {type(robot.gripper).__name__}"
            )
        self._env = env
        self.model = env.sim.model._model
        self.data = data = env.sim.data._data
        self.substeps = int(env.control_timestep / env.model_timestep)
        self._site = env.sim.model.site_name2id(controller.eef_name)
        self._hand_body = env.sim.model.body_name2id(robot.robot_model.eef_name)
        self._qpos_index = np.array(controller.qpos_index)
        self._qvel_index = np.array(controller.qvel_index)
        self._finger_qpos = np.array(robot._ref_gripper_joint_pos_indexes)
        self._arm_actuators = np.array(robot._ref_joint_actuator_indexes)
        self._torque_low, self._torque_high = (np.array(limit) for limit in robot.torque_limits)
        gripper = robot.gripper
        self._finger_actuators = [env.sim.model.actuator_name2id(a) for a in gripper.actuators]
        ctrl_range = env.sim.model.actuator_ctrlrange[self._finger_actuators]
        self._finger_bias = 0.5 * (ctrl_range[:, 1] + ctrl_range[:, 0])
        self._finger_weight = 0.5 * (ctrl_range[:, 1] - ctrl_range[:, 0])
        self._jacp = np.zeros((3, self.model.nv))
        self._jacr = np.zeros((3, self.model.nv))
        self._mass = np.zeros((self.model.nv, self.model.nv))
        # Views of MuJoCo's arrays; asking `data` for them costs more than what is done with them.
        self._qpos, self._qvel, self._ctrl, self._inertia = data.qpos, data.qvel, data.ctrl, data.qM
        self._bias = data.qfrc_bias
        self._site_xpos = data.site_xpos[self._site]
        self._site_xmat = data.site_xmat[self._site].reshape(3, 3)

    def step(self, action: np.ndarray, on_observed=None) -> None:
        """Advance one control step (0.05 s).

        Args:
            action: float64 [7]: end-effector delta in [-1, 1] (5 cm, 0.5 rad), gripper -1 open,
                +1 close.
            on_observed: Called at the substep whose state a stock environment observes.
        """
        robot = self._env.robots[0]
        controller, gripper = robot.controller, robot.gripper
        model, data = self.model, self.data
        finger_move = _FINGER_DIRECTIONS * gripper.speed * np.sign(action[6:])
        for substep in range(1, self.substeps + 1):
            mujoco.mj_step1(model, data)
            # As in robosuite, a controller made by the last reset keeps what it read then for its
            # first substep, although the initial state was set afterwards.
            if controller.new_update:
                self._read_kinematics(controller)
            controller.new_update = True
            if substep == 1:
                self._set_goal(controller, action[:6])
            # Not `np.clip`, whose wrappers take longer than all else here.
            torques = np.maximum(self._torques(controller), self._torque_low)
            self._ctrl[self._arm_actuators] = np.minimum(torques, self._torque_high)
            fingers = np.minimum(np.maximum(gripper.current_action + finger_move, -1.0), 1.0)
            gripper.current_action = fingers
            self._ctrl[self._finger_actuators] = self._finger_bias + self._finger_weight * fingers
            mujoco.mj_step2(model, data)
            if substep == OBSERVED_SUBSTEP and on_observed is not None:
                on_observed()

    def end_effector(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Position [3] (m), xyzw quaternion [4], finger positions [2] (m), as of the last step."""
        quat = self.data.xquat[self._hand_body]
        return (
            self.data.site_xpos[self._site].copy(),
            quat[[1, 2, 3, 0]],
            self.data.qpos[self._finger_qpos],
        )

    def save_state(self) -> SimulationState:
        """Copy of the state, to be restored by :meth:`load_state`."""
        model, data = self.model, self.data
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
            steps_goal_held=getattr(self._env, "steps_goal_held", 0),
        )

    def load_state(self, state: SimulationState) -> None:
        """Go back to a saved state. Poses are as of the next step, which recomputes them."""
        model, data = self.model, self.data
        mujoco.mj_setState(model, data, state.physics, mujoco.mjtState.mjSTATE_INTEGRATION)
        model.body_pos[:] = state.body_pos
        model.body_quat[:] = state.body_quat
        model.site_rgba[:] = state.site_rgba
        robot = self._env.robots[0]
        robot.gripper.current_action = state.gripper_command
        for name, value in state.controller.items():
            setattr(robot.controller, name, value)
        self._env.steps_goal_held = state.steps_goal_held

    def _read_kinematics(self, controller) -> None:
        model, data, qvel_index = self.model, self.data, self._qvel_index
        mujoco.mj_jacSite(model, data, self._jacp, self._jacr, self._site)
        mujoco.mj_fullM(model, self._mass, self._inertia)
        controller.ee_pos = self._site_xpos.copy()
        controller.ee_ori_mat = self._site_xmat.copy()
        controller.ee_pos_vel = np.dot(self._jacp, self._qvel)
        controller.ee_ori_vel = np.dot(self._jacr, self._qvel)
        controller.joint_pos = self._qpos[self._qpos_index]
        controller.joint_vel = self._qvel[qvel_index]
        controller.J_pos = self._jacp[:, qvel_index]
        controller.J_ori = self._jacr[:, qvel_index]
        controller.J_full = np.concatenate([controller.J_pos, controller.J_ori])
        controller.mass_matrix = self._mass[qvel_index, :][:, qvel_index]

    @staticmethod
    def _set_goal(controller, delta: np.ndarray) -> None:
        scaled = controller.scale_action(delta)
        # robosuite keeps the old orientation goal when no rotation is asked for.
        if any(not math.isclose(value, 0.0) for value in scaled[3:]):
            controller.goal_ori = set_goal_orientation(
                scaled[3:], controller.ee_ori_mat, orientation_limit=controller.orientation_limits
            )
        controller.goal_pos = controller.ee_pos + scaled[:3]

    def _torques(self, controller) -> np.ndarray:
        rotation_error = orientation_error(controller.goal_ori, controller.ee_ori_mat)
        kp, kd = controller.kp, controller.kd
        force = (controller.goal_pos - controller.ee_pos) * kp[:3] - controller.ee_pos_vel * kd[:3]
        torque = rotation_error * kp[3:] - controller.ee_ori_vel * kd[3:]
        _, lambda_pos, lambda_ori, nullspace = opspace_matrices(
            controller.mass_matrix, controller.J_full, controller.J_pos, controller.J_ori
        )
        wrench = np.concatenate([np.dot(lambda_pos, force), np.dot(lambda_ori, torque)])
        torques = np.dot(controller.J_full.T, wrench) + self._bias[self._qvel_index]
        torques += nullspace_torques(
            controller.mass_matrix,
            nullspace,
            controller.initial_joint,
            controller.joint_pos,
            controller.joint_vel,
        )
        return torques
