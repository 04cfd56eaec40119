"""Similarities of imagined and executed frames, on pictures whose distance is known."""

import json

import pytest
import torch
from transformers import (
    Dinov2Config,
    Dinov2Model,
    Dinov2WithRegistersConfig,
    Dinov2WithRegistersModel,
    VJEPA2Config,
    VJEPA2Model,
)

from rlinf_wamrl.rl.similarity import (
    SIMILARITIES,
    FramePairs,
    build_similarity,
    motion_weight,
    pixel_mse,
    register_similarity,
    weighted_mean,
)

MEAN, STD = [0.4, 0.5, 0.6], [0.2, 0.25, 0.3]


def pictures(seed, n=3, side=32):
    return torch.rand(n, 3, side, side, generator=torch.Generator().manual_seed(seed))


def pairs(**changes):
    values = {"current": pictures(0), "imagined": pictures(1), "executed": pictures(2)}
    return FramePairs(**(values | changes))


def textured(shift, side=64):
    """A smooth random texture, moved to the right by ``shift`` pixels."""
    coarse = torch.rand(1, 3, 24, 24, generator=torch.Generator().manual_seed(4))
    fine = torch.nn.functional.interpolate(coarse, size=(96, 96), mode="bicubic").clamp(0, 1)
    return fine[:, :, 16 : 16 + side, 16 - shift : 16 - shift + side]


@pytest.fixture(scope="module", params=["dino", "dino_registers", "vjepa"])
def encoder(request, tmp_path_factory):
    """Name, folder and model of a tiny random encoder."""
    folder = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(0)
    shared = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    name = "preprocessor_config.json"
    if request.param == "vjepa":
        model = VJEPA2Model(
            VJEPA2Config(
                **shared,
                patch_size=8,
                crop_size=24,
                frames_per_clip=2,
                tubelet_size=2,
                pred_hidden_size=48,
                pred_num_hidden_layers=1,
                pred_num_attention_heads=2,
                pred_num_mask_tokens=1,
            )
        )
        name = "video_preprocessor_config.json"
    elif request.param == "dino":
        model = Dinov2Model(Dinov2Config(**shared, image_size=32, patch_size=8))
    else:
        config = Dinov2WithRegistersConfig(
            **shared, image_size=32, patch_size=8, num_register_tokens=4
        )
        model = Dinov2WithRegistersModel(config)
    model.save_pretrained(folder)
    (folder / name).write_text(json.dumps({"image_mean": MEAN, "image_std": STD}))
    return request.param.split("_")[0], folder, model.eval()


def test_pixel_mse_is_the_mean_over_colours_of_the_squared_difference():
    white, grey = torch.ones(1, 3, 2, 2), torch.full((1, 3, 2, 2), 0.5)
    grey[0, 0] = 1.0
    error = pixel_mse(FramePairs(current=white, imagined=white, executed=grey))
    torch.testing.assert_close(error, torch.full((1, 2, 2), 0.25 * 2 / 3))
    assert build_similarity("pixel_mse") is pixel_mse


def test_optical_flow_measures_the_difference_of_two_motions_in_pixels():
    flow = build_similarity("optical_flow")
    moved = {shift: textured(shift) for shift in (0, 2, 4)}
    error = flow(FramePairs(current=moved[0], imagined=moved[2], executed=moved[4]))
    assert error.shape == (1, 64, 64) and error.dtype == torch.float32
    inner = error[:, 16:-16, 16:-16]
    assert inner.median().item() == pytest.approx(2.0, abs=0.3)
    stayed = flow(FramePairs(current=moved[0], imagined=moved[0], executed=moved[4]))
    assert stayed[:, 16:-16, 16:-16].median().item() == pytest.approx(4.0, abs=0.5)


def test_optical_flow_looks_past_a_change_of_colour():
    """The same motion, imagined in a paler picture: pixels differ, motion hardly does."""
    flow = build_similarity("optical_flow")
    still, moved = textured(0), textured(3)
    pale = 0.7 * moved + 0.1
    colour = FramePairs(current=still, imagined=pale, executed=moved)
    motion = FramePairs(current=still, imagined=still, executed=moved)
    assert flow(colour).mean() < 0.5 * flow(motion).mean()
    assert pixel_mse(colour).mean() > 0.1 * pixel_mse(motion).mean()


def test_optical_flow_of_no_pairs_is_no_error():
    empty = torch.zeros(0, 3, 64, 64)
    flow = build_similarity("optical_flow")
    assert flow(FramePairs(current=empty, imagined=empty, executed=empty)).shape == (0, 64, 64)


def test_learned_similarities_are_one_minus_the_cosine_of_the_encoders_features(encoder):
    name, folder, model = encoder
    side = 32 if name == "dino" else 24
    sample = pairs(**{key: pictures(i, side=side) for i, key in enumerate(vars(pairs()))})
    error = build_similarity(name, model_folder=folder)(sample)

    def features(picture):
        mean, std = (torch.tensor(values).view(3, 1, 1) for values in (MEAN, STD))
        if name == "dino":
            output = model(pixel_values=(picture - mean) / std).last_hidden_state
            return output[:, -16:].view(-1, 4, 4, 48)
        clip = (torch.stack([sample.current, picture], dim=1) - mean) / std
        return model(pixel_values_videos=clip).last_hidden_state.view(-1, 3, 3, 48)

    with torch.no_grad():
        left, right = features(sample.imagined), features(sample.executed)
    cosine = (left * right).sum(-1) / left.norm(dim=-1) / right.norm(dim=-1)
    torch.testing.assert_close(error, 1 - cosine, rtol=1e-4, atol=1e-5)
    assert error.mean() > 1e-3


def test_learned_similarities_resize_and_find_equal_pictures_equal(encoder):
    name, folder, _ = encoder
    similarity = build_similarity(name, model_folder=folder)
    same = pictures(1, side=50)
    error = similarity(pairs(current=pictures(0, side=50), imagined=same, executed=same.clone()))
    assert error.shape == ((3, 6, 6) if name == "dino" else (3, 3, 3))
    torch.testing.assert_close(error, torch.zeros_like(error), rtol=0, atol=1e-5)
    other = similarity(
        pairs(current=pictures(0, side=50), imagined=same, executed=pictures(2, side=50))
    )
    assert bool((other > 1e-4).all())
    assert not other.requires_grad


def test_an_encoder_can_run_in_bfloat16(encoder):
    name, folder, _ = encoder
    exact = build_similarity(name, model_folder=folder)(pairs())
    rounded = build_similarity(name, model_folder=folder, dtype=torch.bfloat16)(pairs())
    assert rounded.dtype == torch.float32
    assert (rounded - exact).abs().max() < 0.1


def test_motion_weighs_half_evenly_and_half_where_either_frame_moves():
    still = torch.zeros(1, 3, 4, 4)
    executed, imagined = still.clone(), still.clone()
    executed[..., 0, 0] = 1.0
    imagined[..., 3, 3] = 0.5
    weight = motion_weight(FramePairs(current=still, imagined=imagined, executed=executed))
    expected = torch.full((1, 4, 4), 0.5)
    expected[0, 0, 0] += 0.5 * 16 * 1.0 / 1.25
    expected[0, 3, 3] += 0.5 * 16 * 0.25 / 1.25
    torch.testing.assert_close(weight, expected)
    assert weight.mean().item() == pytest.approx(1.0)


def test_motion_weight_is_uniform_where_nothing_moves():
    still = pictures(0)
    same = FramePairs(current=still, imagined=still, executed=still)
    assert torch.equal(motion_weight(same), torch.ones(3, 32, 32))


def test_a_moving_part_outweighs_a_static_background():
    still, executed = torch.zeros(1, 3, 16, 16), torch.zeros(1, 3, 16, 16)
    executed[..., :2, :2] = 1.0
    missed = FramePairs(current=still, imagined=still, executed=executed)
    uniform = weighted_mean(pixel_mse(missed), None)
    weighted = weighted_mean(pixel_mse(missed), motion_weight(missed))
    assert uniform.item() == pytest.approx(1 / 64)
    assert weighted.item() == pytest.approx(0.5 + 0.5 / 64)


def test_weights_of_pixels_are_averaged_onto_places():
    error = torch.tensor([[[1.0, 0.0], [0.0, 3.0]]])
    weight = torch.ones(1, 4, 4)
    weight[:, 2:, 2:] = 4.0
    assert weighted_mean(error, weight).item() == pytest.approx((1 + 4 * 3) / 7)
    assert weighted_mean(error, None).item() == pytest.approx(1.0)


def test_another_similarity_is_one_function_and_one_line(monkeypatch):
    monkeypatch.setattr("rlinf_wamrl.rl.similarity.SIMILARITIES", dict(SIMILARITIES))

    @register_similarity("largest")
    def build(**_):
        return lambda pairs: (pairs.imagined - pairs.executed).abs().amax(dim=1)

    assert build_similarity("largest")(pairs()).shape == (3, 32, 32)


def test_another_similarity_may_lie_in_a_module_of_its_own(tmp_path, monkeypatch):
    text = "def largest(**_):\n    return lambda p: (p.imagined - p.executed).abs().amax(dim=1)\n"
    (tmp_path / "my_similarities.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    assert build_similarity("my_similarities:largest")(pairs()).shape == (3, 32, 32)
    with pytest.raises(ValueError, match="my_similarities has no smallest"):
        build_similarity("my_similarities:smallest")


def test_what_is_missing_is_said_in_words(tmp_path):
    with pytest.raises(ValueError, match="known are pixel_mse, optical_flow, dino, vjepa"):
        build_similarity("ssim")
    with pytest.raises(ValueError, match="dino needs model_folder"):
        build_similarity("dino")
    with pytest.raises(FileNotFoundError, match="nothing is downloaded"):
        build_similarity("vjepa", model_folder="facebook/vjepa2-vitl-fpc64-256")
    Dinov2Model(
        Dinov2Config(hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
    ).save_pretrained(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text("{}")
    with pytest.raises(ValueError, match="lacks image_mean, image_std"):
        build_similarity("dino", model_folder=tmp_path)
