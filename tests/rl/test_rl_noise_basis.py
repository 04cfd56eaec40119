"""Noise along few directions: against the full Gaussian, ``torch.distributions`` and autograd."""

import pytest
import torch

from rlinf_wamrl.rl.noise_basis import cosine_basis

H, C, A, B = 16, 8, 7, 5
STD = torch.full((B, 1, 1), 0.7)


def basis_of(num_modes, dims=(0, 1, 2)):
    return cosine_basis(horizon=H, num_executed=C, action_dim=A, num_modes=num_modes, dims=dims)


def draws(seed=0):
    torch.manual_seed(seed)
    return torch.randn(3, B, H, A).unbind(0)


def test_nothing_left_out_is_white_noise():
    assert basis_of(None, ()) is None


def test_modes_are_orthonormal_over_the_executed_actions():
    executed = basis_of(C).modes[:, :C]
    torch.testing.assert_close(executed @ executed.T, torch.eye(C), atol=1e-6, rtol=0)


def test_all_modes_of_all_dimensions_are_the_full_gaussian():
    ode, mean, noise = draws()
    basis = basis_of(C, range(A))
    x = basis.step(ode, mean, STD, noise)
    logprob = basis.logprob(x, mean, STD).sum(dim=(1, 2))
    normal = torch.distributions.Normal(mean[:, :C], STD.expand(B, C, A))
    torch.testing.assert_close(logprob, normal.log_prob(x[:, :C]).sum(dim=(1, 2)))


@pytest.mark.parametrize("num_modes", [1, 2, 5])
def test_the_density_is_that_of_the_drawn_coordinates(num_modes):
    ode, mean, noise = draws()
    basis = basis_of(num_modes)
    logprob = basis.logprob(basis.step(ode, mean, STD, noise), mean, STD)
    normal = torch.distributions.Normal(0.0, STD)
    expected = normal.log_prob(STD * noise[:, :num_modes, :3])
    torch.testing.assert_close(logprob[:, :num_modes, :3], expected)
    assert bool((logprob[:, num_modes:] == 0).all()) and bool((logprob[..., 3:] == 0).all())


def test_what_gets_no_noise_follows_the_ode():
    ode, mean, noise = draws()
    basis = basis_of(2)
    x = basis.step(ode, mean, STD, noise)
    assert torch.equal(x[..., 3:], ode[..., 3:])
    rest = (x - ode)[:, :C, :3]
    modes = basis.modes[:, :C]
    inside = torch.einsum("mc,mk,bka->bca", modes, modes, rest)
    torch.testing.assert_close(inside, rest, atol=1e-5, rtol=0)


def test_the_gradient_reaches_the_mean_along_the_modes_alone():
    ode, mean, noise = draws()
    basis = basis_of(2)
    x = basis.step(ode, mean, STD, noise)
    mean = mean.requires_grad_()
    basis.logprob(x, mean, STD).sum().backward()
    expected = torch.einsum("mc,bma->bca", basis.modes[:, :C], noise[:, :2, :3] / STD)
    torch.testing.assert_close(mean.grad[:, :C, :3], expected, atol=1e-5, rtol=1e-4)
    assert bool((mean.grad[..., 3:] == 0).all()) and bool((mean.grad[:, C:] == 0).all())


@pytest.mark.parametrize(
    "options, words",
    [
        ({"num_modes": 0}, "noise_modes must be within 1..8, got 0"),
        ({"num_modes": 9}, "got 9"),
        ({"num_modes": 2, "dims": (0, 0)}, "noise_dims must be distinct"),
    ],
)
def test_impossible_directions_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        basis_of(**options)
