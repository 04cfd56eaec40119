"""Flow-SDE against closed forms, ``torch.distributions`` and the Flow-GRPO form."""

import math
from types import SimpleNamespace

import pytest
import torch

from rlinf_wamrl.rl.chain_noise import ChainNoise, draw_chain_noise, stochastic_candidates
from rlinf_wamrl.rl.flow_sde import (
    gaussian_logprob,
    inference_grid,
    logprob_chain,
    logprob_chain_elements,
    reduce_logprob,
    sample_chain,
    sample_chain_elements,
    sample_ode,
    step_moments,
)

H, A = 6, 3


class Scheduler:
    """The documented schedule: u_k = 1 - k/K, sigma = s u / (1 + (s-1) u), t = 1000 sigma."""

    def __init__(self, shift=1.0):
        self.shift = shift

    def build_inference_schedule(self, num_steps, device, dtype, shift_override=None):
        shift = self.shift if shift_override is None else shift_override
        u = 1.0 - torch.arange(num_steps + 1, dtype=torch.float64) / num_steps
        sigma = shift * u / (1.0 + (shift - 1.0) * u)
        deltas = (sigma[1:] - sigma[:-1]).to(dtype)
        return (1000.0 * sigma[:-1]).to(device, dtype), deltas.to(device)


class GaussianFlow(torch.nn.Module):
    """The exact velocity field of data ~ N(mu, tau^2)."""

    def __init__(self, mu=0.7, tau=0.5, shift=1.0):
        super().__init__()
        self.mu = torch.nn.Parameter(torch.tensor(mu))
        self.tau = tau
        self.infer_action_scheduler = Scheduler(shift)

    def prefill(self, state):
        return None

    def action_velocity(self, x, timestep, cache):
        sigma = (timestep / 1000.0).view(-1, 1, 1)
        variance = (1 - sigma) ** 2 * self.tau**2 + sigma**2
        centred = (x - (1 - sigma) * self.mu) / variance
        return sigma * centred - (self.mu + (1 - sigma) * self.tau**2 * centred)


class Network(torch.nn.Module):
    """A random non-linear velocity that depends on the observation and on time."""

    def __init__(self, dtype=torch.float32, shift=5.0):
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(
            torch.nn.Linear(H * A + 3, 64), torch.nn.SiLU(), torch.nn.Linear(64, H * A)
        ).to(dtype)
        self.dtype = dtype
        self.infer_action_scheduler = Scheduler(shift)

    def prefill(self, state):
        return state.context

    def action_velocity(self, x, timestep, cache):
        features = torch.cat([x.flatten(1), cache, timestep[:, None] / 1000], 1).to(self.dtype)
        return self.net(features).view_as(x)


def observations(batch, seed=3):
    generator = torch.Generator().manual_seed(seed)
    return SimpleNamespace(context=torch.randn(batch, 2, generator=generator))


def sample(model, batch=8, K=10, a=0.5, seed=1, **options):
    generator = torch.Generator().manual_seed(seed)
    options = {"horizon": H, "action_dim": A, **options}
    return sample_chain(model, observations(batch), K, a, generator, **options)


@pytest.mark.parametrize("shift", [1.0, 3.0, 5.0])
@pytest.mark.parametrize("num_steps", [1, 4, 10, 20])
def test_grid_is_float32_and_its_steps_sum_to_one_for_a_bf16_model(shift, num_steps):
    grid = inference_grid(Network(torch.bfloat16, shift), num_steps)
    assert grid.sigma.dtype == grid.delta.dtype == torch.float32
    assert grid.delta.sum().item() == pytest.approx(1.0, abs=1e-6)
    assert grid.sigma[0] == 1.0 and bool((grid.delta > 0).all())


@pytest.mark.parametrize("shift", [1.0, 5.0])
def test_logprob_equals_torch_normal_at_every_step(shift):
    grid = inference_grid(Network(shift=shift), 10)
    x, v, x_next = torch.randn(3, 10, H, A).unbind(0)
    mean, std = step_moments(x, v, grid.sigma, grid.delta, 0.5)
    reference = torch.distributions.Normal(mean, std.expand_as(mean)).log_prob(x_next)
    torch.testing.assert_close(gaussian_logprob(x_next, mean, std), reference)


@pytest.mark.parametrize("a", [0.3, 0.7, 1.0])
def test_step_equals_the_flow_grpo_form(a):
    grid = inference_grid(GaussianFlow(shift=3.0), 8)
    x, v = torch.randn(2, 8, H, A, dtype=torch.float64).unbind(0)
    sigma, delta = grid.sigma.double(), grid.delta.double()
    mean, std = step_moments(x[1:], v[1:], sigma[1:], delta[1:], a)
    s2 = (a * a * sigma[1:] / (1 - sigma[1:])).view(-1, 1, 1)
    sig, dt = sigma[1:].view(-1, 1, 1), -delta[1:].view(-1, 1, 1)
    reference = x[1:] * (1 + s2 * dt / (2 * sig)) + v[1:] * (1 + s2 * (1 - sig) / (2 * sig)) * dt
    torch.testing.assert_close(mean, reference)
    torch.testing.assert_close(std, torch.sqrt(-s2 * dt))


@pytest.mark.parametrize("shift", [1.0, 5.0])
@pytest.mark.parametrize("num_steps", [1, 4, 10])
def test_std_at_pure_noise_is_the_noise_level(shift, num_steps):
    grid = inference_grid(GaussianFlow(shift=shift), num_steps)
    x = torch.randn(1, H, A)
    _, std = step_moments(x, x, grid.sigma[:1], grid.delta[:1], 0.5)
    assert std.item() == pytest.approx(0.5, abs=1e-7)


@pytest.mark.parametrize(("shift", "expected"), [(1.0, 0.053), (5.0, 0.223)])
def test_noise_left_on_the_action_by_the_last_of_ten_steps(shift, expected):
    grid = inference_grid(GaussianFlow(shift=shift), 10)
    x = torch.randn(1, H, A)
    _, std = step_moments(x, x, grid.sigma[-1:], grid.delta[-1:], 0.5)
    assert std.item() == pytest.approx(expected, abs=6e-4)


def test_cps_keeps_the_noise_level_of_the_next_grid_point():
    grid = inference_grid(GaussianFlow(shift=3.0), 6)
    x, v = torch.randn(2, 6, H, A).unbind(0)
    _, std = step_moments(x, v, grid.sigma, grid.delta, 0.4, "cps")
    sigma_next = (grid.sigma - grid.delta).view(-1, 1, 1)
    kept = sigma_next * math.cos(0.2 * math.pi)
    torch.testing.assert_close(torch.sqrt(kept**2 + std**2), sigma_next)


def test_sde_keeps_the_marginals_of_the_ode():
    """Data N(0.7, 0.5^2), 200 steps: mean and variance of 40k samples within 4 standard errors."""
    model = GaussianFlow()
    grid = inference_grid(model, 200)
    generator = torch.Generator().manual_seed(0)
    n = 20_000
    steps = tuple(range(199))
    noise = ChainNoise(
        initial=torch.randn(n, 1, 2, generator=generator),
        step=torch.randn(n, len(steps), 1, 2, generator=generator),
        k_star=torch.tensor(steps).expand(n, -1),
    )
    chain, _ = sample_chain_elements(model, None, grid, noise, 0.5)
    samples = chain[:, -1].flatten()
    count = samples.numel()
    # the discretisation of 200 steps adds at most 1 % of the standard deviation
    assert abs(samples.mean() - 0.7) < 4 * 0.5 / math.sqrt(count) + 0.005
    assert abs(samples.std() - 0.5) < 4 * 0.5 / math.sqrt(2 * count) + 0.005
    ode = sample_ode(model, None, grid, noise.initial).flatten()
    assert abs(ode.std() - 0.5) < 4 * 0.5 / math.sqrt(2 * count) + 0.005


@pytest.mark.parametrize("steps", ["one_random", "all", (0, 1, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_learner_logprob_equals_the_rollout_bit_for_bit(steps, dtype):
    model = Network(dtype)
    result = sample(model, stochastic_steps=steps, num_executed=4)
    again = logprob_chain(model, observations(8), result.chain, result.k_star, 0.5, num_executed=4)
    assert torch.equal(again, result.logp_old)
    assert torch.equal((again - result.logp_old).exp(), torch.ones_like(again))


def test_logprob_across_batch_shapes_agrees_to_1e_5():
    model = Network()
    result = sample(model)
    states = observations(8)
    for row in range(8):
        one = SimpleNamespace(context=states.context[row : row + 1])
        part = slice(row, row + 1)
        again = logprob_chain(model, one, result.chain[part], result.k_star[part], 0.5)
        assert (again - result.logp_old[part]).abs().max() < 1e-5


@pytest.mark.parametrize("steps", ["one_random", "all", (1, 3)])
def test_a_batch_of_eight_equals_eight_batches_of_one(steps):
    model = Network()
    whole = sample(model, seed=11, stochastic_steps=steps)
    generator = torch.Generator().manual_seed(11)
    states = observations(8)
    for row in range(8):
        one = SimpleNamespace(context=states.context[row : row + 1])
        part = sample_chain(model, one, 10, 0.5, generator, steps, horizon=H, action_dim=A)
        assert torch.equal(part.k_star[0], whole.k_star[row])
        assert torch.equal(part.chain[0, 0], whole.chain[row, 0])
        torch.testing.assert_close(part.chain[0], whole.chain[row], rtol=1e-5, atol=1e-5)


def test_one_generator_per_sample_gives_equal_noise_to_equal_generators():
    streams = [torch.Generator().manual_seed(5) for _ in range(3)]
    noise = draw_chain_noise(streams, batch_size=3, horizon=H, action_dim=A, num_steps=4)
    assert torch.equal(noise.initial[0], noise.initial[2])
    assert torch.equal(noise.step[0], noise.step[2])


def test_only_the_starred_step_leaves_the_ode():
    model = Network()
    result = sample(model, batch=16)
    grid = inference_grid(model, 10)
    for k in range(10):
        x = result.chain[:, k]
        t = grid.timesteps[k].expand(16)
        ode = x - grid.delta[k] * model.action_velocity(x, t, observations(16).context)
        same = torch.isclose(ode, result.chain[:, k + 1], atol=1e-6).flatten(1).all(1)
        assert torch.equal(same, result.k_star != k)


def test_k_star_is_uniform_over_all_but_the_last_step():
    noise = draw_chain_noise(
        torch.Generator().manual_seed(0), batch_size=4000, horizon=1, action_dim=1, num_steps=5
    )
    counts = torch.bincount(noise.k_star.flatten(), minlength=5).float()
    assert counts[4] == 0
    expected = 1000.0
    chi_square = ((counts[:4] - expected) ** 2 / expected).sum()
    assert chi_square < 16.27  # 0.1 % point of chi-square with 3 degrees of freedom


@pytest.mark.parametrize("k", range(10))
@pytest.mark.parametrize("shift", [1.0, 5.0])
def test_gradients_are_finite_at_every_step(k, shift):
    model = Network(shift=shift)
    result = sample(model, stochastic_steps=(k,))
    logp = logprob_chain(model, observations(8), result.chain, result.k_star, 0.5)
    logp.sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())
    assert any(p.grad.abs().sum() > 0 for p in model.parameters())


def test_gradient_matches_finite_differences():
    model = GaussianFlow().double()
    grid = inference_grid(model, 4)
    chain = torch.randn(2, 5, H, A, dtype=torch.float64)
    k_star = torch.tensor([0, 2])

    def score(mu):
        model.mu.data.copy_(mu)
        return logprob_chain_elements(model, None, grid, chain, k_star, 0.5).double().sum()

    score(torch.tensor(0.7)).backward()
    step = 1e-3
    numeric = (score(torch.tensor(0.7 + step)) - score(torch.tensor(0.7 - step))) / (2 * step)
    assert model.mu.grad.item() == pytest.approx(numeric.item(), rel=1e-3)


def test_reduction_counts_executed_actions_only():
    elements = torch.randn(2, 1, 4, A)
    mask = torch.tensor([[True, True, False, False], [False] * 4])
    total = reduce_logprob(elements, mask, "sum")
    assert total[0, 0] == pytest.approx(elements[0, 0, :2].sum().item(), rel=1e-6)
    assert total[1, 0] == 0
    mean = reduce_logprob(elements, mask, "mean")
    assert mean[0, 0] == pytest.approx(elements[0, 0, :2].mean().item(), rel=1e-6)
    assert mean[1, 0] == 0


def test_unexecuted_actions_do_not_count():
    model = Network()
    result = sample(model, num_executed=4)
    grid = inference_grid(model, 10)
    elements = logprob_chain_elements(
        model, observations(8).context, grid, result.chain, result.k_star, 0.5
    )
    torch.testing.assert_close(elements[:, :, :4].sum((-2, -1)), result.logp_old)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"stochastic_steps": "some"}, "one_random"),
        ({"stochastic_steps": (3, 1)}, "ascending"),
        ({"stochastic_steps": (0, 10)}, "0..9"),
        ({"a": 0.0}, "noise level"),
        ({"K": 0}, "at least 1"),
        ({"variant": "ddpm"}, "'sde' or 'cps'"),
        ({"variant": "cps", "stochastic_steps": (9,)}, "last step"),
        ({"reduction": "max"}, "'sum' or 'mean'"),
    ],
)
def test_impossible_requests_say_what_is_wrong(options, words):
    with pytest.raises(ValueError, match=words):
        sample(Network(), **options)


def test_candidates_leave_out_the_last_step_by_default():
    assert stochastic_candidates(4, "one_random") == (0, 1, 2)
    assert stochastic_candidates(4, "all", ignore_last=False) == (0, 1, 2, 3)
    assert stochastic_candidates(1, "one_random") == (0,)


def test_group_members_can_share_the_initial_noise_only():
    def streams(*seeds):
        return [torch.Generator().manual_seed(seed) for seed in seeds]

    noise = draw_chain_noise(
        streams(1, 2),
        batch_size=2,
        horizon=H,
        action_dim=A,
        num_steps=4,
        initial_generators=streams(9, 9),
    )
    assert torch.equal(noise.initial[0], noise.initial[1])
    assert not torch.equal(noise.step[0], noise.step[1])
