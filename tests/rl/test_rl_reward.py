"""The reconstruction reward on an imagination that is known."""

import imagining
import pytest
import torch

from rlinf_wamrl.rl.reward import (
    RewardSettings,
    place_in_last_executed,
    reached_frames,
    reconstruction_reward,
)

SETTINGS = RewardSettings()


def settings(**changes):
    return RewardSettings(**changes)


def reward_of(model, batch, options=SETTINGS, **arguments):
    arguments.setdefault("generators", imagining.streams(len(batch)))
    return reconstruction_reward(model, batch, settings=options, **arguments)


def dreaming(batch, offset=0.0, **options):
    """A model that imagines the executed frames, brighter by ``offset``."""
    model = imagining.Imagining(**options)
    model.future = imagining.unit(batch.future_frames).float() + 2 * offset
    return model


def test_reward_is_minus_the_mean_squared_difference_in_unit_pixels():
    batch = imagining.batch()
    model = imagining.Imagining()
    dream = torch.rand(3, 2, 3, 8, 16, generator=torch.Generator().manual_seed(5))
    model.future = dream * 2 - 1
    result = reward_of(model, batch)
    error = (dream.double() - batch.future_frames.double() / 255).square()
    torch.testing.assert_close(
        result.per_frame, -error.mean(dim=(2, 3, 4)).float(), rtol=1e-4, atol=1e-6
    )
    torch.testing.assert_close(result.reward, result.per_frame.mean(dim=1))
    assert result.mask.all() and result.frame_mask.all()


def test_a_perfect_imagination_earns_zero():
    batch = imagining.batch()
    result = reward_of(dreaming(batch), batch)
    torch.testing.assert_close(result.reward, torch.zeros(3), rtol=0, atol=1e-9)


def test_frame_j_is_the_picture_after_j_plus_one_times_the_ratio():
    """Both frames differ, and only the right order gives 0; with one frame, only the first."""
    batch = imagining.batch(frames=1)
    model = dreaming(imagining.batch(frames=2))
    model.future[:, 0] = imagining.unit(batch.future_frames[:, 0]).float()
    assert reward_of(model, batch).reward.abs().max() < 1e-9


@pytest.mark.parametrize(
    ("executed", "exist", "expected"),
    [
        (10, [True, True], [True, True]),
        (8, [True, True], [True, True]),
        (7, [True, True], [True, False]),
        (10, [True, False], [True, False]),
        (3, [True, True], [False, False]),
        (0, [False, False], [False, False]),
        (10, [False, True], [False, False]),
    ],
)
def test_frames_count_inside_the_executed_prefix_and_before_the_end(executed, exist, expected):
    mask = torch.arange(10)[None] < executed
    assert reached_frames(mask, torch.tensor([exist]), 4).tolist() == [expected]


def test_frames_that_were_not_reached_do_not_count_and_cost_nothing():
    executed = torch.arange(10)[None] < torch.tensor([10, 5, 2, 0])[:, None]
    exist = torch.tensor([[True, True], [True, False], [False, False], [False, False]])
    batch = imagining.batch(4, executed_mask=executed, future_frames_exist=exist)
    model = imagining.Imagining()
    result = reward_of(model, batch)
    assert result.mask.tolist() == [True, True, False, False]
    assert result.reward[2:].tolist() == [0.0, 0.0]
    assert result.reward[1] == result.per_frame[1, 0] and result.per_frame[1, 1] == 0
    assert result.reward[0] == result.per_frame[0].mean()
    assert [call["rows"] for call in model.calls] == [2]
    unreached = imagining.batch(2, executed_mask=torch.zeros(2, 10, dtype=torch.bool))
    model = imagining.Imagining()
    assert not reward_of(model, unreached).mask.any()
    assert model.calls == [] and model.vae.encoded == []


@pytest.mark.parametrize("compare", ["pixels", "vae_roundtrip"])
@pytest.mark.parametrize("weight", ["uniform", "motion"])
def test_eight_at_once_equal_eight_alone_and_any_memory_bound(compare, weight):
    executed = torch.arange(10)[None] < torch.tensor([10, 5, 10, 2, 10, 8, 9, 4])[:, None]
    batch = imagining.batch(8, executed_mask=executed)
    options = {"compare": compare, "weight": weight}
    whole = reward_of(imagining.Imagining(blur=0.5), batch, settings(**options))
    for bound in (1, 3, 7):
        model = imagining.Imagining(blur=0.5)
        bounded = reward_of(model, batch, settings(max_batch=bound, **options))
        torch.testing.assert_close(bounded.reward, whole.reward)
        assert max(call["rows"] for call in model.calls) == min(bound, 7)
        assert max(shape[0] for shape in model.vae.encoded + model.vae.decoded) <= bound
    for row in range(8):
        alone = reconstruction_reward(
            imagining.Imagining(blur=0.5),
            batch.select(torch.tensor([row])),
            settings=settings(**options),
            generators=imagining.streams(8)[row : row + 1],
        )
        torch.testing.assert_close(alone.per_frame[0], whole.per_frame[row])


def test_each_step_runs_once_and_only_what_is_looked_at_is_decoded():
    batch = imagining.batch(3)
    model = imagining.Imagining(num_latent_frames=3)
    reward_of(model, batch, settings(num_steps=7, shift=3.0))
    assert [(call["rows"], call["steps"], call["shift"]) for call in model.calls] == [(3, 7, 3.0)]
    assert model.vae.encoded == [(3, 3, 1, 8, 16)]
    assert model.vae.decoded == [(3, 12, 2, 8, 16)]
    model = imagining.Imagining(num_latent_frames=3)
    reward_of(model, batch, settings(compare="vae_roundtrip"))
    assert model.vae.encoded == [(3, 3, 5, 8, 16)]
    assert model.vae.decoded == [(3, 12, 2, 8, 16)] * 2


def test_imagination_starts_from_the_encoded_picture_and_the_macro_steps_own_context():
    context = torch.arange(2.0).view(2, 1, 1).expand(2, 2, 4)
    proprio = torch.arange(3.0).view(3, 1)
    batch = imagining.batch(
        context=context,
        context_mask=torch.ones(2, 2, dtype=torch.bool),
        context_index=torch.tensor([1, 0, 1]),
        proprio=proprio,
    )
    model = imagining.Imagining()
    reward_of(model, batch)
    state = model.calls[0]["state"]
    assert state.context[state.context_rows, 0, 0].tolist() == [1.0, 0.0, 1.0]
    assert torch.equal(state.proprio, proprio)
    torch.testing.assert_close(
        state.first_frame[:, :3, 0], imagining.unit(batch.image).float(), rtol=0, atol=1e-6
    )


def test_the_autoencoders_own_loss_cancels_in_a_round_trip():
    batch = imagining.batch()
    pixels = reward_of(dreaming(batch, blur=0.5), batch)
    assert (pixels.reward < -1e-3).all()
    round_trip = reward_of(dreaming(batch, blur=0.5), batch, settings(compare="vae_roundtrip"))
    torch.testing.assert_close(round_trip.reward, torch.zeros(3), rtol=0, atol=1e-9)


def test_a_round_trip_never_sees_frames_that_were_not_reached():
    executed = torch.arange(10)[None] < torch.tensor([[5]])
    first = imagining.batch(1, executed_mask=executed)
    other = imagining.batch(1, executed_mask=executed)
    other.future_frames[:, 1] = 0
    options = settings(compare="vae_roundtrip")
    results = [reward_of(imagining.Imagining(blur=0.5), batch, options) for batch in (first, other)]
    assert torch.equal(results[0].reward, results[1].reward)


def test_cameras_are_compared_one_by_one():
    """Motion in one camera must not drown out the other: each is weighed within itself."""
    still = torch.zeros(1, 3, 8, 16, dtype=torch.uint8)
    executed = torch.zeros(1, 1, 3, 8, 16, dtype=torch.uint8)
    executed[..., 0, 0] = 255  # left camera
    executed[..., :4, 8:12] = 51  # right camera, a quarter of it, by 0.2
    batch = imagining.batch(1, frames=1, image=still, future_frames=executed)

    def reward(cameras):
        model = imagining.Imagining()
        model.future = torch.full((1, 1, 3, 8, 16), -1.0)
        return reward_of(model, batch, settings(num_cameras=cameras, weight="motion")).reward

    left = 0.5 / 64 + 0.5
    right = (0.5 / 4 + 0.5) * 0.04
    assert reward(2).item() == pytest.approx(-(left + right) / 2, rel=1e-4)
    assert reward(1).item() != pytest.approx(-(left + right) / 2, rel=1e-2)


def test_any_similarity_can_be_plugged_in():
    def shared_colour(pairs):
        assert pairs.current.shape == pairs.imagined.shape == (12, 3, 8, 8)
        return (pairs.imagined - pairs.executed).abs().mean(dim=(1, 2, 3)).view(-1, 1, 1)

    batch = imagining.batch(3)
    offset = 0.02
    pictures = torch.full((3, 2, 3, 8, 16), 100, dtype=torch.uint8)
    batch = imagining.batch(3, future_frames=pictures)
    result = reward_of(dreaming(batch, offset), batch, similarity=shared_colour)
    torch.testing.assert_close(result.reward, torch.full((3,), -offset), rtol=1e-4, atol=1e-6)


def test_rollout_latents_are_decoded_and_nothing_is_imagined():
    batch = imagining.batch()
    latents = torch.rand(3, 12, 3, 8, 16, generator=torch.Generator().manual_seed(1)) * 2 - 1
    model = imagining.Imagining()
    result = reconstruction_reward(
        model,
        imagining.batch(video_latents=latents.half()),
        settings=settings(source="rollout"),
    )
    assert model.calls == [] and model.vae.encoded == []
    assert model.vae.decoded == [(3, 12, 2, 8, 16)]
    pictures = imagining.ExactVAE().decode(latents.half().float())[:, :, 1:3].transpose(1, 2)
    error = (pictures / 2 + 0.5 - batch.future_frames.float() / 255).square()
    torch.testing.assert_close(result.per_frame, -error.mean(dim=(2, 3, 4)), rtol=1e-4, atol=1e-6)


def test_imagined_frames_can_be_kept_for_pictures():
    executed = torch.arange(10)[None] < torch.tensor([[10], [2], [10]])
    batch = imagining.batch(3, executed_mask=executed)
    model = imagining.Imagining()
    model.future = imagining.unit(batch.future_frames[[0, 2]]).float()
    kept = reward_of(model, batch, settings(max_batch=1), keep_imagined=2).imagined
    assert torch.equal(kept[0], batch.future_frames[0])
    assert torch.equal(kept[1], torch.zeros_like(kept[1]))
    assert len(kept) == 2 and kept.dtype == torch.uint8
    assert reward_of(imagining.Imagining(), batch, keep_imagined=0).imagined.shape[0] == 0


@pytest.mark.parametrize(
    ("executed", "mask", "expected"),
    [
        ([1, 1, 1, 1], True, [0, 0, 0, -2]),
        ([1, 1, 0, 0], True, [0, -2, 0, 0]),
        ([0, 0, 0, 0], True, [0, 0, 0, 0]),
        ([1, 1, 1, 1], False, [0, 0, 0, 0]),
    ],
)
def test_the_reward_lies_in_the_last_executed_slot(executed, mask, expected):
    placed = place_in_last_executed(
        torch.tensor([-2.0]), torch.tensor([mask]), torch.tensor([executed], dtype=torch.bool)
    )
    assert placed.tolist() == [expected] and placed.dtype == torch.float32


@pytest.mark.parametrize(
    ("options", "changes", "arguments", "words"),
    [
        ({"source": "rollout"}, {}, {}, "the record holds no video_latents"),
        ({}, {}, {"generators": None}, "3 macro-steps need as many generators, got none"),
        ({}, {}, {"generators": imagining.streams(2)}, "as many generators, got 2"),
        ({"action_video_freq_ratio": 6}, {}, {}, "beyond the 10 executed actions"),
        ({"num_cameras": 3}, {}, {}, "16 pixels wide does not hold 3"),
        ({}, {"frames": 10, "actions": 40}, {}, "10 executed frames cannot be compared"),
    ],
)
def test_what_does_not_fit_is_refused_in_words(options, changes, arguments, words):
    batch = imagining.batch(**changes)
    with pytest.raises(ValueError, match=words):
        reward_of(imagining.Imagining(), batch, settings(**options), **arguments)


def test_a_model_without_autoencoder_is_refused():
    model = imagining.Imagining()
    model.vae = None
    with pytest.raises(ValueError, match="has no VAE"):
        reward_of(model, imagining.batch())


@pytest.mark.parametrize(
    ("name", "value"),
    [("source", "past"), ("compare", "latents"), ("weight", "flow"), ("num_steps", 0)],
)
def test_impossible_settings_are_refused(name, value):
    with pytest.raises(ValueError, match=f"the reward's {name} must be"):
        settings(**{name: value})


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("image", torch.zeros(3, 3, 8, 16), "image must be uint8"),
        ("future_frames", torch.zeros(3, 2, 3, 8, 8, dtype=torch.uint8), "future_frames must be"),
        ("future_frames", torch.zeros(3, 0, 3, 8, 16, dtype=torch.uint8), "at least one frame"),
        ("future_frames_exist", torch.ones(3, 1, dtype=torch.bool), "future_frames_exist must be"),
        ("executed_mask", torch.ones(2, 10, dtype=torch.bool), "executed_mask has 2 rows"),
        ("proprio", torch.ones(4, 8), "proprio has 4 rows"),
    ],
)
def test_a_batch_that_does_not_fit_together_is_refused(name, value, words):
    with pytest.raises(ValueError, match=words):
        imagining.batch(**{name: value})
