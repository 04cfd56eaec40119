"""Names, sizes, devices and dtypes of the model."""

import copy
import dataclasses
import time

import golden_fastwam as golden
import peft
import pytest
import torch
from torch import nn

from rlinf_wamrl.wam.config import (
    ActionExpertConfig,
    VideoExpertConfig,
    WAMConfig,
    fastwam_5b,
    rotary_widths,
)
from rlinf_wamrl.wam.state import WAMState
from rlinf_wamrl.wam.wam import WAM

LORA_TARGETS = r".*\.(self_attn|cross_attn)\.[qkvo]|.*\.ffn\.[02]"


def listed(name):
    lines = (golden.FOLDER / name).read_text().splitlines()
    return {key: shape for key, shape in (line.split("\t") for line in lines)}


def names_and_shapes(model):
    return {name: str(list(value.shape)) for name, value in model.state_dict().items()}


def velocity(model):
    reference = golden.tensors("c_action_velocity")
    cache = model.prefill(golden.observation())
    return model.action_velocity(reference["latents_action"], reference["timestep_mixed"], cache)


def test_names_and_shapes_are_the_official_ones():
    assert names_and_shapes(golden.model()) == listed("keys.txt")


def test_5b_layout_on_the_meta_device():
    start = time.perf_counter()
    with torch.device("meta"):
        model = WAM(fastwam_5b())
    seconds = time.perf_counter() - start
    assert names_and_shapes(model) == listed("keys_5b.txt")
    assert len(list(model.parameters())) == 1651
    assert all(p.device.type == "meta" for p in model.parameters())
    facts = golden.numbers("params_real")["libero"]
    sizes = {
        "total_trainable": model,
        "video": model.video_expert,
        "action": model.action_expert,
        "proprio": model.proprio_encoder,
        "per_block_video": model.video_expert.blocks[0],
        "per_block_action": model.action_expert.blocks[0],
    }
    for name, module in sizes.items():
        assert sum(p.numel() for p in module.parameters()) == facts[name], name
    assert facts["total_trainable"] == 6_020_710_599
    assert seconds < 10


def test_robotwin_size():
    config = fastwam_5b()
    action = dataclasses.replace(config.action_dit_config, action_dim=14)
    with torch.device("meta"):
        model = WAM(dataclasses.replace(config, action_dit_config=action, proprio_dim=14))
    total = golden.numbers("params_real")["robotwin"]["total_trainable"]
    assert sum(p.numel() for p in model.parameters()) == total


@pytest.mark.parametrize("assign", [True, False])
def test_rotary_tables_survive_construction_on_the_meta_device(assign):
    with torch.device("meta"):
        model = WAM(golden.config())
    if not assign:
        model = model.to_empty(device="cpu")
    model.load_state_dict(golden.tensors("tiny_state"), assign=assign)
    golden.assert_golden(velocity(model), golden.tensors("c_action_velocity")["velocity_mixed"])


def test_rotary_tables_keep_their_precision():
    model, reference = golden.model(), golden.model()
    model.to(torch.bfloat16).to(torch.float32)
    for name, table in model.named_buffers():
        assert table.dtype == torch.float32
        assert torch.equal(table, reference.get_buffer(name)), name
    assert not any("rotary" in name for name in model.state_dict())


def test_bfloat16():
    model = golden.model().to(torch.bfloat16)
    reference = golden.tensors("c_action_velocity")["velocity_mixed"]
    result = velocity(model)
    assert result.dtype == torch.float32
    error = (result - reference).abs().max() / reference.abs().max()
    assert 1e-5 < error < 0.05
    total, scalars = model.training_loss(golden.sample(), torch.Generator().manual_seed(0))
    expected, _ = golden.model().training_loss(golden.sample(), torch.Generator().manual_seed(0))
    assert scalars["loss"].dtype == torch.float32
    assert total.item() == pytest.approx(expected.item(), rel=0.05)
    total.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())
    video = model.imagine(golden.observation(), 2, torch.Generator().manual_seed(0))
    assert video.dtype == torch.float32


@pytest.mark.parametrize("head_dim", [6, 16, 20, 32, 64, 128])
def test_rotary_split(head_dim):
    frame, row, column = rotary_widths(head_dim)
    assert frame + row + column == head_dim
    assert all(width > 0 and width % 2 == 0 for width in (frame, row, column))
    if head_dim % 6 in (0, 2):
        third = head_dim // 3
        assert (frame, row, column) == (head_dim - 2 * third, third, third)


def small(**changes):
    shared = {"num_heads": 4, "attn_head_dim": 32, "num_layers": 4, "text_dim": 64}
    values = {
        "video_dit_config": VideoExpertConfig(hidden_dim=128, ffn_dim=256, **shared),
        "action_dit_config": ActionExpertConfig(hidden_dim=128, ffn_dim=256, **shared),
        "proprio_dim": 8,
        "num_video_frames": 5,
        "action_horizon": 16,
    }
    return WAMConfig(**(values | changes))


def small_state(batch, config):
    generator = torch.Generator().manual_seed(1)
    width = config.video_dit_config.text_dim
    return WAMState(
        first_frame=torch.randn(batch, 48, 1, 4, 8, generator=generator),
        context=torch.randn(batch, 3, width, generator=generator),
        context_mask=torch.ones(batch, 3, dtype=torch.bool),
        proprio=torch.randn(batch, 8, generator=generator),
    )


@pytest.mark.parametrize("variant", ["uncond", "joint", "idm", "optional_idm"])
def test_small_sizes_train_and_infer(variant):
    config = small(variant=variant)
    model, state = WAM(config), small_state(2, config)
    video, actions = model.infer_joint(state, 2, torch.Generator().manual_seed(0))
    assert video.shape == (2, 48, 2, 4, 8)
    assert actions.shape == (2, 16, 7)
    sample = {
        "video_latents": video,
        "context": state.context,
        "context_mask": state.context_mask,
        "action": actions,
        "proprio": state.proprio[:, None],
    }
    total, _ = model.training_loss(sample, torch.Generator().manual_seed(0))
    total.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_same_weights_and_shape_give_the_same_bits():
    config = small()
    model, state = WAM(config), small_state(3, config)
    actions, timestep = torch.randn(3, 16, 7), torch.tensor([900.0, 500.0, 10.0])
    with torch.no_grad():
        rollout = model.action_velocity(actions, timestep, model.prefill(state))
    learner = copy.deepcopy(model).train()
    scored = learner.action_velocity(actions, timestep, learner.prefill(state))
    assert torch.equal(rollout, scored)


def test_compiled_velocity():
    config = small(num_video_frames=5)
    model, state = WAM(config), small_state(2, config)
    actions, timestep = torch.randn(2, 16, 7), torch.tensor([900.0, 10.0])
    cache = model.prefill(state)
    eager = model.action_velocity(actions, timestep, cache)
    model.compile_velocity(backend="aot_eager", fullgraph=True)
    compiled = model.action_velocity(actions, timestep, cache)
    torch.testing.assert_close(compiled, eager, rtol=0, atol=1e-5)
    compiled.sum().backward()
    assert names_and_shapes(model) == names_and_shapes(WAM(config))


@pytest.mark.parametrize("wrap", ["inject", "wrapped"])
def test_lora_on_the_video_expert(wrap):
    model = golden.model().requires_grad_(False)
    before = velocity(model)
    # Zero-initialised adapters change nothing; scrambled ones show that they are in the path.
    lora = peft.LoraConfig(r=2, target_modules=LORA_TARGETS)
    if wrap == "inject":
        peft.inject_adapter_in_model(lora, model.video_expert)
    else:
        model.video_expert = peft.get_peft_model(model.video_expert, lora)
    assert model.video_expert is model.mot.mixtures["video"]
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    assert len(trained) == 3 * 10 * 2
    torch.testing.assert_close(velocity(model), before, rtol=0, atol=1e-6)
    for name, parameter in trained.items():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    assert not torch.allclose(velocity(model), before, atol=1e-2)
    total, _ = model.training_loss(
        golden.sample(), torch.Generator().manual_seed(0), lambda_action=0.0
    )
    total.backward()
    assert all(p.grad is not None for p in trained.values())
    if wrap == "wrapped":
        with model.video_expert.disable_adapter():
            torch.testing.assert_close(velocity(model), before, rtol=0, atol=1e-6)


class Codec(nn.Module):
    """A linear autoencoder with a weight, to see where it goes."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def encode(self, video):
        assert not torch.is_grad_enabled()
        cells = nn.functional.avg_pool3d(video * self.scale, (1, 16, 16)).repeat(1, 16, 1, 1, 1)
        later = cells[:, :, 1:].unflatten(2, (-1, 4)).mean(dim=3)
        return torch.cat((cells[:, :, :1], later), dim=2)


def test_autoencoder_belongs_to_the_model_but_not_to_its_weights():
    model = WAM(small(), vae=Codec())
    assert not any("vae" in name for name in model.state_dict())
    assert all(p is not model.vae.scale for p in model.parameters())
    model.to(torch.float64)
    assert model.vae.scale.dtype == torch.float64
    model.to(torch.float32)
    video = torch.rand(2, 3, 5, 64, 128) * 2 - 1
    state = small_state(2, model.config)
    sample = {
        "video": video,
        "context": state.context,
        "context_mask": state.context_mask,
        "action": torch.zeros(2, 16, 7),
        "proprio": state.proprio[:, None],
    }
    total, _ = model.training_loss(sample, torch.Generator().manual_seed(0))
    encoded = {**sample, "video": None, "video_latents": model.encode_video(video)}
    again, _ = model.training_loss(encoded, torch.Generator().manual_seed(0))
    assert torch.equal(total, again)
    with pytest.raises(ValueError, match="one more than a multiple of 4"):
        model.encode_video(video[:, :, :4])


def test_model_without_proprio_ignores_it():
    config = small(proprio_dim=None)
    model, state = WAM(config), small_state(2, config)
    assert model.proprio_encoder is None
    context, mask = model.encode_context(state)
    assert torch.equal(context, state.context)
    assert mask.shape == (2, 3)
    assert model.infer_action(state, 1, noise=torch.zeros(2, 16, 7)).shape == (2, 16, 7)


@pytest.mark.parametrize(
    ("variant", "mode"),
    [("uncond", "first_frame"), ("joint", "idm"), ("idm", "idm"), ("optional_idm", "first_frame")],
)
def test_modes_follow_the_variant(variant, mode):
    assert small(variant=variant).action_infer_mode == mode


def test_official_configuration_is_read():
    config = golden.config()
    assert config.video_dit_config.hidden_dim == 80
    assert config.video_dit_config.patch_size == (1, 2, 2)
    assert config.action_dit_config.ffn_dim == 64
    assert config.num_latent_frames == 3
    assert config.video_cond_noise_prob is None
    assert golden.config(variant="idm").video_cond_noise_prob == 0.5
    assert golden.config(variant="optional_idm").video_cond_noise_prob == 0.0


def changed(part, **values):
    return small(**{part: dataclasses.replace(getattr(small(), part), **values)})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: changed("action_dit_config", num_layers=3), "same num_layers .* has 4, .* has 3"),
        (lambda: changed("action_dit_config", attn_head_dim=16), "same attn_head_dim"),
        (lambda: changed("action_dit_config", num_heads=2), "same num_heads"),
        (lambda: changed("video_dit_config", attn_head_dim=33), "attn_head_dim must be even"),
        (lambda: changed("video_dit_config", hidden_dim=0), "hidden_dim must be positive, got 0"),
        (lambda: changed("video_dit_config", out_dim=16), "out_dim must equal in_dim"),
        (lambda: changed("video_dit_config", patch_size=(2, 2, 2)), "patch_size must be"),
        (
            lambda: changed("video_dit_config", video_attention_mask_mode="causal"),
            "video_attention_mask_mode must be one of first_frame_causal, bidirectional",
        ),
        (lambda: small(variant="both"), "variant must be one of uncond, joint, idm, optional_idm"),
        (lambda: small(action_infer_mode="idm"), "must be 'first_frame' for variant 'uncond'"),
        (lambda: small(num_video_frames=6), "one more than a multiple of 4, got 6"),
        (lambda: small(action_idm_prob=1.5), r"action_idm_prob is a probability .* got 1.5"),
        (lambda: small(loss_lambda_video=-1.0), "loss_lambda_video must not be negative"),
        (lambda: small(action_infer_shift=0.0), "action_infer_shift must be positive"),
        (
            lambda: small(
                variant="idm",
                video_dit_config=dataclasses.replace(
                    small().video_dit_config, action_conditioned=True
                ),
            ),
            "action_conditioned needs variant 'uncond'",
        ),
        (lambda: WAMConfig.from_dict({"action_dit_config": {}}), "lacks 'video_dit_config'"),
        (
            lambda: WAMConfig.from_dict(
                {"video_dit_config": {"hidden": 8}, "action_dit_config": {}}
            ),
            r"model.video_dit_config has unknown fields hidden; known are .*hidden_dim",
        ),
        (
            lambda: WAMConfig.from_dict({"video_dit_config": {}, "action_dit_config": {}}),
            "model.video_dit_config: .*missing .*hidden_dim",
        ),
        (
            lambda: WAMConfig.from_dict(
                {"video_dit_config": {"has_image_input": True}, "action_dit_config": {}}
            ),
            "has_image_input must be False",
        ),
    ],
)
def test_impossible_configurations_are_refused_in_words(make, message):
    with pytest.raises(ValueError, match=message):
        make()
