"""The measure of a gradient's signal, on gradients whose signal is known; the benchmark runs."""

import bench_gradient_signal
import pytest
import torch
from bench_gradient_signal import Signal, gradients
from lone_learner import recorded_rows
from model_parts import example_run, observations, policy_of


def test_share_of_signal_of_known_gradients():
    draw = torch.Generator().manual_seed(0)
    mean = torch.randn(4000, generator=draw)
    noise = 2.0 * torch.randn(200, 4000, generator=draw)
    signal = Signal.of(mean + noise)
    assert signal.share == pytest.approx(1 / 5, abs=0.01)
    assert signal.squared_norm == pytest.approx(5 * 4000, rel=0.03)
    assert 0 < signal.share_error < 0.01


def test_pure_noise_has_no_signal():
    noise = torch.randn(200, 4000, generator=torch.Generator().manual_seed(0))
    signal = Signal.of(noise)
    assert abs(signal.share) < 5 * signal.share_error + 1e-3


def test_the_gradient_of_the_whole_noise_is_that_of_the_policys_own_log_probs():
    policy = policy_of("small", example_run("+ablation=actor_only"))
    rows = recorded_rows(policy, observations(6))
    records = dict(rows["forward_inputs"], advantage=rows["advantages"][:, 0])
    records["executed_mask"][2, 3:] = False  # an episode that ended in its chunk
    found = gradients(policy, records, (0, 1, 2), rows=4)["all"]
    logprobs = policy.default_forward(records)["logprobs"].sum(dim=(1, 2))
    trained = [p for p in policy.parameters() if p.requires_grad]
    expected = torch.autograd.grad(
        (logprobs * records["advantage"]).sum(), trained, allow_unused=True
    )
    flat = torch.cat(
        [
            torch.zeros(p.numel()) if g is None else g.flatten()
            for p, g in zip(trained, expected, strict=True)
        ]
    )
    torch.testing.assert_close(found, flat, rtol=1e-3, atol=1e-5 * flat.abs().max().item())


@pytest.mark.slow
def test_the_example_plays_and_every_part_of_its_noise_is_measured():
    found = bench_gradient_signal.measure(
        ["RL.window=[0]", "RL.noise_level=1.0", "env.train.rollout_epoch=1"], iterations=2
    )
    assert set(found) == set(bench_gradient_signal.DIRECTIONS)
    assert all(signal.squared_norm > 0 for signal in found.values())
