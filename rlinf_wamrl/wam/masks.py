"""Who attends to whom. All masks are boolean [queries, keys], True = may attend."""

from __future__ import annotations

import torch
from torch import Tensor

from rlinf_wamrl.wam.config import (
    ACTION_GROUP_MASKS,
    VIDEO_MASKS,
    ActionGroupMask,
    VideoMask,
)

__all__ = [
    "action_conditioned_context_mask",
    "action_group_mask",
    "mixture_mask",
    "teacher_forcing_mask",
    "video_mask",
]


def video_mask(
    mode: VideoMask, frames: int, tokens_per_frame: int, device: torch.device | None = None
) -> Tensor:
    """Video tokens among themselves, S = frames * tokens_per_frame.

    ``first_frame_causal``: the first frame sees only itself, the others see everything.
    ``per_frame_causal``: a frame sees itself and earlier ones. ``bidirectional``: everything.

    Example, 4 frames of one token (rows are queries)::

        first_frame_causal   per_frame_causal
             1 0 0 0             1 0 0 0
             1 1 1 1             1 1 0 0
             1 1 1 1             1 1 1 0
             1 1 1 1             1 1 1 1

    Returns:
        [S, S].
    """
    if mode not in VIDEO_MASKS:
        raise ValueError(f"The video mask must be one of {', '.join(VIDEO_MASKS)}, got {mode!r}.")
    frame = torch.arange(frames, device=device).repeat_interleave(tokens_per_frame)
    query, key = frame[:, None], frame[None]
    if mode == "first_frame_causal":
        return (query > 0) | (key == 0)
    if mode == "per_frame_causal":
        return query >= key
    return torch.ones(len(frame), len(frame), dtype=torch.bool, device=device)


def mixture_mask(video: Tensor, num_actions: int, visible_video_tokens: int) -> Tensor:
    """Order [video | action]: the video never sees actions, actions see each other and a prefix.

    Example, ``video`` = first_frame_causal with 2 tokens (2 frames), 2 actions, 1 visible token
    (the first frame: uncond), and 2 (all: joint, and idm at inference)::

        1 0 | 0 0        1 0 | 0 0
        1 1 | 0 0        1 1 | 0 0
        ----+----        ----+----
        1 0 | 1 1        1 1 | 1 1
        1 0 | 1 1        1 1 | 1 1

    Args:
        video: mask of the video tokens [S, S].
        num_actions: H.
        visible_video_tokens: how many leading video tokens the actions see.

    Returns:
        [S + H, S + H].
    """
    size = len(video)
    mask = torch.zeros(
        size + num_actions, size + num_actions, dtype=torch.bool, device=video.device
    )
    mask[:size, :size] = video
    mask[size:, :visible_video_tokens] = True
    mask[size:, size:] = True
    return mask


def teacher_forcing_mask(video: Tensor, num_actions: int, visible_video_tokens: int) -> Tensor:
    """Order [noisy video | conditioning video | action]: actions see the conditioning video only.

    Example, ``video`` = first_frame_causal with 2 tokens (2 frames), 1 action, both visible::

        1 0 | 0 0 | 0
        1 1 | 0 0 | 0
        ----+-----+--
        0 0 | 1 0 | 0
        0 0 | 1 1 | 0
        ----+-----+--
        0 0 | 1 1 | 1

    Args:
        video: mask of one video's tokens [S, S].
        num_actions: H.
        visible_video_tokens: how many leading tokens of the conditioning video the actions see.

    Returns:
        [2 S + H, 2 S + H].
    """
    size = len(video)
    mask = mixture_mask(torch.block_diag(video, video).bool(), num_actions, 0)
    mask[2 * size :, size : size + visible_video_tokens] = True
    return mask


def action_group_mask(
    mode: ActionGroupMask,
    groups: int,
    queries_per_group: int,
    keys_per_group: int,
    device: torch.device | None = None,
) -> Tensor:
    """Tokens of later frames to groups of actions: frame k + 1 sees group k, or groups 0..k.

    Example, 2 groups, 2 queries and 2 keys each::

        group_diagonal   causal
           1 1 0 0       1 1 0 0
           1 1 0 0       1 1 0 0
           0 0 1 1       1 1 1 1
           0 0 1 1       1 1 1 1

    Returns:
        [groups * queries_per_group, groups * keys_per_group].
    """
    if mode not in ACTION_GROUP_MASKS:
        raise ValueError(
            f"The action group mask must be one of {', '.join(ACTION_GROUP_MASKS)}, got {mode!r}."
        )
    group = torch.arange(groups, device=device)
    query = group.repeat_interleave(queries_per_group)[:, None]
    key = group.repeat_interleave(keys_per_group)[None]
    return query == key if mode == "group_diagonal" else query >= key


def action_conditioned_context_mask(
    context_mask: Tensor,
    mode: ActionGroupMask,
    frames: int,
    tokens_per_frame: int,
    num_actions: int,
) -> Tensor:
    """Video tokens to the context [text | actions]: only later frames see actions.

    Example, 3 frames of one token, 2 text tokens, 2 actions, group_diagonal::

        1 1 | 0 0
        1 1 | 1 0
        1 1 | 0 1

    Args:
        context_mask: of the text tokens [B, L].
        mode: see :func:`action_group_mask`.
        frames: f >= 2; the actions are cut into f - 1 equal groups.
        tokens_per_frame: n.
        num_actions: H, a multiple of f - 1.

    Returns:
        [B, f * n, L + H].
    """
    groups = frames - 1
    if groups < 1 or num_actions % groups:
        raise ValueError(
            f"{num_actions} actions cannot be cut into {groups} equal groups, one per later frame."
        )
    device = context_mask.device
    later = action_group_mask(mode, groups, tokens_per_frame, num_actions // groups, device)
    first = torch.zeros(tokens_per_frame, num_actions, dtype=torch.bool, device=device)
    actions = torch.cat((first, later))
    size = len(actions)
    return torch.cat(
        (
            context_mask[:, None].expand(-1, size, -1),
            actions.expand(len(context_mask), -1, -1),
        ),
        dim=-1,
    )
