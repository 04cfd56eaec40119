"""Prefill, velocity, and all ways of denoising equal the official code."""

import dataclasses

import golden_fastwam as golden
import pytest
import torch

VELOCITY_TIMES = ["0.0", "17.5", "250.0", "555.556", "833.333", "952.381", "1000.0"]


@pytest.fixture(scope="module")
def model():
    return golden.model().requires_grad_(False)


@pytest.fixture(scope="module")
def cache(model):
    return model.prefill(golden.observation())


def test_context(model):
    data = golden.inputs()
    context, mask = model.encode_context(golden.observation())
    golden.assert_golden(context, data["context_with_proprio"])
    assert torch.equal(mask, data["context_with_proprio_mask"])


def test_prefill(cache):
    reference = golden.tensors("b_prefill")
    for layer, (key, value) in enumerate(zip(cache.video_keys, cache.video_values, strict=True)):
        golden.assert_golden(key, reference[f"layer{layer}.k"])
        golden.assert_golden(value, reference[f"layer{layer}.v"])


@pytest.mark.parametrize("time", VELOCITY_TIMES)
def test_action_velocity(model, cache, time):
    reference = golden.tensors("c_action_velocity")
    actions = reference["latents_action"]
    velocity = model.action_velocity(actions, torch.full((2,), float(time)), cache)
    golden.assert_golden(velocity, reference[f"velocity_t{time}"])


def test_action_velocity_with_a_timestep_per_sample(model, cache):
    reference = golden.tensors("c_action_velocity")
    velocity = model.action_velocity(
        reference["latents_action"], reference["timestep_mixed"], cache
    )
    golden.assert_golden(velocity, reference["velocity_mixed"])


@pytest.mark.parametrize("steps", [4, 10])
def test_ode_trajectory(model, cache, steps):
    reference = golden.tensors("d_ode")
    timesteps, deltas = model.infer_action_scheduler.build_inference_schedule(steps)
    actions = reference["noise"]
    for k in range(steps):
        velocity = model.action_velocity(actions, timesteps[k].expand(2), cache)
        golden.assert_golden(velocity, reference[f"k{steps}.velocity"][k])
        actions = model.infer_action_scheduler.step(velocity, deltas[k], actions)
        golden.assert_golden(actions, reference[f"k{steps}.x"][k + 1])
    golden.assert_golden(actions, reference[f"k{steps}.infer_action"])


@pytest.mark.parametrize("steps", [4, 10])
def test_infer_action(model, steps):
    reference = golden.tensors("d_ode")
    actions = model.infer_action(golden.observation(), steps, noise=reference["noise"])
    golden.assert_golden(actions, reference[f"k{steps}.infer_action"])


def test_infer_action_with_another_shift(model):
    reference = golden.tensors("d_ode")
    actions = model.infer_action(golden.observation(), 4, noise=reference["noise"], shift=3.0)
    golden.assert_golden(actions[0], reference["shift3_k4.infer_action_sample0"])


def test_infer_action_draws_like_the_official_seed(model):
    state = golden.observation()
    first = dataclasses.replace(
        state, **{f.name: getattr(state, f.name)[:1] for f in dataclasses.fields(state)[:4]}
    )
    actions = model.infer_action(first, 10, torch.Generator().manual_seed(42))
    golden.assert_golden(actions[0], golden.tensors("d_ode")["seed42.action_sample0_k10"])


@pytest.mark.parametrize("variant", ["uncond", "joint"])
def test_joint_velocity(variant):
    reference, data = golden.tensors("e_joint"), golden.inputs()
    video, action = golden.model(variant=variant).joint_velocity(
        reference["latents_video"],
        reference["t_video"],
        reference["latents_action"],
        reference["t_action"],
        data["context_with_proprio"],
        data["context_with_proprio_mask"],
    )
    golden.assert_golden(video[:, :, 1:], reference[f"{variant}.pred_video"][:, :, 1:])
    golden.assert_golden(video, reference[f"{variant}.pred_video"])
    golden.assert_golden(action, reference[f"{variant}.pred_action"])


@pytest.mark.parametrize("variant", ["uncond", "joint"])
def test_infer_joint(variant):
    reference, data = golden.tensors("e_joint"), golden.inputs()
    video, actions = golden.model(variant=variant).infer_joint(
        golden.observation(), 4, video_noise=data["noise_video"], action_noise=data["noise_action"]
    )
    golden.assert_golden(video, reference[f"{variant}.infer_joint_k4.latents"])
    golden.assert_golden(actions, reference[f"{variant}.infer_joint_k4.action"])


@pytest.mark.parametrize("variant", ["idm", "optional_idm"])
def test_idm_stages(variant):
    reference, state = golden.tensors("h_idm"), golden.observation()
    model = golden.model(variant=variant, action_infer_mode="idm")
    video = model.imagine(state, 4, noise=reference["noise_video"])
    golden.assert_golden(video, reference["k4.imagined_latents"])
    assert torch.equal(video[:, :, :1], state.first_frame)

    state = dataclasses.replace(state, video=video)
    cache = model.prefill(state)
    for layer in range(3):
        golden.assert_golden(cache.video_keys[layer], reference[f"k4.cache.layer{layer}.k"])
        golden.assert_golden(cache.video_values[layer], reference[f"k4.cache.layer{layer}.v"])
    actions = model.infer_action(state, 4, noise=reference["noise_action"])
    golden.assert_golden(actions, reference["k4.action"])

    both = model.infer_joint(
        golden.observation(),
        4,
        video_noise=reference["noise_video"],
        action_noise=reference["noise_action"],
    )
    golden.assert_golden(both[0], reference["k4.imagined_latents"])
    golden.assert_golden(both[1], reference["k4.action"])


def test_each_imagination_step_asks_for_the_official_velocity(model):
    reference, seen = golden.tensors("h_idm"), []
    handle = model.video_expert.register_forward_hook(lambda *call: seen.append(call[2]))
    model.imagine(golden.observation(), 4, noise=reference["noise_video"])
    handle.remove()
    for velocity, expected in zip(seen, reference["k4.video_velocity"], strict=True):
        golden.assert_golden(velocity, expected)


def test_optional_idm_in_first_frame_mode_is_uncond():
    reference = golden.tensors("d_ode")
    model = golden.model(variant="optional_idm")
    actions = model.infer_action(golden.observation(), 4, noise=reference["noise"])
    golden.assert_golden(actions, reference["k4.infer_action"])


def test_generator_draws_video_then_actions(model):
    generator = torch.Generator().manual_seed(7)
    drawn = model.infer_joint(golden.observation(), 2, generator)
    generator.manual_seed(7)
    noises = [torch.randn(shape, generator=generator) for shape in ((2, 48, 3, 4, 6), (2, 8, 7))]
    given = model.infer_joint(
        golden.observation(), 2, video_noise=noises[0], action_noise=noises[1]
    )
    assert all(map(torch.equal, drawn, given))


@pytest.mark.parametrize("mode", [True, False])
def test_nothing_flips_the_mode_or_writes_to_its_arguments(mode):
    model, state, data = golden.model().train(mode), golden.observation(), golden.inputs()
    noise, original = data["noise_video"].clone(), data["noise_video"].clone()
    model.infer_joint(state, 2, video_noise=noise, action_noise=data["noise_action"])
    model.training_loss(golden.sample(), torch.Generator().manual_seed(0))
    assert model.training is mode
    assert torch.equal(noise, original)
    assert torch.equal(state.first_frame, golden.inputs()["latents"][:, :, :1])


def test_batch_equals_its_samples(model):
    state, data = golden.observation(), golden.inputs()
    together = model.infer_action(state, 4, noise=data["noise_action"])
    fields = ("first_frame", "context", "context_mask", "proprio")
    for row in range(2):
        one = dataclasses.replace(
            state, **{name: getattr(state, name)[row : row + 1] for name in fields}
        )
        alone = model.infer_action(one, 4, noise=data["noise_action"][row : row + 1])
        torch.testing.assert_close(together[row : row + 1], alone, rtol=0, atol=1e-5)


def test_cache_index_selects_rows(model, cache):
    data, timestep = golden.inputs(), torch.tensor([500.0])
    whole = model.action_velocity(data["noise_action"], timestep.expand(2), cache)
    row = model.action_velocity(data["noise_action"][1:], timestep, cache.index(slice(1, 2)))
    torch.testing.assert_close(row, whole[1:], rtol=0, atol=1e-5)
    picked = cache.index(torch.tensor([1]))
    assert torch.equal(picked.video_keys[0], cache.video_keys[0][1:])
    assert torch.equal(picked.context_mask, cache.context_mask[1:])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m, s, c: m.prefill(dataclasses.replace(s, proprio=None)), r"proprio \[2, 8\]"),
        (
            lambda m, s, c: m.prefill(dataclasses.replace(s, proprio=s.proprio[:, :3])),
            r"proprio \[2, 8\], got \[2, 3\]",
        ),
        (
            lambda m, s, c: m.prefill(dataclasses.replace(s, context=s.context[..., :5])),
            r"context must be \[B, L, 32\]",
        ),
        (
            lambda m, s, c: m.prefill(dataclasses.replace(s, context_mask=s.context_mask[:, :3])),
            r"context mask must be \[2, 6\], got \[2, 3\]",
        ),
        (
            lambda m, s, c: m.prefill(
                dataclasses.replace(s, first_frame=golden.inputs()["latents"])
            ),
            "latents .* of one image",
        ),
        (
            lambda m, s, c: m.prefill(dataclasses.replace(s, first_frame=s.first_frame[..., :5])),
            "cannot be cut into patches of 2 x 2",
        ),
        (
            lambda m, s, c: m.prefill(dataclasses.replace(s, first_frame=s.first_frame[:, :4])),
            r"latents must be \[B, 48, f, h, w\]",
        ),
        (
            lambda m, s, c: m.action_velocity(torch.zeros(3, 8, 7), torch.zeros(3), c),
            r"Actions must be \[2, H, 7\]",
        ),
        (
            lambda m, s, c: m.action_velocity(torch.zeros(2, 8, 7), torch.zeros(()), c),
            r"timestep must be \[2\]",
        ),
        (lambda m, s, c: m.imagine(s, 2), "exactly one of a generator and the video noise"),
        (
            lambda m, s, c: m.infer_action(s, 2, noise=torch.zeros(2, 9, 7)),
            r"action noise must be \[2, 8, 7\], got \[2, 9, 7\]",
        ),
        (
            lambda m, s, c: golden.model(variant="idm").prefill(s),
            "set state.video to the result of imagine",
        ),
        (
            lambda m, s, c: m.encode_video(torch.zeros(1, 3, 1, 32, 32)),
            "has no VAE",
        ),
    ],
)
def test_bad_input_is_one_clear_error(model, cache, call, message):
    with pytest.raises(ValueError, match=message):
        call(model, golden.observation(), cache)
