"""The feature KL against torch.distributions, and its statistics."""

import pytest
import torch
from torch.distributions import Independent, Normal, kl_divergence

from rlinf_wamrl.rl.losses import FeatureStatistics, feature_kl_loss, feature_moments
from rlinf_wamrl.rl.moments import Moments

N, B, S, WIDTH = 3, 2, 4, 5


def features(seed, *, layers=N, batch=B, scale=1.0, requires_grad=False):
    generator = torch.Generator().manual_seed(seed)
    return [
        tuple(
            (scale * torch.randn(batch, S, WIDTH, generator=generator)).requires_grad_(
                requires_grad
            )
            for _ in range(2)
        )
        for _ in range(layers)
    ]


def statistics(seed=5):
    generator = torch.Generator().manual_seed(seed)
    old, live = torch.rand(2, N, 2, WIDTH, generator=generator) + 0.1
    return FeatureStatistics(frozen_variance=old, live_variance=live)


def test_value_and_layers_equal_the_kl_of_diagonal_gaussians():
    live, frozen, stats = features(0), features(1), statistics()
    expected = []
    for layer in range(N):
        new = Normal(torch.stack(live[layer], 2), stats.live_variance[layer].sqrt())
        old = Normal(torch.stack(frozen[layer], 2), stats.frozen_variance[layer].sqrt())
        divergence = kl_divergence(Independent(new, 2), Independent(old, 2))
        assert divergence.shape == (B, S)
        expected.append(divergence.mean())
    result = feature_kl_loss(live, frozen, stats)
    torch.testing.assert_close(result.per_layer, torch.stack(expected))
    torch.testing.assert_close(result.loss, torch.stack(expected).mean())


def test_gradient_is_that_of_the_scaled_squared_distance():
    live, frozen, stats = features(0, requires_grad=True), features(1), statistics()
    feature_kl_loss(live, frozen, stats).loss.backward()
    for layer in range(N):
        for part in range(2):
            new, old = live[layer][part], frozen[layer][part]
            expected = (new - old) / stats.frozen_variance[layer, part] / (N * B * S)
            torch.testing.assert_close(new.grad, expected.detach())


def test_equal_features_give_zero_and_zero_gradient():
    live = features(0, requires_grad=True)
    frozen = [tuple(part.detach() for part in pair) for pair in live]
    stats = FeatureStatistics.calibrate(feature_moments(features(9)))
    result = feature_kl_loss(live, frozen, stats)
    result.loss.backward()
    assert result.loss.item() == 0.0 and torch.equal(result.per_layer, torch.zeros(N))
    assert all(torch.equal(p.grad, torch.zeros_like(p)) for pair in live for p in pair)


def test_no_gradient_reaches_the_frozen_features():
    live, frozen = features(0, requires_grad=True), features(1, requires_grad=True)
    feature_kl_loss(live, frozen, statistics()).loss.backward()
    assert all(part.grad is None for pair in frozen for part in pair)


def test_bfloat16_features_are_compared_in_float32():
    live, frozen = (
        [tuple(part.bfloat16() for part in pair) for pair in features(seed)] for seed in (0, 1)
    )
    wide = [[tuple(part.float() for part in pair) for pair in side] for side in (live, frozen)]
    expected = feature_kl_loss(*wide, statistics())
    assert torch.equal(feature_kl_loss(live, frozen, statistics()).loss, expected.loss)


def test_moments_run_over_samples_and_tokens_and_merge_over_batches():
    first, second = features(0), features(1, batch=5)
    whole = [
        tuple(torch.cat(parts) for parts in zip(*pairs, strict=True))
        for pairs in zip(first, second, strict=True)
    ]
    merged = feature_moments(first).merge(feature_moments(second))
    assert merged.count.item() == (B + 5) * S
    for layer, (key, value) in enumerate(whole):
        for part, tensor in enumerate((key, value)):
            expected = tensor.double().flatten(0, 1).var(dim=0, correction=0)
            torch.testing.assert_close(merged.variance[layer, part], expected)


def test_calibration_floors_dimensions_that_hardly_vary():
    varied = features(0)
    for key, _ in varied:
        key[..., 0] = 3.0
    stats = FeatureStatistics.calibrate(feature_moments(varied), floor=0.01)
    exact = feature_moments(varied).variance.float()
    keys = stats.frozen_variance[:, 0]
    torch.testing.assert_close(keys[:, 0], 0.01 * exact[:, 0].mean(dim=-1))
    torch.testing.assert_close(keys[:, 1:], exact[:, 0, 1:])
    assert torch.equal(stats.live_variance, stats.frozen_variance)


def test_the_live_variance_follows_the_model_and_not_the_data():
    stats = statistics()
    stats = FeatureStatistics(
        frozen_variance=stats.frozen_variance, live_variance=stats.frozen_variance
    )
    batch = feature_moments(features(2, scale=7.0))
    unmoved = stats.update(batch, batch, decay=0.9)
    torch.testing.assert_close(unmoved.live_variance, stats.frozen_variance)
    doubled = Moments(batch.count, batch.mean, 2 * batch.squares)
    moved = stats.update(doubled, batch, decay=0.9)
    torch.testing.assert_close(moved.live_variance, 1.1 * stats.frozen_variance)
    assert torch.equal(moved.frozen_variance, stats.frozen_variance)
    for _ in range(200):
        moved = moved.update(doubled, batch, decay=0.9)
    torch.testing.assert_close(moved.live_variance, 2 * stats.frozen_variance)


def test_a_collapsed_feature_stays_finite():
    stats = FeatureStatistics.calibrate(feature_moments(features(0)))
    zero = Moments.of(torch.zeros(8, N, 2, WIDTH))
    for live, frozen in ((zero, feature_moments(features(1))), (zero, zero)):
        updated = stats.update(live, frozen, decay=0.0)
        assert bool((updated.live_variance > 0).all())
        result = feature_kl_loss(features(0), features(1), updated)
        assert torch.isfinite(result.loss)


def test_statistics_survive_a_checkpoint(tmp_path):
    stats = statistics()
    torch.save(stats.state_dict(), tmp_path / "statistics.pt")
    loaded = FeatureStatistics.from_state_dict(
        torch.load(tmp_path / "statistics.pt", weights_only=True)
    )
    assert torch.equal(loaded.frozen_variance, stats.frozen_variance)
    assert torch.equal(loaded.live_variance, stats.live_variance)


def test_what_does_not_fit_is_refused_in_words():
    with pytest.raises(ValueError, match="3 layers, got 2 live and 3 frozen"):
        feature_kl_loss(features(0, layers=2), features(1), statistics())
    with pytest.raises(ValueError, match="layer 0, live and frozen, differ"):
        feature_kl_loss(features(0, batch=3), features(1), statistics())
    with pytest.raises(ValueError, match="at least two tokens"):
        FeatureStatistics.calibrate(Moments.of(torch.zeros(1, N, 2, WIDTH)))
    flat = torch.randn(8, N, 2, WIDTH)
    flat[:, 1] = 0.0
    with pytest.raises(ValueError, match=r"layers \[1\] do not vary"):
        FeatureStatistics.calibrate(Moments.of(flat))
