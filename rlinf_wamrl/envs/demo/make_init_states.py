"""Writes ``init_states.npz``: 200 settled initial states for each demo task.

Run ``python -m rlinf_wamrl.envs.demo.make_init_states`` after changing a BDDL file or the arena.
States 0 to 79 are for training, 80 to 199 are held out.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from rlinf_wamrl.envs.demo import INIT_STATES_FILE
from rlinf_wamrl.envs.libero import OPEN_GRIPPER
from rlinf_wamrl.envs.libero_setup import bootstrap_libero
from rlinf_wamrl.envs.settings import EnvSettings
from rlinf_wamrl.envs.suites import TaskSpec, load_suite

STATES_PER_TASK = 200
_SETTLE_STEPS = 10


def make_states(task: TaskSpec, count: int) -> np.ndarray:
    """Sample placements, let them come to rest with an open gripper; float32 [count, 1 + nq + nv].

    State ``i`` depends on ``(task, i)`` alone.
    """
    bootstrap_libero()
    from rlinf_wamrl.envs.physics import ArmStepper
    from rlinf_wamrl.envs.problem import build_problem, place_objects

    env = build_problem(task, EnvSettings())
    stepper = ArmStepper(env)
    states = []
    for index in range(count):
        place_objects(env, 1_000 * (task.task_id + 1) + index)
        for _ in range(_SETTLE_STEPS):
            stepper.step(OPEN_GRIPPER)
        state = env.sim.get_state().flatten()
        state[0] = 0.0  # simulated time
        states.append(state)
    return np.stack(states).astype(np.float32)


def main() -> None:
    """Make the states of all tasks and store them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=INIT_STATES_FILE)
    output = parser.parse_args().output
    tasks = load_suite("wamrl_demo").tasks
    np.savez_compressed(output, **{task.name: make_states(task, STATES_PER_TASK) for task in tasks})


if __name__ == "__main__":
    main()
