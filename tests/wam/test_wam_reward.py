"""The reconstruction reward on real models: native, adapted, with and without adapters."""

import dataclasses
from collections import Counter

import fake_official
import golden_fastwam as golden
import pytest
import torch
from tiny_parts import tiny_vae
from torch import nn

from rlinf_wamrl.rl.reward import RewardBatch, RewardSettings, reconstruction_reward
from rlinf_wamrl.wam.adapter import adapt
from rlinf_wamrl.wam.lora import inject_lora, select_trainable
from rlinf_wamrl.wam.vae_patch import PatchVAE, PatchVAEConfig

STEPS = 3


def generators(rows=2, seed=0):
    return [torch.Generator().manual_seed(100 * seed + row) for row in range(rows)]


def patch_vae():
    """A patch autoencoder with random orthonormal bases, for pictures of 64 x 96."""
    vae = PatchVAE(PatchVAEConfig(image_height=64, image_width=96, per_position_mean=False))
    generator = torch.Generator().manual_seed(0)
    for basis in (vae.image_basis, vae.group_basis):
        basis.copy_(torch.linalg.qr(torch.randn(basis.shape, generator=generator))[0])
        basis.mul_(4.0)
    return vae


class OfficialCodec:
    """A patch autoencoder behind the official signatures."""

    upsampling_factor = 16
    temporal_downsample_factor = 4

    def __init__(self):
        self.vae = patch_vae()

    def encode(self, video, device, tiled):
        return self.vae.encode(video)

    def decode(self, latents, device):
        return self.vae.decode(latents)


def model_of(kind="native", *, scrambled=False):
    model = golden.model()
    model.vae = patch_vae()
    inject_lora(model, generator=torch.Generator().manual_seed(0), rank=2)
    select_trainable(model)
    if scrambled:
        generator = torch.Generator().manual_seed(1)
        for name, parameter in model.video_expert.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter, std=0.1, generator=generator)
    if kind == "native":
        return model
    official = fake_official.FakeFastWAM(model, kind)
    official.vae = OfficialCodec()
    return adapt(official)


def batch(**changes):
    data, generator = golden.inputs(), torch.Generator().manual_seed(7)
    values = {
        "image": torch.randint(256, (2, 3, 64, 96), generator=generator, dtype=torch.uint8),
        "future_frames": torch.randint(
            256, (2, 2, 3, 64, 96), generator=generator, dtype=torch.uint8
        ),
        "future_frames_exist": torch.ones(2, 2, dtype=torch.bool),
        "executed_mask": torch.ones(2, 10, dtype=torch.bool),
        "context": data["context"].flip(0),
        "context_mask": data["context_mask"].flip(0),
        "context_index": torch.tensor([1, 0]),
        "proprio": data["proprio"][:, 0],
    }
    return RewardBatch(**(values | changes))


def settings(**changes):
    return RewardSettings(**({"num_steps": STEPS} | changes))


def reward_of(model, use_frozen=None, rows=None, **changes):
    chosen = batch() if rows is None else batch().select(rows)
    return reconstruction_reward(
        model, chosen, use_frozen, settings=settings(**changes), generators=generators()
    ).reward


def count_calls(model):
    """Counts what runs: passes of each expert, of the autoencoder, and encodings of the context.

    The context is encoded in two calls, one for the texts and one for the proprio tokens.
    """
    calls = Counter()

    def counting(name, function):
        def counted(*args, **kwargs):
            calls[name] += 1
            return function(*args, **kwargs)

        return counted

    model.video_expert.register_forward_pre_hook(lambda *_: calls.update(["video"]))
    model.video_expert.text_embedding.register_forward_pre_hook(lambda *_: calls.update(["text"]))
    model.action_expert.register_forward_pre_hook(lambda *_: calls.update(["action"]))
    model.proprio_encoder.register_forward_pre_hook(lambda *_: calls.update(["proprio"]))
    model.vae.encode = counting("encode", model.vae.encode)
    model.vae.decode = counting("decode", model.vae.decode)
    return calls


def test_an_imagination_costs_k_video_passes_and_nothing_twice():
    model = model_of()
    calls = count_calls(model)
    reward_of(model)
    assert calls == {"video": STEPS, "text": 2 * STEPS, "proprio": 1, "encode": 1, "decode": 1}
    calls.clear()
    reward_of(model, compare="vae_roundtrip", num_steps=5)
    assert calls == {"video": 5, "text": 10, "proprio": 1, "encode": 1, "decode": 2}
    calls.clear()
    reward_of(model, max_batch=1)
    assert calls["video"] == 2 * STEPS and calls["encode"] == calls["decode"] == 2


def test_reward_is_that_of_the_models_own_imagination():
    """Step by step, with the model's scheduler and nothing of the reward's code."""
    model, data = model_of(scrambled=True), batch()
    first = model.vae.encode((data.image.double() / 127.5 - 1).float().unsqueeze(2))
    noise = [torch.randn(48, 3, 4, 6, generator=generator) for generator in generators()]
    video = torch.cat((first, torch.stack(noise)[:, :, 1:]), dim=2)
    context = model.encode_context(golden.observation())
    timesteps, deltas = model.infer_video_scheduler.build_inference_schedule(STEPS)
    with torch.no_grad():
        for timestep, delta in zip(timesteps, deltas, strict=True):
            velocity = model.video_velocity(video, timestep.expand(2), *context)
            video = torch.cat((first, (video + delta * velocity)[:, :, 1:]), dim=2)
        pictures = model.vae.decode(video).clamp(-1, 1)[:, :, 1:3].transpose(1, 2)
    error = ((pictures + 1) / 2 - data.future_frames / 255).square().mean(dim=(1, 2, 3, 4))
    torch.testing.assert_close(reward_of(model, use_frozen=False), -error, rtol=1e-4, atol=1e-6)


def test_frozen_is_the_model_before_training_bit_for_bit_and_live_is_not():
    before = reward_of(model_of())
    model = model_of(scrambled=True)
    assert torch.equal(reward_of(model, use_frozen=True), before)
    live = reward_of(model, use_frozen=False)
    assert not torch.allclose(live, before, rtol=1e-3)
    assert torch.equal(reward_of(model, source="live"), live)
    assert torch.equal(reward_of(model, source="frozen"), before)
    assert torch.equal(reward_of(model, use_frozen=True, source="live"), before)
    trained = [n for n, p in model.named_parameters() if p.requires_grad]
    assert any("lora_" in name for name in trained)


@pytest.mark.parametrize("kind", ["native", "dict"])
@pytest.mark.parametrize("compare", ["pixels", "vae_roundtrip"])
def test_a_macro_step_earns_the_same_alone_and_in_company(kind, compare):
    model = model_of(kind, scrambled=True)
    whole = reward_of(model, compare=compare)
    for row in range(2):
        alone = reconstruction_reward(
            model,
            batch().select(torch.tensor([row])),
            settings=settings(compare=compare),
            generators=generators()[row : row + 1],
        )
        torch.testing.assert_close(alone.reward, whole[row : row + 1], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("surface", ["dict", "tensor"])
@pytest.mark.parametrize("use_frozen", [True, False])
def test_an_adapted_official_object_earns_the_same(surface, use_frozen):
    native = reward_of(model_of(scrambled=True), use_frozen)
    official = reward_of(model_of(surface, scrambled=True), use_frozen)
    torch.testing.assert_close(official, native, rtol=1e-5, atol=1e-7)


def test_the_rollouts_own_video_is_rewarded_as_if_imagined_again():
    model, data = model_of(scrambled=True), batch()
    first = model.vae.encode((data.image.double() / 127.5 - 1).float().unsqueeze(2))
    noise = torch.stack(
        [torch.randn(48, 3, 4, 6, generator=generator) for generator in generators()]
    )
    video = model.imagine(golden.observation(first_frame=first), STEPS, noise=noise)
    result = reconstruction_reward(
        model,
        dataclasses.replace(data, video_latents=video.half()),
        settings=settings(source="rollout"),
    )
    torch.testing.assert_close(result.reward, reward_of(model, source="live"), rtol=1e-3, atol=1e-5)


def test_an_action_conditioned_model_imagines_what_the_actions_do():
    config = golden.config().video_dit_config
    model = golden.model(video_dit_config=dataclasses.replace(config, action_conditioned=True))
    model.vae = patch_vae()
    model.requires_grad_(False)
    rewards = []
    for seed in (0, 1):
        actions = torch.randn(
            2, model.action_horizon, 7, generator=torch.Generator().manual_seed(seed)
        )
        result = reconstruction_reward(
            model, batch(actions=actions), settings=settings(), generators=generators()
        )
        rewards.append(result.reward)
    assert not torch.allclose(*rewards, rtol=1e-4)


def test_bfloat16_models_are_rewarded_too():
    model = model_of(scrambled=True)
    exact = reward_of(model)
    model.to(torch.bfloat16)
    result = reward_of(model)
    assert result.dtype == torch.float32
    torch.testing.assert_close(result, exact, rtol=0.1, atol=0.01)


@pytest.mark.parametrize("make", [patch_vae, tiny_vae])
@torch.no_grad()
def test_leaving_out_later_latents_changes_no_earlier_picture(make):
    """What the reward relies on when it decodes only as far as it looks."""
    vae = make()
    latents = torch.randn(1, 48, 3, 4, 6, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(
        vae.decode(latents[:, :, :2]), vae.decode(latents)[:, :, :5], rtol=1e-5, atol=1e-5
    )
