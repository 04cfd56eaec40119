"""The Wan2.2 VAE through diffusers against numbers of the official code."""

from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKLWan
from safetensors.torch import load_file, save_file
from wan22_vae_keys import real_keys

from rlinf_wamrl.wam.vae import VideoVAE, latent_shape, load_vae
from rlinf_wamrl.wam.vae_wan22 import (
    WAN22_LATENTS_MEAN,
    WAN22_LATENTS_STD,
    Wan22VAE,
    build_wan22_model,
    convert_wan22_keys,
)

GOLDEN = Path(__file__).parents[3] / "shared" / "golden" / "wan22_vae_tiny"

needs_golden = pytest.mark.skipif(
    not GOLDEN.is_dir(), reason=f"golden data of the tiny Wan2.2 VAE (4 MB) not found at {GOLDEN}"
)


@pytest.fixture(scope="module")
def official_state():
    return load_file(GOLDEN / "state.safetensors")


@pytest.fixture(scope="module")
def vae(official_state, tmp_path_factory):
    path = tmp_path_factory.mktemp("vae") / "Wan2.2_VAE.pth"
    torch.save(official_state, path)
    return load_vae("wan22", path)


@pytest.fixture(scope="module")
def golden():
    return load_file(GOLDEN / "io.safetensors")


@needs_golden
def test_latents_and_video_equal_the_official_code(vae, golden):
    latents = vae.encode(golden["video"])
    assert latents.shape == latent_shape(vae, golden["video"].shape)
    torch.testing.assert_close(latents, golden["latents"], rtol=0, atol=1e-4)
    decoded = vae.decode(golden["latents"])
    torch.testing.assert_close(decoded, golden["decoded"].clamp(-1, 1), rtol=0, atol=1e-4)
    assert golden["decoded"].abs().lt(1).float().mean() > 0.9  # the clamp hides little


@needs_golden
def test_one_image_is_latent_frame_zero(vae, golden):
    first = vae.encode(golden["video"][:, :, :1])
    torch.testing.assert_close(first, golden["latents_first_frame"], rtol=0, atol=1e-4)
    torch.testing.assert_close(first, golden["latents"][:, :, :1], rtol=0, atol=1e-4)


@needs_golden
def test_constants_and_interface(vae, golden):
    torch.testing.assert_close(torch.tensor(WAN22_LATENTS_MEAN), golden["mean"], rtol=0, atol=1e-7)
    torch.testing.assert_close(torch.tensor(WAN22_LATENTS_STD), golden["std"], rtol=0, atol=1e-7)
    assert isinstance(vae, VideoVAE)
    assert (vae.spatial_factor, vae.temporal_factor, vae.latent_channels) == (16, 4, 48)
    assert not any(parameter.requires_grad for parameter in vae.parameters())


@needs_golden
def test_all_sources_give_the_same_model(vae, official_state, golden, tmp_path):
    save_file(official_state, tmp_path / "Wan2.2_VAE.safetensors")
    vae.model.save_pretrained(tmp_path / "vae")
    for source in ("Wan2.2_VAE.safetensors", "vae"):
        other = Wan22VAE.load(tmp_path / source)
        for name, value in vae.state_dict().items():
            assert torch.equal(other.state_dict()[name], value), name
    half = Wan22VAE.load(tmp_path / "vae", dtype=torch.bfloat16)
    latents = half.encode(golden["video"])
    assert latents.dtype == torch.bfloat16
    assert (latents.float() - golden["latents"]).abs().mean() < 0.05


def test_the_real_size_converts_key_by_key():
    official = real_keys()
    with torch.device("meta"):
        model = build_wan22_model(official)
    ours = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    converted = {name: tuple(v.shape) for name, v in convert_wan22_keys(official).items()}
    assert converted == ours
    assert sum(value.numel() for value in model.state_dict().values()) == 704_688_668


def test_bad_files_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="no Wan2.2 VAE at"):
        Wan22VAE.load(tmp_path / "none.pth")
    with pytest.raises(FileNotFoundError, match="config.json is missing"):
        Wan22VAE.load(tmp_path)
    (tmp_path / "text.pth").write_text("hello")
    with pytest.raises(ValueError, match=r"text.pth is unreadable"):
        Wan22VAE.load(tmp_path / "text.pth")
    torch.save({"a": 1}, tmp_path / "numbers.pth")
    with pytest.raises(ValueError, match="no state dict of tensors"):
        Wan22VAE.load(tmp_path / "numbers.pth")
    torch.save({"a": torch.zeros(1)}, tmp_path / "other.pth")
    with pytest.raises(ValueError, match=r"no official Wan2.2 VAE: it lacks \['conv2.weight'"):
        Wan22VAE.load(tmp_path / "other.pth")


@needs_golden
def test_incomplete_official_file_lists_what_is_wrong(official_state, tmp_path):
    broken = dict(official_state)
    del broken["decoder.middle.1.proj.bias"]
    torch.save(broken, tmp_path / "broken.pth")
    with pytest.raises(ValueError, match="decoder.mid_block.attentions.0.proj.bias"):
        Wan22VAE.load(tmp_path / "broken.pth")


def test_a_wan21_vae_is_refused():
    model = AutoencoderKLWan(base_dim=8, z_dim=16, num_res_blocks=1)
    with pytest.raises(ValueError, match="not Wan2.2's"):
        Wan22VAE(model)
