"""Suite ``wamrl_demo``: LIBERO-format tasks made of MuJoCo primitives, no mesh downloads.

The Panda comes from the robosuite wheel; table, cubes, plate and zone are boxes and cylinders with
built-in textures. ``domain`` needs LIBERO, ``expert`` needs numpy alone.
"""

from pathlib import Path

__all__ = ["ASSETS_DIR", "BDDL_DIR", "INIT_STATES_FILE", "SUITE_NAME", "TASK_NAMES"]

SUITE_NAME = "wamrl_demo"
_HERE = Path(__file__).parent
ASSETS_DIR = _HERE / "assets"
BDDL_DIR = _HERE / "bddl"
INIT_STATES_FILE = _HERE / "init_states.npz"

# The order is the task id.
TASK_NAMES = (
    "lift_the_red_cube",
    "push_the_red_cube_into_the_green_zone",
    "pick_up_the_red_cube_and_place_it_on_the_green_plate",
    "place_the_red_cube_on_the_green_plate_then_the_blue_cube_on_the_red_cube",
)
