"""Which episode starts where: pure functions."""

from collections import Counter

import numpy as np
import pytest

from rlinf_wamrl.envs.schedule import (
    Assignment,
    evaluation_assignments,
    scene_seed,
    train_assignment,
)


def assign(iteration, group, seed=1, groups=8, tasks=(0, 2, 3), weights=None):
    return train_assignment(seed, iteration, group, groups, tasks, (0, 80), weights)


def test_assignment_depends_on_its_arguments_alone():
    forward = {(i, g): assign(i, g) for i in range(5) for g in range(8)}
    backward = {(i, g): assign(i, g) for i in reversed(range(5)) for g in reversed(range(8))}
    assert forward == backward


@pytest.mark.parametrize("change", [{"seed": 2}, {"iteration": 1}, {"group": 1}])
def test_every_argument_matters(change):
    where = {"iteration": 0, "group": 0}
    before = [assign(**{**where, "group": g}).init_state_id for g in range(0, 8, 2)]
    after = [
        assign(**{**where, **change, "group": g + change.get("group", 0)}).init_state_id
        for g in range(0, 8, 2)
    ]
    assert before != after


def test_tasks_take_turns_over_groups_and_iterations():
    tasks = [assign(iteration, group).task_id for iteration in range(3) for group in range(8)]
    assert tasks == [0, 2, 3] * 8


def test_initial_states_are_uniform_in_their_range():
    states = [assign(i, g).init_state_id for i in range(200) for g in range(8)]
    assert min(states) == 0
    assert max(states) == 79
    counts = np.array(list(Counter(states).values()))
    assert len(counts) == 80
    # 1600 draws over 80 states: 20 each, standard deviation 4.4.
    assert ((counts - 20) ** 2 / 20).sum() < 130  # chi-square, 79 degrees of freedom, p < 1e-3


def test_weights_are_the_share_of_groups():
    weights = [1.0, 0.0, 3.0]
    tasks = Counter(assign(i, g, weights=weights).task_id for i in range(250) for g in range(8))
    assert set(tasks) == {0, 3}
    assert abs(tasks[3] / 2000 - 0.75) < 0.04


def test_evaluation_lists_every_pair_once_and_balanced():
    pairs = evaluation_assignments([1, 3], (80, 83))
    assert [(pair.task_id, pair.init_state_id) for pair in pairs] == [
        (1, 80),
        (3, 80),
        (1, 81),
        (3, 81),
        (1, 82),
        (3, 82),
    ]


def test_scene_seed_belongs_to_seed_task_and_state():
    seeds = {
        scene_seed(seed, Assignment(task_id=task, init_state_id=state))
        for seed in range(3)
        for task in range(3)
        for state in range(20)
    }
    assert len(seeds) == 180
    assert all(0 <= seed < 2**31 for seed in seeds)
