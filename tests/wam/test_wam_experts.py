"""Both experts alone equal the official code."""

import golden_fastwam as golden
import pytest
import torch

from rlinf_wamrl.wam.layers import sinusoid
from rlinf_wamrl.wam.masks import video_mask


@pytest.fixture(scope="module")
def model():
    return golden.model()


@pytest.fixture(scope="module")
def context():
    data = golden.inputs()
    return data["context_with_proprio"], data["context_with_proprio_mask"]


def per_token(rows, tokens):
    """Repeats per-frame rows [1 or B, F, ...] for each token of the frame."""
    rows = rows.expand(2, *rows.shape[1:])
    return rows.repeat_interleave(tokens // rows.shape[1], dim=1)


def test_sinusoid():
    reference = golden.tensors("a_pre_dit")
    golden.assert_golden(sinusoid(reference["sinusoid.t_in"], 32), reference["sinusoid.dim32"])


@pytest.mark.parametrize("part", ["video", "first"])
def test_video_embedding(model, context, part):
    reference = golden.tensors("a_pre_dit")
    if part == "video":
        latents, timestep = reference["noisy_latents"], reference["video.t_in"]
    else:
        latents, timestep = golden.inputs()["latents"][:, :, :1], None
    stream, time = model.video_expert.embed(latents, timestep, *context)
    tokens = stream.tokens.shape[1]
    golden.assert_golden(stream.tokens, reference[f"{part}.tokens"])
    golden.assert_golden(per_token(time, tokens), reference[f"{part}.t"])
    golden.assert_golden(per_token(stream.modulation, tokens), reference[f"{part}.t_mod"])
    golden.assert_golden(torch.view_as_real(stream.rotation), reference[f"{part}.freqs_real"])
    golden.assert_golden(stream.context, reference[f"{part}.context"])
    mask = stream.context_mask[:, 0].expand(-1, tokens, -1)
    assert torch.equal(mask, reference[f"{part}.context_mask"])


def test_video_head_puts_patches_in_place(model, context):
    reference = golden.tensors("a_pre_dit")
    latents = reference["noisy_latents"]
    stream, time = model.video_expert.embed(latents, reference["video.t_in"], *context)
    golden.assert_golden(
        model.video_expert.velocity(stream.tokens, time, latents),
        reference["video.post_dit_of_tokens"],
    )


def test_action_embedding_and_head(model, context):
    reference = golden.tensors("a_pre_dit")
    stream = model.action_expert.embed(
        golden.inputs()["noise_action"], reference["action.t_in"], *context
    )
    golden.assert_golden(stream.tokens, reference["action.tokens"])
    golden.assert_golden(stream.modulation[:, 0], reference["action.t_mod"])
    golden.assert_golden(torch.view_as_real(stream.rotation), reference["action.freqs_real"])
    golden.assert_golden(stream.context, reference["action.context"])
    golden.assert_golden(
        model.action_expert.velocity(stream.tokens, torch.float32),
        reference["action.post_dit_of_tokens"],
    )


def test_standalone_video_velocity(model, context):
    latents = golden.tensors("e_joint")["latents_video"]
    velocity = model.video_expert(latents, golden.tensors("e_joint")["t_video"], *context)
    golden.assert_golden(velocity, golden.tensors("h_idm")["standalone_video_velocity"])


@pytest.mark.parametrize("mode", ["group_diagonal", "causal"])
def test_action_conditioned_video(context, mode):
    from dataclasses import replace

    reference = golden.tensors("i_action_conditioned")
    video = replace(
        golden.config().video_dit_config,
        action_conditioned=True,
        action_group_causal_mask_mode=mode,
    )
    model = golden.model(video_dit_config=video)
    model.load_state_dict(
        {name: value for name, value in reference.items() if name.startswith("mot.")},
        strict=False,
    )
    latents = golden.tensors("e_joint")["latents_video"]
    timestep, actions = golden.tensors("e_joint")["t_video"], golden.inputs()["action"]
    stream, _ = model.video_expert.embed(latents, timestep, *context, actions)
    golden.assert_golden(stream.context, reference["context"])
    assert torch.equal(stream.context_mask[:, 0], reference[f"{mode}.context_mask"])
    velocity = model.video_expert(latents, timestep, *context, actions)
    golden.assert_golden(velocity, reference[f"{mode}.video_velocity"])
    with pytest.raises(ValueError, match="needs the actions of the chunk"):
        model.video_expert(latents, timestep, *context)
    model.prefill(golden.observation())  # one frame sees text only


@pytest.mark.parametrize("mode", ["bidirectional", "per_frame_causal"])
def test_other_video_masks_act_in_the_network(context, mode):
    """A frame's velocity depends on a later frame exactly where the mask says so."""
    from dataclasses import replace

    video = replace(golden.config().video_dit_config, video_attention_mask_mode=mode)
    model = golden.model(video_dit_config=video)
    latents = golden.tensors("e_joint")["latents_video"]
    changed = latents.clone()
    changed[:, :, 2] += 1
    timestep = golden.tensors("e_joint")["t_video"]
    difference = model.video_expert(latents, timestep, *context) - model.video_expert(
        changed, timestep, *context
    )
    sees_last = video_mask(mode, 3, 1)[:, 2]
    assert (difference.abs().amax(dim=(0, 1, 3, 4)) > 1e-3).tolist() == sees_last.tolist()
