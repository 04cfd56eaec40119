"""``wamrl_demo`` as a LIBERO benchmark, for code that asks LIBERO for its suites."""

from __future__ import annotations

import numpy as np
from libero.libero import benchmark

from rlinf_wamrl.envs.demo import BDDL_DIR, INIT_STATES_FILE, SUITE_NAME
from rlinf_wamrl.envs.suites import load_init_states, load_suite

__all__ = ["WamrlDemoBenchmark", "register"]


class WamrlDemoBenchmark(benchmark.Benchmark):
    """The four demo tasks in the order of their task ids."""

    def __init__(self, task_order_index: int = 0):
        super().__init__(task_order_index=task_order_index)
        self.name = SUITE_NAME
        self._specs = load_suite(SUITE_NAME).tasks
        self.tasks = [
            benchmark.Task(
                name=spec.name,
                language=spec.language,
                problem="WamrlDemoTabletop",
                # Absolute, so that joining it to LIBERO's own folder yields it unchanged.
                problem_folder=str(BDDL_DIR),
                bddl_file=spec.bddl_file.name,
                init_states_file=str(INIT_STATES_FILE),
            )
            for spec in self._specs
        ]
        self.n_tasks = len(self.tasks)

    def get_task_init_states(self, i: int) -> np.ndarray:
        """Stored initial states of task ``i``, float64 [200, 1 + nq + nv]."""
        return load_init_states(self._specs[i])


def register() -> None:
    """Make ``benchmark.get_benchmark_dict()["wamrl_demo"]`` work (idempotent)."""
    benchmark.BENCHMARK_MAPPING[SUITE_NAME] = WamrlDemoBenchmark
