"""Arena, objects, predicates and problem class behind the BDDL files of ``wamrl_demo``."""

from __future__ import annotations

import re

import numpy as np
from libero.libero.envs.base_object import OBJECTS_DICT, register_object
from libero.libero.envs.bddl_base_domain import TASK_MAPPING, BDDLBaseDomain, register_problem
from libero.libero.envs.predicates import VALIDATE_PREDICATE_FN_DICT
from libero.libero.envs.regions import REGION_SAMPLERS, MultiRegionRandomSampler
from libero.libero.envs.robots import MountedPanda
from robosuite.environments.manipulation.single_arm_env import SingleArmEnv
from robosuite.models.arenas import TableArena
from robosuite.models.objects import MujocoXMLObject
from robosuite.models.tasks import ManipulationTask
from robosuite.robots import ROBOT_CLASS_MAPPING
from robosuite.robots.single_arm import SingleArm

from rlinf_wamrl.envs.demo import ASSETS_DIR

__all__ = ["SUCCESS_STEPS", "WamrlDemoTabletop", "register"]

TABLE_HEIGHT = 0.90
SUCCESS_STEPS = 5  # control steps (0.25 s) in a row in which the whole goal must hold
_RESTING_SPEED = 0.02  # m/s


class _PrimitiveObject(MujocoXMLObject):
    """A free body read from ``assets/<category>.xml``."""

    yaw_range = (0.0, 0.0)  # radians

    def __init__(self, name: str):
        # LIBERO reads the category of an object from its class name.
        self.category_name = "_".join(re.findall("[A-Z][a-z]*", type(self).__name__)).lower()
        super().__init__(
            str(ASSETS_DIR / f"{self.category_name}.xml"),
            name=name,
            joints=[{"type": "free", "damping": "0.0005"}],
            obj_type="all",
            duplicate_collision_geoms=False,
        )
        self.rotation = self.yaw_range
        self.rotation_axis = "z"
        self.object_properties = {"vis_site_names": {}}


class DemoRedCube(_PrimitiveObject):
    """Cube of 4 cm."""

    yaw_range = (-np.pi / 4, np.pi / 4)


class DemoBlueCube(DemoRedCube):
    """Cube of 4 cm."""


class DemoGreenPlate(_PrimitiveObject):
    """Disc of 13 cm across and 1 cm high, which collides as two crossed boxes."""


class _UniformRegionSampler(MultiRegionRandomSampler):
    """Places object centres uniformly in the BDDL rectangle.

    LIBERO's ``TableRegionSampler`` keeps object borders inside and returns xyzw quaternions where
    MuJoCo wants wxyz.
    """

    def __init__(
        self,
        object_name,
        mujoco_objects=None,
        x_ranges=None,
        y_ranges=None,
        rotation=(0.0, 0.0),
        rotation_axis="z",
        reference_pos=(0, 0, 0),
        z_offset=0.001,
    ):
        super().__init__(
            f"table-{object_name}",
            mujoco_objects,
            x_ranges,
            y_ranges,
            rotation,
            rotation_axis,
            ensure_object_boundary_in_range=False,
            ensure_valid_placement=True,
            reference_pos=reference_pos,
            z_offset=z_offset,
        )


class DemoPanda(MountedPanda):
    """LIBERO's Panda without its 33,000-face pedestal: the arena has a box in its place."""

    default_mount = property(lambda self: None)
    base_xpos_offset = property(
        lambda self: {"table": lambda table_length: (-0.16 - table_length / 2, 0, 0.912)}
    )


class Released:
    """Predicate: no part of the gripper touches the object."""

    def __call__(self, state) -> bool:
        """Evaluate for an LIBERO ``ObjectState``."""
        env = state.env
        return not env.check_contact(env.robots[0].gripper, env.get_object(state.object_name))


class Resting:
    """Predicate: the object's centre moves slower than 2 cm/s."""

    def __call__(self, state) -> bool:
        """Evaluate for an LIBERO ``ObjectState``."""
        velocity = state.env.object_velocity(state.object_name)
        return float(np.linalg.norm(velocity)) < _RESTING_SPEED


class WamrlDemoTabletop(TASK_MAPPING["libero_tabletop_manipulation"]):
    """A table with primitive objects; success means the goal held for ``SUCCESS_STEPS`` steps."""

    def __init__(self, bddl_file_name, *args, **kwargs):
        self.workspace_name = "main_table"
        self.visualization_sites_list = []
        self.table_full_size = (1.0, 1.2, 0.05)
        self.table_offset = (0, 0, TABLE_HEIGHT)
        self.z_offset = 0.01 - self.table_full_size[2]
        self.steps_goal_held = 0
        kwargs.update(
            robots=["DemoPanda"],
            workspace_offset=self.table_offset,
            arena_type="table",
            scene_xml=str(ASSETS_DIR / "demo_table_arena.xml"),
        )
        BDDLBaseDomain.__init__(self, bddl_file_name, *args, **kwargs)

    def object_velocity(self, name: str) -> np.ndarray:
        """Linear velocity of an object's free joint, m/s, shape [3]."""
        address = self.sim.model.get_joint_qvel_addr(self.get_object(name).joints[0])[0]
        return self.sim.data.qvel[address : address + 3]

    def _load_model(self):
        # As BDDLBaseDomain, with robosuite's TableArena: LIBERO's own insists on texture files.
        SingleArmEnv._load_model(self)
        robot = self.robots[0].robot_model
        robot.set_base_xpos(robot.base_xpos_offset["table"](self.table_full_size[0]))
        arena = TableArena(
            table_full_size=self.table_full_size,
            table_offset=self.workspace_offset,
            table_friction=(0.6, 0.005, 0.0001),
            has_legs=False,
            xml=self._arena_xml,
        )
        arena.set_origin([0, 0, 0])
        self._load_fixtures_in_arena(arena)
        self._load_objects_in_arena(arena)
        self._load_sites_in_arena(arena)
        self._generate_object_state_wrapper()
        self._setup_placement_initializer(arena)
        self.objects = list(self.objects_dict.values())
        self.fixtures = list(self.fixtures_dict.values())
        self.model = ManipulationTask(
            mujoco_arena=arena,
            mujoco_robots=[robot.robot_model for robot in self.robots],
            mujoco_objects=self.objects + self.fixtures,
        )

    def _reset_internal(self):
        super()._reset_internal()
        self.steps_goal_held = 0

    def _post_process(self):
        super()._post_process()
        # All predicates are evaluated in the order of the BDDL file, the cheap ones first.
        if all(self._eval_predicate(state) for state in self.parsed_problem["goal_state"]):
            self.steps_goal_held += 1
        else:
            self.steps_goal_held = 0

    def _check_success(self):
        return self.steps_goal_held >= SUCCESS_STEPS


def register() -> None:
    """Register objects, predicates, sampler, robot and problem with LIBERO (idempotent)."""
    if WamrlDemoTabletop.__name__.lower() in TASK_MAPPING:
        return
    for cls in (DemoRedCube, DemoBlueCube, DemoGreenPlate):
        register_object(cls)
    assert "demo_red_cube" in OBJECTS_DICT
    VALIDATE_PREDICATE_FN_DICT.update(released=Released(), resting=Resting())
    REGION_SAMPLERS[WamrlDemoTabletop.__name__.lower()] = {"table": _UniformRegionSampler}
    ROBOT_CLASS_MAPPING["DemoPanda"] = SingleArm
    # Not as a decorator: LIBERO's returns None.
    register_problem(WamrlDemoTabletop)
