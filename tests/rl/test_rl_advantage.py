"""Returns, group advantages and task weights against closed forms."""

import pytest
import torch

from rlinf_wamrl.rl.advantage import (
    episode_returns,
    group_advantages,
    reconstruction_share,
    step_advantages,
    task_sampling_weights,
    update_success_average,
    weigh_episodes_alike,
)


def test_reconstruction_enters_the_return_as_a_mean_over_existing_steps():
    task = torch.tensor([[0.0, 0.0], [0.0, 1.0], [0.0, 0.0]])
    rec = torch.tensor([[1.0, 3.0], [3.0, 5.0], [5.0, float("nan")]])
    mask = torch.tensor([[True, True], [True, True], [True, False]])
    returns = episode_returns(task, rec, mask, lambda_rec=0.1)
    torch.testing.assert_close(returns, torch.tensor([0.3, 1.4]))


def test_a_longer_episode_earns_no_more_reconstruction_reward():
    rec = torch.full((6, 2), 2.0)
    mask = torch.ones(6, 2, dtype=torch.bool)
    mask[2:, 0] = False
    returns = episode_returns(torch.zeros(6, 2), rec, mask, lambda_rec=0.5)
    assert returns[0] == returns[1] == 1.0


def test_advantages_of_a_mixed_group_have_mean_zero_and_std_one():
    returns = torch.tensor([1.0, 0.0, 0.0, 1.0, 0.2, 0.4, 0.6, 0.8])
    result = group_advantages(returns, returns, 4)
    groups = result.advantage.view(2, 4)
    torch.testing.assert_close(groups.mean(1), torch.zeros(2), atol=1e-6, rtol=0)
    torch.testing.assert_close(groups.std(1, correction=0), torch.ones(2))
    assert result.advantage[0] == 1.0 and result.advantage[1] == -1.0


def test_degenerate_is_judged_by_the_task_alone():
    task = torch.tensor([1.0, 1.0, 0.0, 1.0])
    returns = task + torch.tensor([0.01, 0.02, 0.03, 0.04])
    dropped = group_advantages(returns, task, 2)
    assert dropped.is_degenerate.tolist() == [True, False]
    assert dropped.is_used.tolist() == [False, False, True, True]
    assert dropped.advantage[:2].tolist() == [0.0, 0.0]
    kept = group_advantages(returns, task, 2, degenerate="keep")
    torch.testing.assert_close(kept.advantage[:2], torch.tensor([-1.0, 1.0]), rtol=1e-4, atol=0)
    rec_only = group_advantages(returns, task, 2, degenerate="rec_only")
    small = torch.tensor([-0.005, 0.005])
    torch.testing.assert_close(rec_only.advantage[:2], small, rtol=1e-4, atol=0)
    torch.testing.assert_close(rec_only.advantage[2:], kept.advantage[2:])
    assert kept.is_used.all() and rec_only.is_used.all()


def test_the_floor_of_the_divisor_keeps_tiny_spreads_small():
    task = torch.zeros(2)
    returns = torch.tensor([0.0, 3.2e-4])
    result = group_advantages(returns, task, 2, degenerate="keep", min_std=1e-3)
    torch.testing.assert_close(result.advantage, torch.tensor([-0.16, 0.16]))


def test_equal_returns_give_zero_and_no_nan():
    for mode in ("drop", "keep", "rec_only"):
        result = group_advantages(torch.ones(4), torch.ones(4), 4, degenerate=mode)
        assert torch.equal(result.advantage, torch.zeros(4))


def test_step_part_is_relative_to_members_that_still_run():
    valid = torch.tensor([[True, True], [True, False]])
    rec = torch.tensor([[1.0, 3.0], [5.0, float("nan")]])
    steps = step_advantages(
        torch.tensor([1.0, -1.0]), valid, 2, reconstruction_reward=rec, lambda_step=0.5
    )
    torch.testing.assert_close(steps, torch.tensor([[0.5, -0.5], [1.0, 0.0]]))


def test_members_without_a_reward_neither_get_a_step_part_nor_move_the_mean():
    valid = torch.ones(1, 4, dtype=torch.bool)
    mask = torch.tensor([[True, True, False, False]])
    rec = torch.tensor([[1.0, 3.0, float("nan"), 7.0]])
    steps = step_advantages(
        torch.zeros(4),
        valid,
        4,
        reconstruction_reward=rec,
        reconstruction_mask=mask,
        lambda_step=1.0,
    )
    torch.testing.assert_close(steps, torch.tensor([[-1.0, 1.0, 0.0, 0.0]]))


def test_success_average_takes_the_first_result_and_keeps_untried_tasks():
    average = torch.tensor([float("nan"), 0.5, 0.25])
    updated = update_success_average(
        average, torch.tensor([3, 4, 0]), torch.tensor([4, 4, 0]), decay=0.9
    )
    torch.testing.assert_close(updated, torch.tensor([0.75, 0.55, 0.25]))


def test_learnable_weights_prefer_half_solved_tasks_and_hard_ones_failing_tasks():
    p = torch.tensor([0.0, 0.5, 1.0, float("nan")])
    learnable = task_sampling_weights(p, "learnable", epsilon=0.05)
    torch.testing.assert_close(learnable, torch.tensor([0.05, 0.3, 0.05, 0.3]) / 0.7)
    hard = task_sampling_weights(p, "hard", epsilon=0.0, beta=2.0)
    torch.testing.assert_close(hard, torch.tensor([1.0, 0.25, 0.0, 0.25]) / 1.5)
    assert torch.equal(task_sampling_weights(p, "uniform"), torch.full((4,), 0.25))


@pytest.mark.parametrize(
    ("arguments", "options", "words"),
    [
        ((torch.ones(2), torch.ones(2), 1), {}, "at least 2"),
        ((torch.ones(3), torch.ones(3), 2), {}, "multiple"),
        ((torch.ones(2), torch.ones(2), 2), {"degenerate": "skip"}, "drop"),
    ],
)
def test_impossible_groups_say_what_is_wrong(arguments, options, words):
    with pytest.raises(ValueError, match=words):
        group_advantages(*arguments, **options)


def test_episodes_of_any_length_weigh_alike_and_a_group_sums_to_zero_over_its_macro_steps():
    lengths = torch.tensor([2, 6, 6, 6])
    valid = torch.arange(6)[:, None] < lengths
    outcome = torch.tensor([1.0, 0.0, 0.0, 0.0])
    advantage = group_advantages(outcome, outcome, 4).advantage
    steps = step_advantages(advantage, valid, 4)
    assert steps.sum() < -4  # what is avoided
    weighed = weigh_episodes_alike(steps, valid)
    torch.testing.assert_close(weighed.sum(0), 5.0 * advantage)  # the mean length is 5
    assert (weighed[~valid] == 0).all()
    same = torch.ones(6, 4, dtype=torch.bool)
    steps = step_advantages(advantage, same, 4)
    torch.testing.assert_close(weigh_episodes_alike(steps, same), steps)


def test_the_share_of_the_reconstruction_is_of_the_variance_within_groups_that_teach():
    task = torch.tensor([1.0, 0.0, 0.0, 0.0])
    dense = torch.tensor([0.3, -0.1, 5.0, 9.0])  # the second group is degenerate
    expected = 0.2**2 / (0.2**2 + 0.5**2)
    assert reconstruction_share(task + dense, task, 2) == pytest.approx(expected)
    assert reconstruction_share(task, task, 2) == 0.0
    assert reconstruction_share(dense, torch.zeros(4), 2) == 0.0
