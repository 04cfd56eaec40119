"""The linear patch autoencoder against direct linear algebra."""

import math

import pytest
import torch

from rlinf_wamrl.wam.vae import VideoVAE, latent_shape, load_vae, reconstruction_psnr
from rlinf_wamrl.wam.vae_patch import PatchVAE, PatchVAEConfig, PatchVAEFit

SIZE = {"image_height": 8, "image_width": 12, "spatial_factor": 4}


def random_videos(batch=40, frames=9, seed=0, position_offset=True):
    generator = torch.Generator().manual_seed(seed)
    # Pixels of a patch differ in contrast, so that the spectrum is not flat.
    contrast = 0.8 ** torch.arange(16).reshape(4, 4).repeat(2, 3)
    videos = (torch.rand(batch, 3, frames, 8, 12, generator=generator) - 0.5) * contrast
    videos[:, 0] += videos[:, 1]
    if position_offset:
        videos += torch.rand(1, 3, 1, 8, 12, generator=generator) * 0.8 - 0.4
    return videos.clamp(-1, 1)


def patches_of(videos, factor=4):
    """[B,3,T,H,W] -> [B,T,h,w,3*factor^2] by slicing, one cell at a time."""
    rows, columns = videos.shape[3] // factor, videos.shape[4] // factor
    cells = [
        videos[:, :, :, r * factor : (r + 1) * factor, c * factor : (c + 1) * factor]
        .permute(0, 2, 1, 3, 4)
        .flatten(2)
        for r in range(rows)
        for c in range(columns)
    ]
    return torch.stack(cells, 2).unflatten(2, (rows, columns))


@pytest.mark.parametrize("per_position_mean", [True, False])
def test_bases_are_the_leading_principal_components(per_position_mean):
    videos = random_videos()
    config = PatchVAEConfig(**SIZE, latent_channels=5, per_position_mean=per_position_mean)
    vae = PatchVAE.fit([videos], config)

    patches = patches_of(videos).double()
    mean = patches.mean((0, 1)) if per_position_mean else patches.mean((0, 1, 2, 3))
    centred = patches - mean
    image = centred.flatten(0, 3)
    group = torch.cat([centred[:, 1:].unflatten(1, (2, 4))[:, :, i] for i in range(4)], -1)
    for data, basis, scale in (
        (image, vae.image_basis, vae.image_scale),
        (group.flatten(0, 3), vae.group_basis, vae.group_scale),
    ):
        _, singular, right = torch.linalg.svd(data, full_matrices=False)
        torch.testing.assert_close(
            scale.double(), singular[:5] / math.sqrt(len(data)), rtol=1e-4, atol=0
        )
        overlap = (right[:5] @ basis.double()).abs()
        torch.testing.assert_close(overlap, torch.eye(5, dtype=torch.float64), rtol=0, atol=2e-3)


def test_a_stream_of_batches_gives_the_same_fit_as_one():
    videos = random_videos()
    config = PatchVAEConfig(**SIZE, latent_channels=6)
    whole, streamed = PatchVAE.fit([videos], config), PatchVAE.fit(videos.split(7), config)
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(streamed.state_dict()[name], value, rtol=1e-3, atol=1e-4)


def test_whitened_channels_have_variance_one_and_a_global_scale_keeps_their_ratios():
    videos = random_videos(batch=100)
    latents = {}
    for scale in ("channel", "global"):
        vae = PatchVAE.fit([videos], PatchVAEConfig(**SIZE, latent_channels=6, scale=scale))
        latents[scale] = vae.encode(videos)[:, :, 1:]
    variance = {k: v.square().mean((0, 2, 3, 4)) for k, v in latents.items()}
    torch.testing.assert_close(variance["channel"], torch.ones(6), rtol=1e-3, atol=0)
    torch.testing.assert_close(variance["global"].mean(), torch.tensor(1.0), rtol=1e-3, atol=0)
    assert variance["global"][0] > 1.5 * variance["global"][-1]


def test_videos_inside_the_subspace_are_reconstructed():
    generator = torch.Generator().manual_seed(1)
    pictures = torch.randn(4, 3, 1, 8, 12, generator=generator) * 0.1
    pictures[..., 4:, :] = pictures[..., :4, :]  # each patch row alike: 4 shapes for all cells
    pictures[..., 4:8] = pictures[..., :4]
    pictures[..., 8:12] = pictures[..., :4]
    weights = torch.randn(60, 4, 1, 9, 1, 1, generator=generator)
    videos = (weights * pictures).sum(1)
    vae = PatchVAE.fit([videos], PatchVAEConfig(**SIZE, latent_channels=16))
    torch.testing.assert_close(vae.decode(vae.encode(videos)), videos, rtol=0, atol=1e-4)


def test_interface_shapes_and_first_frame():
    videos = random_videos(batch=3)
    vae = PatchVAE.fit([videos], PatchVAEConfig(**SIZE, latent_channels=10))
    assert isinstance(vae, VideoVAE)
    latents = vae.encode(videos)
    assert latents.shape == latent_shape(vae, videos.shape) == (3, 10, 3, 2, 3)
    assert vae.decode(latents).shape == videos.shape
    torch.testing.assert_close(vae.encode(videos[:, :, :1]), latents[:, :, :1])
    torch.testing.assert_close(vae.decode(latents[:, :, :1]), vae.decode(latents)[:, :, :1])
    assert list(vae.parameters()) == []


def test_save_and_load(tmp_path):
    videos = random_videos(batch=5)
    vae = PatchVAE.fit([videos], PatchVAEConfig(**SIZE, latent_channels=7, scale="global"))
    vae.save(tmp_path / "folder" / "vae.safetensors")
    loaded = load_vae("patch", tmp_path / "folder" / "vae.safetensors")
    assert loaded.config == vae.config
    assert torch.equal(loaded.encode(videos), vae.encode(videos))
    half = load_vae("patch", tmp_path / "folder" / "vae.safetensors", dtype=torch.bfloat16)
    assert half.encode(videos).dtype == torch.bfloat16


def test_psnr_separates_moving_pixels():
    videos = torch.zeros(1, 3, 5, 8, 12)
    videos[:, :, 2:, 0, 0] = 0.5  # one of 96 pixels, changes between image 1 and 2

    class Blur:
        def encode(self, video):
            return video

        def decode(self, latents):
            return latents + torch.where(latents > 0.25, 0.2, 0.02)

    report = reconstruction_psnr(Blur(), [videos])
    assert report.first_image == pytest.approx(10 * math.log10(4 / 0.02**2), abs=1e-3)
    assert math.isnan(report.first_image_moving)
    assert report.later_images_moving == pytest.approx(10 * math.log10(4 / 0.2**2), abs=1e-3)
    assert report.moving_share == pytest.approx(1 / (5 * 96))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"image_width": 13}, "no multiple of the patch"),
        ({"latent_channels": 49}, "latent_channels=49"),
        ({"scale": "none"}, "scale must be"),
        ({"temporal_factor": 0}, "temporal_factor must be at least 1"),
    ],
)
def test_impossible_configurations(change, message):
    with pytest.raises(ValueError, match=message):
        PatchVAEConfig(**{**SIZE, **change})


def test_bad_input_is_named(tmp_path):
    config = PatchVAEConfig(**SIZE, latent_channels=4)
    vae = PatchVAE.fit([random_videos(batch=4)], config)
    with pytest.raises(ValueError, match="1 \\+ 4n images, got 8"):
        vae.encode(torch.zeros(1, 3, 8, 8, 12))
    with pytest.raises(ValueError, match="uint8; scale it first"):
        vae.encode(torch.zeros(1, 3, 1, 8, 12, dtype=torch.uint8))
    with pytest.raises(ValueError, match="8x12 pixels"):
        vae.encode(torch.zeros(1, 3, 1, 8, 8))
    with pytest.raises(ValueError, match="2x3 cells"):
        vae.decode(torch.zeros(1, 4, 1, 2, 2))
    with pytest.raises(ValueError, match="groups of 4"):
        PatchVAEFit(config).finish()
    with pytest.raises(ValueError, match="constant"):
        PatchVAE.fit([torch.zeros(2, 3, 5, 8, 12)], config)
    with pytest.raises(FileNotFoundError, match=r"no patch VAE at .*nothing"):
        load_vae("patch", tmp_path / "nothing.safetensors")
    (tmp_path / "broken.safetensors").write_bytes(b"broken")
    with pytest.raises(ValueError, match="not a readable safetensors"):
        load_vae("patch", tmp_path / "broken.safetensors")
    with pytest.raises(ValueError, match="unknown kind of VAE 'conv'"):
        load_vae("conv", tmp_path)
