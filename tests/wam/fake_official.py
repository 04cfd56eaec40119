"""Stand-ins with the two surfaces of official FastWAM objects, on top of our own blocks.

They take and return what the official methods do (dictionaries or tuples, one row of modulation per
token, masks per query), so that an adapter which mixes something up gets other numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rlinf_wamrl.wam.layers import attend
from rlinf_wamrl.wam.masks import video_mask
from rlinf_wamrl.wam.wam import WAM


def _per_token(rows: Tensor, batch: int, tokens: int) -> Tensor:
    rows = rows.expand(batch, *rows.shape[1:])
    return rows.repeat_interleave(tokens // rows.shape[1], dim=1)


def _mask(context_mask: Tensor, queries: int) -> Tensor:
    return context_mask[:, None].expand(-1, queries, -1)


class _VideoExpert(nn.Module):
    def __init__(self, expert):
        super().__init__()
        self.expert = expert
        self.blocks = expert.blocks

    def _embed(self, x, timestep, context, context_mask, action, fuse):
        assert fuse
        assert timestep.shape == x.shape[:1]
        assert timestep.dtype == x.dtype
        assert action is None
        stream, time = self.expert.embed(x, timestep, context, context_mask)
        batch, tokens = stream.tokens.shape[:2]
        frames, rows, columns = self.expert.grid(x)
        return {
            "tokens": stream.tokens,
            "freqs": stream.rotation[:, None],
            "t": _per_token(time, batch, tokens),
            "t_mod": _per_token(stream.modulation, batch, tokens),
            "context": stream.context,
            "context_mask": _mask(context_mask, tokens),
            "meta": {"grid_size": (frames, rows, columns), "tokens_per_frame": rows * columns},
        }

    def build_video_to_video_mask(self, video_seq_len, video_tokens_per_frame, device):
        frames = video_seq_len // video_tokens_per_frame
        mode = self.expert.config.video_attention_mask_mode
        return video_mask(mode, frames, video_tokens_per_frame, device)

    def forward(self, x, timestep, context, context_mask, fuse_vae_embedding_in_latents):
        assert fuse_vae_embedding_in_latents
        return self.expert(x, timestep, context, context_mask)


class DictVideoExpert(_VideoExpert):
    def pre_dit(self, x, timestep, context, context_mask, action, fuse_vae_embedding_in_latents):
        fuse = fuse_vae_embedding_in_latents
        return self._embed(x, timestep, context, context_mask, action, fuse)


class TensorVideoExpert(_VideoExpert):
    def prepare(self, x, timestep, context, context_mask, action, fuse_vae_embedding_in_latents):
        fuse = fuse_vae_embedding_in_latents
        embedded = self._embed(x, timestep, context, context_mask, action, fuse)
        meta = embedded.pop("meta")
        order = ("tokens", "t", "t_mod", "context", "context_mask", "freqs")
        parts = tuple(embedded[name] for name in order)
        return (*parts, *meta["grid_size"], meta["tokens_per_frame"])


class _ActionExpert(nn.Module):
    def __init__(self, expert):
        super().__init__()
        self.expert = expert
        self.blocks = expert.blocks
        self.action_dim = expert.config.action_dim

    def _embed(self, action_tokens, timestep, context, context_mask):
        assert timestep.dtype == action_tokens.dtype
        stream = self.expert.embed(action_tokens, timestep, context, context_mask)
        return {
            "tokens": stream.tokens,
            "t": None,
            "t_mod": stream.modulation[:, 0],
            "context": stream.context,
            "context_mask": _mask(context_mask, action_tokens.shape[1]),
            "freqs": stream.rotation[:, None],
        }


class DictActionExpert(_ActionExpert):
    def pre_dit(self, action_tokens, timestep, context, context_mask):
        return self._embed(action_tokens, timestep, context, context_mask)

    def post_dit(self, tokens, embedded):
        assert embedded["tokens"].shape == tokens.shape
        return self.expert.head(tokens)


class TensorActionExpert(_ActionExpert):
    def prepare(self, action_tokens, timestep, context, context_mask):
        return tuple(self._embed(action_tokens, timestep, context, context_mask).values())

    def post(self, tokens):
        return self.expert.head(tokens)


class _Mixture(nn.Module):
    def __init__(self, video_expert, action_expert):
        super().__init__()
        self.mixtures = nn.ModuleDict({"video": video_expert, "action": action_expert})

    def _prefill(self, tokens, freqs, modulation, context, context_mask, mask):
        layers = []
        for block in self.mixtures["video"].blocks:
            tokens, key, value = _run(block, tokens, freqs, modulation, context, context_mask, mask)
            layers.append((key, value))
        return layers

    def _act(self, tokens, freqs, modulation, context, context_mask, layers, mask):
        for block, cached in zip(self.mixtures["action"].blocks, layers, strict=True):
            tokens, _, _ = _run(
                block, tokens, freqs, modulation[:, None], context, context_mask, mask, cached
            )
        return tokens


def _run(block, tokens, freqs, modulation, context, context_mask, mask, cached=None):
    parts = block.split(modulation)
    normed = block.attention_input(tokens, parts)
    key, value = block.self_attn.keys_values(normed, freqs[:, 0])
    query = block.self_attn.queries(normed, freqs[:, 0])
    seen = (key, value)
    if cached is not None:
        seen = tuple(torch.cat(pair, dim=1) for pair in zip(cached, seen, strict=True))
    attended = attend(query, *seen, block.self_attn.num_heads, mask)
    projected = block.cross_attn.keys_values(context)
    return block.finish(tokens, attended, parts, projected, context_mask[:, None]), key, value


class DictMixture(_Mixture):
    def prefill_video_cache(
        self, video_tokens, video_freqs, video_t_mod, video_context_payload, video_attention_mask
    ):
        layers = self._prefill(
            video_tokens,
            video_freqs,
            video_t_mod,
            video_context_payload["context"],
            video_context_payload["mask"],
            video_attention_mask,
        )
        return [{"k": key, "v": value} for key, value in layers]

    def forward_action_with_video_cache(
        self,
        action_tokens,
        action_freqs,
        action_t_mod,
        action_context_payload,
        video_kv_cache,
        attention_mask,
        video_seq_len,
    ):
        assert attention_mask.shape == (video_seq_len + action_tokens.shape[1],) * 2
        return self._act(
            action_tokens,
            action_freqs,
            action_t_mod,
            action_context_payload["context"],
            action_context_payload["mask"],
            [(layer["k"], layer["v"]) for layer in video_kv_cache],
            attention_mask[video_seq_len:],
        )


class TensorMixture(_Mixture):
    def prefill_video_cache_tensor(
        self,
        video_tokens,
        video_freqs,
        video_t_mod,
        video_context,
        video_context_mask,
        video_attention_mask,
    ):
        layers = self._prefill(
            video_tokens,
            video_freqs,
            video_t_mod,
            video_context,
            video_context_mask,
            video_attention_mask,
        )
        return [key for key, _ in layers], [value for _, value in layers]

    def forward_action_with_video_cache_tensor(
        self,
        action_tokens,
        action_freqs,
        action_t_mod,
        action_context,
        action_context_mask,
        video_cache_k,
        video_cache_v,
        action_attention_mask,
    ):
        return self._act(
            action_tokens,
            action_freqs,
            action_t_mod,
            action_context,
            action_context_mask,
            list(zip(video_cache_k, video_cache_v, strict=True)),
            action_attention_mask,
        )


class FakeVAE:
    """Averages blocks of 4 x 4 pixels, as the reference numbers' stub does."""

    upsampling_factor = 16
    temporal_downsample_factor = 4

    def encode(self, video, device, tiled):
        assert not tiled
        small = nn.functional.avg_pool3d(video, (1, 4, 4))
        cells = small.unflatten(4, (-1, 4)).unflatten(3, (-1, 4))  # [B, 3, T, h, 4, w, 4]
        latents = cells.permute(0, 1, 4, 6, 2, 3, 5).flatten(1, 3)
        later = latents[:, :, 1:].unflatten(2, (-1, 4)).mean(dim=3)
        return torch.cat((latents[:, :, :1], later), dim=2)

    def decode(self, latents, device):
        return latents[:, :3].repeat_interleave(16, -1).repeat_interleave(16, -2)


_SURFACES = {
    "dict": (DictVideoExpert, DictActionExpert, DictMixture),
    "tensor": (TensorVideoExpert, TensorActionExpert, TensorMixture),
}


class FakeFastWAM(nn.Module):
    """An official uncond model. ``surface`` is ``dict`` or ``tensor``."""

    def __init__(self, wam: WAM, surface: str):
        super().__init__()
        self.native = wam
        video, action, mixture = _SURFACES[surface]
        self.video_expert = video(wam.video_expert)
        self.action_expert = action(wam.action_expert)
        self.mot = mixture(self.video_expert, self.action_expert)
        self.proprio_encoder = wam.proprio_encoder
        self.infer_action_scheduler = wam.infer_action_scheduler
        self.infer_video_scheduler = wam.infer_video_scheduler
        self.vae = FakeVAE()
        self.device = torch.device("cpu")
        self.torch_dtype = torch.float32
        self.loss_lambda_video = 1.0
        self.loss_lambda_action = 1.0

    def _append_proprio_to_context(self, context, context_mask, proprio):
        return self.native.append_proprio(context, context_mask, proprio)

    def _encode_video_latents(self, video_tensor, tiled=False):
        return self.vae.encode(video_tensor, device=self.device, tiled=tiled)

    def _predict_joint_noise(
        self,
        latents_video,
        latents_action,
        timestep_video,
        timestep_action,
        context,
        context_mask,
        fuse_vae_embedding_in_latents,
    ):
        assert fuse_vae_embedding_in_latents
        with torch.no_grad():
            return self.native.joint_velocity(
                latents_video,
                timestep_video,
                latents_action,
                timestep_action,
                context,
                context_mask,
            )

    def infer_action(self, prompt, input_image, action_horizon):
        raise AssertionError("the adapter must not call this")

    def training_loss(self, sample):
        total, scalars = self.native.training_loss(
            sample,
            None,
            lambda_video=self.loss_lambda_video,
            lambda_action=self.loss_lambda_action,
        )
        weights = {"video": self.loss_lambda_video, "action": self.loss_lambda_action}
        return total, {
            f"loss_{name}": weight * scalars.get(f"loss_{name}", torch.zeros(())).item()
            for name, weight in weights.items()
        }


class FakeFastWAMJoint(FakeFastWAM):
    def infer_action(self, prompt, input_image, action_horizon, num_video_frames):
        raise AssertionError("the adapter must not call this")


class FakeFastWAMIDM(FakeFastWAMJoint):
    def _build_teacher_forcing_attention_mask(self):
        raise AssertionError("the adapter must not call this")


class FakeFastWAMOptionalIDM(FakeFastWAMIDM):
    action_idm_prob = 0.5
