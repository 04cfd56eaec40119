"""The same numbers on every device at hand, in float32 and bfloat16."""

import dataclasses

import golden_fastwam as golden
import pytest
import torch

DEVICES = [
    "cpu",
    pytest.param(
        "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
    ),
]
FACTOR = {"cpu": 1.0, "cuda": 10.0}  # other kernels: 1e-4 on a GPU

pytestmark = pytest.mark.parametrize("device", DEVICES)


@pytest.fixture(autouse=True)
def full_float32():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


def on(device, state):
    values = {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}
    return dataclasses.replace(
        state, **{name: value.to(device) for name, value in values.items() if value is not None}
    )


@pytest.mark.parametrize("state_is_moved", [True, False])
def test_actions(device, state_is_moved):
    reference, state = golden.tensors("d_ode"), golden.observation()
    model = golden.model().to(device)
    state = on(device, state) if state_is_moved else state
    actions = model.infer_action(state, 10, noise=reference["noise"])
    assert actions.device.type == device
    golden.assert_golden(actions.cpu(), reference["k10.infer_action"], FACTOR[device])


def test_imagination_and_actions(device):
    reference = golden.tensors("h_idm")
    model = golden.model(variant="idm").to(device)
    video, actions = model.infer_joint(
        golden.observation(),
        4,
        video_noise=reference["noise_video"],
        action_noise=reference["noise_action"],
    )
    golden.assert_golden(video.cpu(), reference["k4.imagined_latents"], FACTOR[device])
    golden.assert_golden(actions.cpu(), reference["k4.action"], FACTOR[device])


@pytest.mark.parametrize("variant", ["uncond", "joint", "idm", "optional_idm"])
def test_a_cpu_generator_gives_the_same_loss_everywhere(device, variant):
    losses = []
    for place in ("cpu", device):
        model = golden.model(variant=variant).to(place)
        total, scalars = model.training_loss(
            golden.sample(padded=True), torch.Generator().manual_seed(2)
        )
        total.backward()
        assert scalars["loss_video"].device.type == place
        norms = [p.grad.norm() for p in model.parameters() if p.grad is not None]
        losses.append((total.item(), torch.stack(norms).norm().item()))
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


def test_bfloat16_velocity(device):
    reference = golden.tensors("c_action_velocity")
    model = golden.model().to(device, torch.bfloat16)
    cache = model.prefill(golden.observation())
    velocity = model.action_velocity(
        reference["latents_action"].to(device), reference["timestep_mixed"].to(device), cache
    )
    assert velocity.dtype == torch.float32
    error = (velocity.cpu() - reference["velocity_mixed"]).abs().max()
    assert error < 0.05 * reference["velocity_mixed"].abs().max()
