"""The flow-matching schedule equals the official one and its closed forms."""

import golden_fastwam as golden
import pytest
import torch

from rlinf_wamrl.wam.schedule import FlowMatchScheduler, shift_time

SHIFTS = [1, 3, 5]


@pytest.mark.parametrize("shift", SHIFTS)
@pytest.mark.parametrize("steps", [1, 4, 10, 20])
def test_inference_grid_is_the_official_one_bit_for_bit(shift, steps):
    reference = golden.tensors("g_scheduler")
    for dtype, suffix in ((torch.float32, ""), (torch.bfloat16, "_bf16")):
        timesteps, deltas = FlowMatchScheduler(shift).build_inference_schedule(steps, "cpu", dtype)
        assert timesteps.dtype == deltas.dtype == dtype
        key = f"shift{shift}.k{steps}"
        assert torch.equal(timesteps.float(), reference[f"{key}.timesteps{suffix}"])
        assert torch.equal(deltas.float(), reference[f"{key}.deltas{suffix}"])


@pytest.mark.parametrize("shift", SHIFTS)
def test_override_gives_the_grid_of_that_shift(shift):
    overridden = FlowMatchScheduler(2.0).build_inference_schedule(10, shift_override=shift)
    own = FlowMatchScheduler(shift).build_inference_schedule(10)
    assert all(map(torch.equal, overridden, own))


@pytest.mark.parametrize("steps", [1, 4, 10, 37])
def test_float32_grid_goes_from_noise_to_data(steps):
    timesteps, deltas = FlowMatchScheduler(5.0).build_inference_schedule(steps)
    assert timesteps[0] == 1000
    assert deltas.max() < 0
    assert deltas.double().sum().item() == pytest.approx(-1.0, abs=1e-6)


@pytest.mark.parametrize("shift", SHIFTS)
def test_training_weight(shift):
    reference = golden.tensors("g_scheduler")
    weight = FlowMatchScheduler(shift).training_weight(reference["weight_t"])
    golden.assert_golden(weight, reference[f"shift{shift}.training_weight"])


@pytest.mark.parametrize("shift", SHIFTS)
def test_training_weight_is_one_on_average_under_the_sampler(shift):
    scheduler = FlowMatchScheduler(shift)
    timestep = scheduler.sample_training_t(200_000, generator=torch.Generator().manual_seed(0))
    assert scheduler.training_weight(timestep).mean().item() == pytest.approx(1.0, abs=5e-3)


@pytest.mark.parametrize("shift", SHIFTS)
def test_shift_function(shift):
    reference = golden.tensors("g_scheduler")
    golden.assert_golden(shift_time(reference["phi_u"], shift), reference[f"shift{shift}.phi"])


def test_noising_and_target():
    reference, data = golden.tensors("g_scheduler"), golden.inputs()
    scheduler = FlowMatchScheduler(5.0)
    noisy = scheduler.add_noise(data["action"], data["noise_action"], reference["add_noise.t"])
    golden.assert_golden(noisy, reference["add_noise.out"])
    target = scheduler.training_target(data["action"], data["noise_action"])
    golden.assert_golden(target, reference["add_noise.target"])


def test_one_euler_step_with_the_true_velocity_reaches_the_data():
    scheduler, data, noise = FlowMatchScheduler(3.0), torch.randn(2, 3), torch.randn(2, 3)
    timestep = torch.tensor([900.0, 250.0])
    noisy = scheduler.add_noise(data, noise, timestep)
    reached = scheduler.step(scheduler.training_target(data, noise), -timestep / 1000, noisy)
    torch.testing.assert_close(reached, data)


def test_draws_come_from_the_generator_alone():
    def sample():
        return FlowMatchScheduler(5.0).sample_training_t(
            8, generator=torch.Generator().manual_seed(3)
        )

    first = sample()
    torch.rand(5)
    assert torch.equal(first, sample())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FlowMatchScheduler(0.0), "shift must be positive, got 0"),
        (lambda: FlowMatchScheduler().build_inference_schedule(0), "steps must be >= 1, got 0"),
        (
            lambda: FlowMatchScheduler().build_inference_schedule(4, shift_override=-1),
            "shift must be positive, got -1",
        ),
    ],
)
def test_impossible_values_are_errors(make, message):
    with pytest.raises(ValueError, match=message):
        make()
