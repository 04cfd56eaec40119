"""A dense self-consistency reward invites an arm to freeze; the default weights must resist.

A toy: an arm (a bright block) either moves, which solves the task half of the time, or freezes,
which never does. The video model is timid, as they are early on: it imagines that nothing happens.
A frozen arm fulfils that prophecy perfectly. The path from pictures to policy gradient is the
product's own.
"""

import imagining
import pytest
import torch

from rlinf_wamrl.rl.advantage import episode_returns, group_advantages, step_advantages
from rlinf_wamrl.rl.losses import ppo_flow_loss
from rlinf_wamrl.rl.moments import Moments, RunningNormaliser
from rlinf_wamrl.rl.reward import RewardSettings, reconstruction_reward

MOVE, FREEZE = 0, 1
GROUPS, GROUP_SIZE, STEPS, ITERATIONS = 8, 8, 3, 60
DEFAULT_LAMBDA_REC = 0.1
SUCCESS_OF_MOVING = 0.5


def pictures(column):
    """uint8 [N, 3, 8, 16]: an arm of 3 x 2 pixels in each of both cameras, at ``column`` [N]."""
    image = torch.full((len(column), 3, 8, 16), 40, dtype=torch.uint8)
    across = torch.arange(16) % 8
    inside = (across >= column[:, None]) & (across < column[:, None] + 2)
    image[:, :, 2:5] = torch.where(inside[:, None, None], 220, image[:, :, 2:5])
    return image


def rewards_of(actions, generator):
    """Raw rewards [N] of macro-steps in which the arm did ``actions`` [N]."""
    start = torch.randint(0, 3, actions.shape, generator=generator)
    speed = torch.where(actions == MOVE, 1, 0)
    image = pictures(start)
    later = torch.stack([pictures(start + speed * (j + 1)) for j in range(2)], dim=1)
    grain = torch.randint(-4, 5, later.shape, generator=generator)
    later = (later.long() + grain).clamp(0, 255).to(torch.uint8)
    model = imagining.Imagining()
    model.future = imagining.unit(image).float().unsqueeze(1).expand(-1, 2, -1, -1, -1)
    batch = imagining.batch(len(actions), image=image, future_frames=later)
    return reconstruction_reward(
        model,
        batch,
        settings=RewardSettings(max_batch=256),
        generators=imagining.streams(len(actions)),
    )


def share_of_frozen_arms(lambda_rec, *, task_weight=1.0, degenerate="drop", seed=0):
    """Train a policy with two actions; the probability with which it ends up freezing."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.zeros(2, requires_grad=True)
    optimiser = torch.optim.Adam([logits], lr=0.1)
    normaliser = RunningNormaliser()
    episodes = GROUPS * GROUP_SIZE
    for _ in range(ITERATIONS):
        probabilities = logits.detach().softmax(0)
        frozen = torch.rand(episodes, generator=generator) < probabilities[FREEZE]
        actions = torch.where(frozen, FREEZE, MOVE)
        lucky = torch.rand(episodes, generator=generator) < SUCCESS_OF_MOVING
        success = task_weight * (lucky & ~frozen).float()
        result = rewards_of(actions.expand(STEPS, -1).flatten(), generator)
        normaliser.update([Moments.of(result.reward[result.mask])])
        dense = normaliser.normalise(result.reward, result.mask).view(STEPS, episodes)
        task = torch.zeros(STEPS, episodes)
        task[-1] = success
        returns = episode_returns(task, dense, result.mask.view_as(dense), lambda_rec)
        groups = group_advantages(returns, success, GROUP_SIZE, degenerate=degenerate)
        valid = groups.is_used.expand(STEPS, -1)
        advantage = step_advantages(groups.advantage, valid, GROUP_SIZE)
        old = probabilities.log()[actions].expand(STEPS, -1)
        for _ in range(2):
            optimiser.zero_grad()
            new = logits.log_softmax(0)[actions].expand(STEPS, -1)
            loss, _ = ppo_flow_loss(
                new.flatten(), old.flatten(), advantage.flatten(), 0.2, 0.2, valid.flatten()
            )
            loss.backward()
            optimiser.step()
    return logits.detach().softmax(0)[FREEZE].item()


@pytest.mark.parametrize("seed", range(3))
def test_a_frozen_arm_does_not_win_under_the_default_weights(seed):
    assert share_of_frozen_arms(DEFAULT_LAMBDA_REC, seed=seed) < 0.1


@pytest.mark.parametrize(
    ("lambda_rec", "task_weight", "degenerate"),
    [
        pytest.param(3.0, 1.0, "drop", id="a heavy dense reward"),
        pytest.param(DEFAULT_LAMBDA_REC, 0.0, "keep", id="the dense reward alone"),
    ],
)
def test_the_toy_is_one_in_which_a_frozen_arm_can_win(lambda_rec, task_weight, degenerate):
    share = share_of_frozen_arms(lambda_rec, task_weight=task_weight, degenerate=degenerate)
    assert share > 0.9


def test_a_frozen_arm_is_the_better_self_fulfilling_prophecy():
    generator = torch.Generator().manual_seed(0)
    moving, frozen = (
        rewards_of(torch.full((32,), action), generator).reward for action in (MOVE, FREEZE)
    )
    assert frozen.min() > moving.max()


def test_under_the_default_weights_no_dense_reward_outweighs_a_success():
    """The normaliser bounds r to +-5, so even the largest gap is worth no more than a success."""
    normaliser = RunningNormaliser()
    extremes = torch.tensor([1e6, -1e6])
    normaliser.update([Moments.of(torch.randn(100, generator=torch.Generator().manual_seed(0)))])
    best, worst = normaliser.normalise(extremes, torch.ones(2, dtype=torch.bool))
    failed_but_foreseen = episode_returns(
        torch.zeros(STEPS, 1), best.expand(STEPS, 1), None, DEFAULT_LAMBDA_REC
    )
    solved_by_surprise = episode_returns(
        torch.tensor([[0.0], [0.0], [1.0]]), worst.expand(STEPS, 1), None, DEFAULT_LAMBDA_REC
    )
    assert failed_but_foreseen.item() <= solved_by_surprise.item()
