"""Which task and initial state each episode starts from: pure functions of a few numbers.

No generator is kept between episodes, so an assignment does not depend on when other episodes
ended, on how environments are spread over workers, or on whether the run was resumed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["Assignment", "evaluation_assignments", "scene_seed", "train_assignment"]


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """Where an episode starts."""

    task_id: int
    init_state_id: int


def train_assignment(
    seed: int,
    iteration: int,
    group: int,
    num_groups: int,
    task_ids: Sequence[int],
    init_state_range: tuple[int, int],
    task_weights: Sequence[float] | None = None,
) -> Assignment:
    """Task and initial state that all members of a group share.

    Without weights the tasks take turns over groups and iterations; with weights the task is drawn
    in proportion to them. The initial state is drawn uniformly.

    Args:
        seed: Of the run.
        iteration: Number of the rollout.
        group: Number of the group among all workers.
        num_groups: Groups of all workers.
        task_ids: Tasks to choose from.
        init_state_range: First state and the one after the last.
        task_weights: One non-negative weight for each of ``task_ids``.
    """
    generator = np.random.default_rng([seed, iteration, group])
    state = int(generator.integers(*init_state_range))
    if task_weights is None:
        position = (iteration * num_groups + group) % len(task_ids)
    else:
        probabilities = np.asarray(task_weights, dtype=np.float64)
        position = int(generator.choice(len(task_ids), p=probabilities / probabilities.sum()))
    return Assignment(task_id=task_ids[position], init_state_id=state)


def evaluation_assignments(
    task_ids: Sequence[int], init_state_range: tuple[int, int]
) -> list[Assignment]:
    """Every (task, state) once, the tasks taking turns so that a prefix is balanced too."""
    return [
        Assignment(task_id=task, init_state_id=state)
        for state in range(*init_state_range)
        for task in task_ids
    ]


def scene_seed(seed: int, assignment: Assignment) -> int:
    """Seed of what a stored state leaves open (LIBERO shifts furniture by up to centimetres)."""
    key = [seed, assignment.task_id, assignment.init_state_id]
    return int(np.random.SeedSequence(key).generate_state(1)[0] >> 1)
