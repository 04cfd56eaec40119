"""Masks equal the official ones exactly."""

import golden_fastwam as golden
import pytest
import torch

from rlinf_wamrl.wam import masks

SIZES = [(1, 4, 2), (2, 1, 3), (3, 2, 4)]  # frames, tokens per frame, actions


@pytest.mark.parametrize("mode", ["first_frame_causal", "bidirectional", "per_frame_causal"])
@pytest.mark.parametrize(("frames", "tokens", "actions"), SIZES)
def test_video_mask(mode, frames, tokens, actions):
    reference = golden.tensors("i_masks")[f"v2v.{mode}.frames{frames}_tokens{tokens}"]
    assert torch.equal(masks.video_mask(mode, frames, tokens), reference)


@pytest.mark.parametrize("variant", ["uncond", "joint", "idm"])
@pytest.mark.parametrize(("frames", "tokens", "actions"), SIZES)
def test_mixture_mask(variant, frames, tokens, actions):
    reference = golden.tensors("i_masks")[
        f"{variant}.mot.frames{frames}_tokens{tokens}_action{actions}"
    ]
    video = masks.video_mask("first_frame_causal", frames, tokens)
    visible = tokens if variant == "uncond" else frames * tokens
    assert torch.equal(masks.mixture_mask(video, actions, visible), reference)


@pytest.mark.parametrize(("frames", "tokens", "actions"), SIZES)
def test_teacher_forcing_mask(frames, tokens, actions):
    reference = golden.tensors("i_masks")[
        f"idm.teacher.frames{frames}_tokens{tokens}_action{actions}"
    ]
    video = masks.video_mask("first_frame_causal", frames, tokens)
    assert torch.equal(masks.teacher_forcing_mask(video, actions, len(video)), reference)


def test_teacher_forcing_mask_can_hide_all_but_the_first_frame():
    video = masks.video_mask("first_frame_causal", 2, 2)
    mask = masks.teacher_forcing_mask(video, 1, 2)
    assert mask[-1].tolist() == [False] * 4 + [True, True, False, False] + [True]


@pytest.mark.parametrize("mode", ["group_diagonal", "causal"])
def test_action_group_mask(mode):
    reference = golden.tensors("i_masks")[f"group.{mode}.groups3_q2_k4"]
    assert torch.equal(masks.action_group_mask(mode, 3, 2, 4), reference)


@pytest.mark.parametrize("mode", ["group_diagonal", "causal"])
def test_action_conditioned_context_mask(mode):
    data = golden.inputs()
    mask = masks.action_conditioned_context_mask(
        data["context_with_proprio_mask"], mode, 3, 6, data["action"].shape[1]
    )
    assert torch.equal(mask, golden.tensors("i_action_conditioned")[f"{mode}.context_mask"])


def test_unknown_modes_are_errors():
    with pytest.raises(ValueError, match="first_frame_causal"):
        masks.video_mask("causal", 2, 2)
    with pytest.raises(ValueError, match="group_diagonal"):
        masks.action_group_mask("diagonal", 2, 2, 2)
    with pytest.raises(ValueError, match="5 actions cannot be cut into 2 equal groups"):
        masks.action_conditioned_context_mask(torch.ones(1, 3).bool(), "causal", 3, 2, 5)
