"""Losses and gradients of every variant equal the official code."""

import dataclasses

import golden_fastwam as golden
import pytest
import torch

from rlinf_wamrl.wam import training

CASES = ["uncond", "uncond_padded", "joint", "idm_cond_noised", "idm_cond_clean"]


def official_draws(case):
    """The draws the reference was made with."""
    times, data = golden.tensors("f_training"), golden.inputs()
    draws = training.TrainingDraws(
        video_noise=data["noise_video"],
        video_timestep=times["t_video"],
        action_noise=data["noise_action"],
        action_timestep=times["t_action"],
    )
    coin = golden.numbers("f_training")[case]["cond_u"]
    if coin is None:
        return draws
    noised = torch.tensor(coin) < 0.5
    if not noised.any():
        return dataclasses.replace(draws, conditioning_is_noised=noised)
    return dataclasses.replace(
        draws,
        conditioning_is_noised=noised,
        conditioning_timestep=times["t_video_cond"],
        conditioning_noise=data["noise_video_cond"],
    )


def loss_of(case, **changes):
    facts = golden.numbers("f_training")[case]
    model = golden.model(variant=facts["variant"], **changes)
    batch = training.build_batch(model, golden.sample(facts["padded"]))
    return model, training.compute_loss(model, batch, official_draws(case), 1.0, 1.0)


@pytest.mark.parametrize("case", CASES)
def test_losses_and_predictions(case):
    reference, facts = golden.tensors("f_training"), golden.numbers("f_training")[case]
    _, loss = loss_of(case)
    for name in ("loss", "loss_video", "loss_action"):
        assert loss.scalars()[name].item() == pytest.approx(facts[name], rel=golden.TOLERANCE)
    golden.assert_golden(loss.video_velocity, reference[f"{case}.pred_video"])
    golden.assert_golden(loss.action_velocity, reference[f"{case}.pred_action"])


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_gradients(case, checkpointing):
    reference, facts = golden.tensors("f_training"), golden.numbers("f_training")[case]
    config = golden.config()
    model, loss = loss_of(
        case,
        video_dit_config=dataclasses.replace(
            config.video_dit_config, use_gradient_checkpointing=checkpointing
        ),
        action_dit_config=dataclasses.replace(
            config.action_dit_config, use_gradient_checkpointing=checkpointing
        ),
    )
    loss.total.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    assert gradients.keys() == facts["grad_norms"].keys()
    for name, norm in facts["grad_norms"].items():
        assert gradients[name].norm().item() == pytest.approx(norm, rel=1e-5, abs=1e-7), name
    prefix = f"{case}.grad."
    compared = [name for name in reference if name.startswith(prefix)]
    assert compared
    for name in compared:
        golden.assert_golden(gradients[name.removeprefix(prefix)], reference[name])


def test_checkpointing_does_not_change_gradients_at_all():
    def gradients(checkpointing):
        config = golden.config()
        changes = {
            name: dataclasses.replace(
                getattr(config, name), use_gradient_checkpointing=checkpointing
            )
            for name in ("video_dit_config", "action_dit_config")
        }
        model, loss = loss_of("uncond", **changes)
        loss.total.backward()
        return [p.grad for p in model.parameters()]

    assert all(map(torch.equal, gradients(False), gradients(True)))


@pytest.mark.parametrize("case", CASES)
def test_masks_of_training(case):
    facts = golden.numbers("f_training")[case]
    model = golden.model(variant=facts["variant"])
    latents = golden.inputs()["latents"]
    if facts["variant"] == "idm":
        mask = training.teacher_forcing_attention_mask(model, latents, 8, official_draws(case))
    else:
        mask = training.joint_attention_mask(model, latents, 8)
    assert torch.equal(mask, golden.tensors("f_training")[f"{case}.attention_mask"])


def test_rl_gradients():
    """Gradients of an action velocity, with the video's part of the cache detached or not."""
    reference, facts = golden.tensors("j_rl_gradients"), golden.numbers("j_rl_gradients")
    for case, video_gradient in (("kv_detached", False), ("kv_with_grad", True)):
        model = golden.model()
        cache = model.prefill(golden.observation(), video_gradient=video_gradient)
        velocity = model.action_velocity(reference["x"], reference["t"], cache)
        golden.assert_golden(velocity, reference["velocity"])
        (velocity * reference["cotangent"]).sum().backward()
        for name, parameter in model.named_parameters():
            norm = facts[case]["grad_norms"][name]
            if norm is None:
                assert parameter.grad is None, name
            else:
                assert parameter.grad.norm().item() == pytest.approx(norm, rel=1e-5, abs=1e-7), name
        for name in reference:
            if name.startswith(f"{case}.grad."):
                actual = model.get_parameter(name.removeprefix(f"{case}.grad.")).grad
                golden.assert_golden(actual, reference[name])


def test_detached_cache_keeps_only_the_actions_own_gradient():
    model = golden.model()
    cache = model.prefill(golden.observation()).detach()
    velocity = model.action_velocity(golden.inputs()["action"], torch.full((2,), 500.0), cache)
    velocity.sum().backward()
    assert model.proprio_encoder.weight.grad is None
    assert model.action_expert.action_encoder.weight.grad is not None


@pytest.mark.parametrize("variant", ["uncond", "joint", "idm", "optional_idm"])
def test_video_loss_alone_is_the_same_number(variant):
    model = golden.model(variant=variant)

    def loss(**weights):
        return model.training_loss(golden.sample(), torch.Generator().manual_seed(1), **weights)

    total, both = loss()
    video_only, alone = loss(lambda_action=0.0, lambda_video=2.0)
    assert alone.keys() == {"loss", "loss_video"}
    torch.testing.assert_close(alone["loss_video"], both["loss_video"], rtol=1e-6, atol=0)
    torch.testing.assert_close(video_only, 2 * both["loss_video"], rtol=1e-6, atol=0)
    torch.testing.assert_close(total.detach(), both["loss_video"] + both["loss_action"])
    video_only.backward()
    assert all(p.grad is None for p in model.action_expert.parameters())


def test_scalars_carry_no_gradient_and_weights_come_from_the_configuration():
    model = golden.model(loss_lambda_video=0.5, loss_lambda_action=3.0)
    total, scalars = model.training_loss(golden.sample(), torch.Generator().manual_seed(1))
    assert total.requires_grad
    assert not any(value.requires_grad for value in scalars.values())
    expected = 0.5 * scalars["loss_video"] + 3.0 * scalars["loss_action"]
    torch.testing.assert_close(total.detach(), expected)
    torch.testing.assert_close(model(golden.sample(), torch.Generator().manual_seed(1))[0], total)


def draws_by_hand(model, generator, order):
    """Draws in the given order, from the documented distributions."""
    scheduler = model.train_video_scheduler
    makers = {
        "video": lambda: torch.randn(2, 48, 3, 4, 6, generator=generator),
        "time": lambda: scheduler.sample_training_t(2, generator=generator),
        "action": lambda: torch.randn(2, 8, 7, generator=generator),
        "coin": lambda: torch.rand(2, generator=generator) < 0.5,
    }
    return [makers[name]() for name in order]


def drawn(draws):
    return [value for value in vars(draws).values() if value is not None]


@pytest.mark.parametrize(
    ("variant", "noise_probability", "order"),
    [
        ("uncond", None, ["video", "time", "action", "time"]),
        ("joint", None, ["video", "time", "action", "time"]),
        ("idm", 0.5, ["video", "time", "action", "time", "coin", "time", "video"]),
        ("idm", 0.0, ["video", "time", "action", "time", "coin"]),
        ("optional_idm", None, ["video", "time", "action", "time", "coin", "coin"]),
    ],
)
def test_order_of_draws(variant, noise_probability, order):
    changes = {} if noise_probability is None else {"video_cond_noise_prob": noise_probability}
    model = golden.model(variant=variant, **changes)
    batch = training.build_batch(model, golden.sample())
    seed = 5  # at this seed some sample is noised when the coin is fair
    actual = drawn(training.draw(model, batch, torch.Generator().manual_seed(seed)))
    expected = draws_by_hand(model, torch.Generator().manual_seed(seed), order)
    if model.config.video_cond_noise_prob == 0 and "coin" in order:
        expected[order.index("coin")] = torch.zeros(2, dtype=torch.bool)
    assert len(actual) == len(expected)
    assert all(map(torch.equal, actual, expected))


def test_optional_idm_mixes_both_masks_per_sample():
    """A sample's action loss is uncond's or idm's, by its coin."""
    batch_of = {}
    for variant in ("uncond", "idm", "optional_idm"):
        model = golden.model(variant=variant, video_cond_noise_prob=0.0)
        batch = training.build_batch(model, golden.sample())
        draws = dataclasses.replace(
            official_draws("uncond"),
            conditioning_is_noised=torch.zeros(2, dtype=torch.bool),
            actions_see_video=torch.tensor([True, False]) if variant == "optional_idm" else None,
        )
        batch_of[variant] = training.compute_loss(model, batch, draws, 1.0, 1.0).action_velocity
    golden.assert_golden(batch_of["optional_idm"][0], batch_of["idm"][0])
    golden.assert_golden(batch_of["optional_idm"][1], batch_of["uncond"][1])
    assert not torch.allclose(batch_of["idm"], batch_of["uncond"], atol=1e-3)


def test_fully_padded_sample_counts_nothing():
    model, sample = golden.model(), golden.sample()
    sample |= {
        "action_is_pad": torch.tensor([[False] * 8, [True] * 8]),
        "image_is_pad": torch.tensor([[False] * 9, [False] + [True] * 8]),
    }
    total, scalars = model.training_loss(sample, torch.Generator().manual_seed(0))
    assert total.isfinite()
    changed = {name: value.clone() for name, value in sample.items()}
    changed["action"][1] += 1
    changed["video_latents"][1, :, 1:] += 1
    again, _ = model.training_loss(changed, torch.Generator().manual_seed(0))
    torch.testing.assert_close(again, total)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"context": None}, "lacks 'context'"),
        ({"video_latents": None}, "lacks both 'video' and 'video_latents'"),
        ({"action": torch.zeros(2, 8, 6)}, r"action'\] must be \[2, H, 7\]"),
        ({"proprio": torch.zeros(2, 8)}, r"proprio'\] must be \[B, T, P\]"),
        ({"proprio": None}, r"needs proprio \[2, 8\], got none"),
        ({"action_is_pad": torch.zeros(2, 7)}, r"action_is_pad'\] must be \[2, 8\]"),
        ({"image_is_pad": torch.zeros(2, 3)}, r"image_is_pad'\] must be \[2, 9\]"),
        ({"video_latents": torch.zeros(2, 48, 1, 4, 6)}, "at least two latent frames"),
    ],
)
def test_bad_samples_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        golden.model().training_loss(golden.sample() | change, torch.Generator())
