"""A new model from the base model, and the names and shapes of the real size."""

import json

import golden_fastwam as golden
import pytest
import torch
from safetensors.torch import save_file

from rlinf_wamrl.wam.base_model import from_wan22, initial_action_expert
from rlinf_wamrl.wam.config import fastwam_5b
from rlinf_wamrl.wam.weights import parameter_shapes


def resized_by_hand(value, shape):
    """Linear interpolation with aligned end points, one dimension after the other."""
    for dimension, size in enumerate(shape):
        old = value.shape[dimension]
        position = torch.arange(size) * ((old - 1) / (size - 1)) if size > 1 else torch.zeros(1)
        low = position.floor().long().clamp(max=old - 1)
        high = (low + 1).clamp(max=old - 1)
        part = (position - low).reshape([-1 if d == dimension else 1 for d in range(value.ndim)])
        value = value.index_select(dimension, low) * (1 - part) + part * value.index_select(
            dimension, high
        )
    return value


def test_action_expert_from_the_video_expert():
    state = golden.tensors("tiny_state")
    video = {k[19:]: v for k, v in state.items() if k.startswith("mot.mixtures.video.")}
    shapes = {
        k[20:]: tuple(v.shape) for k, v in state.items() if k.startswith("mot.mixtures.action.")
    }
    derived = initial_action_expert(video, shapes)
    assert derived.keys() == {k for k in shapes if not k.startswith(("action_encoder.", "head."))}
    for key, value in derived.items():
        expected = resized_by_hand(video[key], shapes[key])
        if len(shapes[key]) >= 2 and video[key].shape[-1] != shapes[key][-1]:
            expected = expected * (video[key].shape[-1] / shapes[key][-1]) ** 0.5
        torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-5)
    # Equal shapes are copied: the attention's width is that of the video expert.
    key = "blocks.0.self_attn.norm_q.weight"
    assert torch.equal(derived[key], video[key])


def base_model(folder):
    video = {
        k[19:]: v.contiguous()
        for k, v in golden.tensors("tiny_state").items()
        if k.startswith("mot.mixtures.video.")
    }
    keys = sorted(video)
    for number, part in enumerate((keys[:40], keys[40:])):
        name = f"diffusion_pytorch_model-0000{number + 1}-of-00002.safetensors"
        save_file({key: video[key] for key in part}, folder / name)
    return video


def test_from_wan22_shards(tmp_path):
    video = base_model(tmp_path)

    def build(seed):
        generator = torch.Generator().manual_seed(seed)
        return from_wan22(tmp_path, golden.config(), generator=generator, dtype=torch.float32)

    model = build(0)
    for key, value in video.items():
        assert torch.equal(model.video_expert.state_dict()[key], value)
    encoder = model.action_expert.action_encoder.weight
    assert encoder.abs().max() <= 1 / 7**0.5
    assert encoder.std() > 0.1
    assert torch.equal(build(0).action_expert.head.weight, model.action_expert.head.weight)
    assert not torch.equal(build(1).action_expert.head.weight, model.action_expert.head.weight)
    assert torch.isfinite(
        model.infer_action(golden.observation(), 2, torch.Generator().manual_seed(0))
    ).all()


def test_from_wan22_errors(tmp_path):
    generator = torch.Generator()
    with pytest.raises(FileNotFoundError, match="no diffusion_pytorch_model"):
        from_wan22(tmp_path, golden.config(), generator=generator)
    base_model(tmp_path)
    shard = next(tmp_path.glob("*-00002-of-00002.safetensors"))
    content = shard.read_bytes()
    shard.write_bytes(content[:-100])
    with pytest.raises(ValueError, match="00002.safetensors is no complete safetensors file"):
        from_wan22(tmp_path, golden.config(), generator=generator)
    shard.unlink()
    with pytest.raises(ValueError, match="does not fit the model; 5. missing: mot.mixtures.video"):
        from_wan22(tmp_path, golden.config(), generator=generator)


def test_the_5b_layout_key_by_key():
    lines = (golden.FOLDER / "keys_5b.txt").read_text().splitlines()
    official = {
        name: tuple(json.loads(shape)) for name, shape in (line.split("\t") for line in lines)
    }
    ours = parameter_shapes(fastwam_5b())
    assert ours == official
    assert len(ours) == 1651
    assert sum(torch.Size(shape).numel() for shape in ours.values()) == 6_020_710_599
