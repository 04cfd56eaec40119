"""Official FastWAM objects of both generations behave like our model once adapted."""

import dataclasses

import fake_official
import golden_fastwam as golden
import pytest
import torch
from torch import nn

from rlinf_wamrl.rl import flow_sde
from rlinf_wamrl.wam.adapter import OfficialFastWAM, adapt
from rlinf_wamrl.wam.features import capture_video_features

SURFACES = ["dict", "tensor"]


def adapted(surface, kind=fake_official.FakeFastWAM, variant="uncond", **options):
    model = kind(golden.model(variant=variant), surface)
    return adapt(model, action_horizon=8, **options)


@pytest.mark.parametrize("surface", SURFACES)
def test_surface_is_found_by_capability(surface):
    model = adapted(surface)
    assert isinstance(model, OfficialFastWAM)
    assert model.action_infer_mode == "first_frame"
    assert adapt(model) is model
    assert model.video_expert is model.model.video_expert


def test_newer_generation_is_taken_where_an_object_has_both():
    model = fake_official.FakeFastWAM(golden.model(), "tensor")
    for expert in (model.video_expert, model.action_expert):
        expert.pre_dit = None
    model.mot.prefill_video_cache = None
    adapt(model).prefill(golden.observation())


def test_our_own_model_is_returned_as_it_is():
    model = golden.model()
    assert adapt(model) is model


@pytest.mark.parametrize("surface", SURFACES)
def test_prefill_and_velocity(surface):
    reference, model = golden.tensors("c_action_velocity"), adapted(surface)
    cache = model.prefill(golden.observation())
    for layer in range(3):
        golden.assert_golden(
            cache.video_keys[layer], golden.tensors("b_prefill")[f"layer{layer}.k"]
        )
        golden.assert_golden(
            cache.video_values[layer], golden.tensors("b_prefill")[f"layer{layer}.v"]
        )
    velocity = model.action_velocity(
        reference["latents_action"], reference["timestep_mixed"], cache
    )
    golden.assert_golden(velocity, reference["velocity_mixed"])
    row = model.action_velocity(
        reference["latents_action"][1:], reference["timestep_mixed"][1:], cache.index(slice(1, 2))
    )
    golden.assert_golden(row, reference["velocity_mixed"][1:])


@pytest.mark.parametrize("surface", SURFACES)
def test_infer_action(surface):
    reference = golden.tensors("d_ode")
    actions = adapted(surface).infer_action(golden.observation(), 10, noise=reference["noise"])
    golden.assert_golden(actions, reference["k10.infer_action"])


@pytest.mark.parametrize("surface", SURFACES)
@pytest.mark.parametrize("video_gradient", [False, True])
def test_gradients(surface, video_gradient):
    reference = golden.tensors("j_rl_gradients")
    case = "kv_with_grad" if video_gradient else "kv_detached"
    facts = golden.numbers("j_rl_gradients")[case]["grad_norms"]
    model = adapted(surface)
    cache = model.prefill(golden.observation(), video_gradient=video_gradient)
    velocity = model.action_velocity(reference["x"], reference["t"], cache)
    (velocity * reference["cotangent"]).sum().backward()
    for name, parameter in model.native.named_parameters():
        if facts[name] is None:
            assert parameter.grad is None, name
        else:
            assert parameter.grad.norm().item() == pytest.approx(facts[name], rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("surface", SURFACES)
def test_idm_imagines_then_acts(surface):
    reference = golden.tensors("h_idm")
    model = adapted(surface, fake_official.FakeFastWAMIDM, "idm")
    assert model.action_infer_mode == "idm"
    video, actions = model.infer_joint(
        golden.observation(),
        4,
        video_noise=reference["noise_video"],
        action_noise=reference["noise_action"],
    )
    golden.assert_golden(video, reference["k4.imagined_latents"])
    golden.assert_golden(actions, reference["k4.action"])
    with pytest.raises(ValueError, match=r"set state.video"):
        model.prefill(golden.observation())


@pytest.mark.parametrize("surface", SURFACES)
def test_joint_runs_in_lock_step(surface):
    reference, data = golden.tensors("e_joint"), golden.inputs()
    model = adapted(surface, fake_official.FakeFastWAMJoint, "joint")
    video, actions = model.infer_joint(
        golden.observation(), 4, video_noise=data["noise_video"], action_noise=data["noise_action"]
    )
    golden.assert_golden(video, reference["joint.infer_joint_k4.latents"])
    golden.assert_golden(actions, reference["joint.infer_joint_k4.action"])


def test_optional_idm_offers_both_modes():
    kind = fake_official.FakeFastWAMOptionalIDM
    assert adapted("tensor", kind, "optional_idm").action_infer_mode == "first_frame"
    model = adapted("tensor", kind, "optional_idm", action_infer_mode="idm")
    state = golden.observation(video=golden.tensors("h_idm")["k4.imagined_latents"])
    golden.assert_golden(
        model.prefill(state).video_keys[2], golden.tensors("h_idm")["k4.cache.layer2.k"]
    )


@pytest.mark.parametrize("surface", SURFACES)
def test_flow_sde_gives_the_same_chains_as_our_model(surface):
    state, native, model = golden.observation(), golden.model(), adapted(surface)

    def sample(chosen):
        generators = [torch.Generator().manual_seed(seed) for seed in range(2)]
        return flow_sde.sample_chain(
            chosen, state, 4, 0.5, generators, horizon=8, action_dim=7, num_executed=4
        )

    ours, theirs = sample(native), sample(model)
    golden.assert_golden(theirs.chain, ours.chain)
    rescored = flow_sde.logprob_chain(
        model, state, theirs.chain, theirs.k_star, 0.5, num_executed=4
    )
    torch.testing.assert_close(rescored, theirs.logp_old, rtol=0, atol=1e-4)


@pytest.mark.parametrize("surface", SURFACES)
def test_training_loss_takes_generator_and_weights(surface):
    model, sample = adapted(surface), golden.sample()
    torch.manual_seed(11)
    state_before = torch.get_rng_state()

    def loss(**weights):
        return model.training_loss(sample, torch.Generator().manual_seed(4), **weights)

    total, both = loss()
    again, weighted = loss(lambda_video=2.0, lambda_action=0.5)
    assert torch.equal(torch.get_rng_state(), state_before)
    assert (model.loss_lambda_video, model.loss_lambda_action) == (1.0, 1.0)
    torch.testing.assert_close(weighted["loss_video"], both["loss_video"], rtol=1e-5, atol=0)
    torch.testing.assert_close(weighted["loss_action"], both["loss_action"], rtol=1e-5, atol=0)
    expected = 2.0 * both["loss_video"] + 0.5 * both["loss_action"]
    torch.testing.assert_close(again.detach(), expected, rtol=1e-5, atol=0)
    video_only, scalars = loss(lambda_action=0.0)
    assert scalars.keys() == {"loss", "loss_video"}
    video_only.backward()
    assert total.requires_grad


def test_autoencoder_has_our_signatures():
    data, vae = golden.inputs(), adapted("dict").vae
    video = data["video_small"].repeat_interleave(4, -1).repeat_interleave(4, -2)
    golden.assert_golden(vae.encode(video), data["latents"])
    golden.assert_golden(vae.encode(video[:, :, :1]), data["latents"][:, :, :1])
    assert vae.decode(data["latents"]).shape == (2, 3, 3, 64, 96)
    assert (vae.spatial_factor, vae.temporal_factor) == (16, 4)


def test_missing_proprio_is_an_error():
    state = dataclasses.replace(golden.observation(), proprio=None)
    with pytest.raises(ValueError, match="needs proprio"):
        adapted("dict").prefill(state)


def test_objects_without_either_surface_are_refused():
    with pytest.raises(TypeError, match="Linear is neither .* lacks video_expert, action_expert"):
        adapt(nn.Linear(2, 2))
    model = fake_official.FakeFastWAM(golden.model(), "dict")
    model.action_expert = nn.Identity()
    with pytest.raises(TypeError, match="neither pre_dit .* nor prepare"):
        adapt(model)


def test_modes_the_variant_was_not_trained_for_are_refused():
    with pytest.raises(ValueError, match="trained in mode 'first_frame'"):
        adapted("dict", action_infer_mode="idm")
    with pytest.raises(ValueError, match="trained in mode 'idm'"):
        adapted("dict", fake_official.FakeFastWAMIDM, "idm", action_infer_mode="first_frame")


def test_features_are_what_the_actions_read():
    model = golden.model()
    with capture_video_features(model) as features:
        cache = model.prefill(golden.observation(), video_gradient=True)
    model.prefill(golden.observation())
    expected = list(zip(cache.video_keys, cache.video_values, strict=True))
    assert len(features) == 3
    for (key, value), (cached_key, cached_value) in zip(features, expected, strict=True):
        assert key is cached_key
        assert value is cached_value
    assert features[0][0].requires_grad


def test_features_are_captured_in_training_too():
    model = golden.model()
    with capture_video_features(model) as features:
        model.training_loss(golden.sample(), torch.Generator().manual_seed(0))
    assert [key.shape for key, _ in features] == [(2, 18, 80)] * 3


def test_features_of_an_expert_without_taps_are_taken_before_the_rotation():
    model = golden.model()
    for block in model.video_expert.blocks:
        block.self_attn.key_value = None
        block.self_attn.keys_values = _untapped(block.self_attn)
    with capture_video_features(model) as features:
        cache = model.prefill(golden.observation())
    for (key, value), cached_key, cached_value in zip(
        features, cache.video_keys, cache.video_values, strict=True
    ):
        assert value is cached_value
        torch.testing.assert_close(key.norm(dim=-1), cached_key.norm(dim=-1))


def _untapped(attention):
    from rlinf_wamrl.wam.layers import rotate

    def keys_values(x, rotation):
        key = rotate(attention.norm_k(attention.k(x)), rotation, attention.num_heads)
        return key, attention.v(x)

    return keys_values
