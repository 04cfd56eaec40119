"""The measure of a gradient's signal, on gradients whose signal is known; the benchmark runs."""

import bench_gradient_signal
import pytest
import torch
from bench_gradient_signal import Signal


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


@pytest.mark.slow
def test_the_parts_of_the_noise_are_parts_of_the_whole():
    found = bench_gradient_signal.measure(
        ["RL.window=[0]", "RL.noise_level=1.0", "env.train.rollout_epoch=1"], iterations=2
    )
    assert set(found) == set(bench_gradient_signal.DIRECTIONS)
    assert all(signal.squared_norm > 0 for signal in found.values())
