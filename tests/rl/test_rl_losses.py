"""The flow PPO loss against its definition, term by term."""

import math

import pytest
import torch

from rlinf_wamrl.rl.losses import ppo_flow_loss


def loss_of(ratio, advantage, **options):
    new = torch.tensor([math.log(ratio)], requires_grad=True)
    loss, metrics = ppo_flow_loss(
        new, torch.zeros(1), torch.tensor([advantage]), 0.2, 0.3, **options
    )
    loss.backward()
    return loss.item(), new.grad.item(), metrics


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected", "gradient"),
    [
        (1.0, 1.0, -1.0, -1.0),  # inside: -A rho, gradient -A rho
        (1.2, 2.0, -2.4, -2.4),
        (1.5, 1.0, -1.3, 0.0),  # clipped above
        (0.5, 1.0, -0.5, -0.5),  # A > 0 and a low ratio is never clipped
        (0.5, -1.0, 0.8, 0.0),  # clipped below
        (2.0, -1.0, 2.0, 2.0),  # A < 0 and a high ratio is punished in full
        (5.0, -1.0, 3.0, 0.0),  # ... up to the dual clip
    ],
)
def test_every_branch_of_the_clip(ratio, advantage, expected, gradient):
    loss, grad, _ = loss_of(ratio, advantage)
    assert loss == pytest.approx(expected, rel=1e-5)
    assert grad == pytest.approx(gradient, rel=1e-5, abs=1e-7)


def test_dual_clip_can_be_turned_off():
    assert loss_of(5.0, -1.0, clip_ratio_c=None)[0] == pytest.approx(5.0, rel=1e-5)


def test_equal_policies_have_ratio_exactly_one_and_the_policy_gradient():
    logp = torch.randn(16, requires_grad=True)
    advantage = torch.randn(16)
    loss, metrics = ppo_flow_loss(logp, logp.detach().clone(), advantage, 0.2, 0.2)
    loss.backward()
    assert metrics["actor/ratio"] == 1.0 and metrics["actor/ratio_max"] == 1.0
    assert metrics["actor/approx_kl"] == 0.0 and metrics["actor/clip_fraction"] == 0.0
    torch.testing.assert_close(logp.grad, -advantage / 16)


def test_masked_steps_reach_neither_loss_nor_metrics_nor_gradient():
    logp = torch.tensor([0.0, 5.0, float("nan")], requires_grad=True)
    mask = torch.tensor([True, False, False])
    advantage = torch.tensor([1.0, 9.0, 9.0])
    loss, metrics = ppo_flow_loss(logp, torch.zeros(3), advantage, 0.2, 0.2, loss_mask=mask)
    loss.backward()
    assert loss.item() == -1.0 and metrics["actor/ratio_max"] == 1.0
    assert logp.grad.tolist()[:2] == [-1.0, 0.0]


def test_nothing_that_counts_gives_zero_and_not_nan():
    logp = torch.randn(4, requires_grad=True)
    mask = torch.zeros(4, dtype=torch.bool)
    loss, _ = ppo_flow_loss(logp, torch.zeros(4), torch.ones(4), 0.2, 0.2, loss_mask=mask)
    loss.backward()
    assert loss.item() == 0.0 and torch.equal(logp.grad, torch.zeros(4))


def test_kl_estimators_match_their_definitions():
    generator = torch.Generator().manual_seed(0)
    new, old = torch.randn(2, 64, generator=generator).mul(0.1).unbind(0)
    _, metrics = ppo_flow_loss(new, old, torch.ones(64), 0.2, 0.2)
    assert metrics["actor/approx_kl"].item() == pytest.approx((old - new).mean().item())
    k3 = ((new - old).exp() - 1 - (new - old)).mean().item()
    assert metrics["actor/approx_kl_k3"].item() == pytest.approx(k3, rel=1e-4)


def test_a_huge_log_ratio_stays_finite():
    loss, _, _ = loss_of(1.0, 1.0)
    new = torch.tensor([500.0], requires_grad=True)
    loss, metrics = ppo_flow_loss(
        new, torch.zeros(1), torch.tensor([-1.0]), 0.2, 0.2, clip_ratio_c=None
    )
    assert torch.isfinite(loss) and torch.isfinite(metrics["actor/ratio_max"])
