"""Running moments and the normaliser against numpy on all values at once."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinf_wamrl.rl.moments import Moments, RunningNormaliser


def normaliser_of(*pieces, **options):
    normaliser = RunningNormaliser(**options)
    normaliser.update([Moments.of(torch.tensor(piece)) for piece in pieces])
    return normaliser


@settings(deadline=None, max_examples=50)
@given(
    st.lists(
        st.lists(st.floats(-100, 100, width=32), min_size=0, max_size=6), min_size=1, max_size=5
    )
)
def test_pieces_merge_to_the_moments_of_all_values(pieces):
    merged = Moments.of(torch.empty(0))
    for piece in pieces:
        merged = merged.merge(Moments.of(torch.tensor(piece, dtype=torch.float32)))
    values = np.array([value for piece in pieces for value in piece], dtype=np.float64)
    assert merged.count.item() == values.size
    if values.size:
        assert merged.mean.item() == pytest.approx(values.mean(), rel=1e-9, abs=1e-9)
        assert merged.variance.item() == pytest.approx(values.var(), rel=1e-9, abs=1e-9)


def test_a_large_mean_does_not_drown_the_variance():
    values = torch.tensor([1e8, 1e8 + 1, 1e8 + 2], dtype=torch.float64)
    merged = Moments.of(values[:1])
    for value in values[1:]:
        merged = merged.merge(Moments.of(value.view(1)))
    assert merged.variance.item() == pytest.approx(2 / 3)


def test_moments_keep_the_shape_of_their_values_and_travel_as_a_vector():
    values = torch.randn(7, 3, 2, generator=torch.Generator().manual_seed(0))
    moments = Moments.of(values)
    torch.testing.assert_close(moments.variance, values.double().var(dim=0, correction=0))
    back = moments.with_vector(moments.to_vector())
    assert torch.equal(back.mean, moments.mean) and torch.equal(back.squares, moments.squares)
    with pytest.raises(ValueError, match="13 numbers"):
        moments.with_vector(torch.zeros(3))


def test_normalised_rewards_have_mean_zero_and_std_one():
    reward = torch.randn(500, generator=torch.Generator().manual_seed(0)) * 0.02 - 0.3
    normaliser = normaliser_of(reward.tolist())
    result = normaliser.normalise(reward, torch.ones(500, dtype=torch.bool))
    assert result.mean().item() == pytest.approx(0.0, abs=1e-5)
    assert result.std(correction=0).item() == pytest.approx(1.0, abs=1e-4)


def test_the_result_is_clipped_neutral_where_masked_and_scaled_by_a_floor():
    normaliser = normaliser_of([-1.0, 1.0])
    reward = torch.tensor([0.5, 100.0, -100.0, float("nan")])
    mask = torch.tensor([True, True, True, False])
    assert normaliser.normalise(reward, mask).tolist() == [0.5, 5.0, -5.0, 0.0]
    constant = normaliser_of([0.25, 0.25, 0.25])
    assert constant.std == 0.0
    result = constant.normalise(torch.tensor([0.25, 0.2505]), torch.ones(2, dtype=torch.bool))
    torch.testing.assert_close(result, torch.tensor([0.0, 0.5]), rtol=0, atol=1e-4)


def test_two_ranks_normalise_as_one_would():
    left, right = [-1.0, 0.5, 2.0], [3.0]
    whole = normaliser_of(left + right)
    parts = normaliser_of(left, [], right)
    assert parts.mean == pytest.approx(whole.mean) and parts.std == pytest.approx(whole.std)


def test_iterations_accumulate_and_a_restored_state_goes_on_as_the_unbroken_one():
    unbroken = normaliser_of([-1.0, 0.5])
    restored = RunningNormaliser()
    restored.load_state_dict(unbroken.state_dict())
    for normaliser in (unbroken, restored):
        normaliser.update([Moments.of(torch.tensor([4.0, 0.25]))])
    assert torch.equal(restored.moments.to_vector(), unbroken.moments.to_vector())
    values = np.array([-1.0, 0.5, 4.0, 0.25])
    assert unbroken.mean == pytest.approx(values.mean())
    assert unbroken.std == pytest.approx(values.std())


def test_before_any_reward_everything_is_neutral():
    normaliser = normaliser_of([])
    assert normaliser.normalise(torch.ones(2), torch.zeros(2, dtype=torch.bool)).tolist() == [0, 0]


def test_rewards_that_are_not_finite_are_refused():
    normaliser = normaliser_of([1.0])
    with pytest.raises(ValueError, match="not finite"):
        normaliser.update([Moments.of(torch.tensor([float("nan")]))])
    assert normaliser.mean == 1.0
