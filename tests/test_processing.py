"""Images, statistics, normalisation and the gripper, against FastWAM's own arithmetic."""

import json
import math

import numpy as np
import pytest
import torch
from PIL import Image

from rlinf_wamrl.normalisation import (
    DatasetStatistics,
    FieldStatistics,
    LinearNormaliser,
    compute_statistics,
)
from rlinf_wamrl.processing import (
    Processor,
    ProcessorConfig,
    center_crop_resize,
    finish_gripper,
    pixels_to_unit,
    unit_to_pixels,
)


def statistics_file(path, **changes):
    """A file as FastWAM writes it, with the stepwise entries that are to be ignored."""
    generator = np.random.default_rng(0)

    def field(width):
        low = generator.uniform(-1, -0.5, width)
        high = generator.uniform(0.5, 1, width)
        values = {
            "min": low,
            "max": high,
            "mean": (low + high) / 2,
            "std": (high - low) / 4,
            "q01": low * 0.9,
            "q99": high * 0.9,
        }
        content = {f"global_{k}": v.tolist() for k, v in values.items()}
        content |= {f"stepwise_{k}": [v.tolist()] * 32 for k, v in values.items()}
        return content

    content = {
        "state": {"default": field(8)},
        "action": {"default": field(7)},
        "num_episodes": 1693,
        "num_transition": 273465,
    }
    for dotted, value in changes.items():
        section, key, name = dotted.split("__")
        if value is None:
            del content[section][key][name]
        else:
            content[section][key][name] = value
    path.write_text(json.dumps(content))
    return content


def test_statistics_round_trip_in_the_official_format(tmp_path):
    content = statistics_file(tmp_path / "stats.json")
    statistics = DatasetStatistics.load(tmp_path / "stats.json")
    assert statistics.action.width == 7
    assert statistics.proprio.width == 8
    assert statistics.num_episodes == 1693
    assert statistics.num_transitions == 273465
    assert list(statistics.action.min) == content["action"]["default"]["global_min"]
    statistics.save(tmp_path / "again.json")
    assert DatasetStatistics.load(tmp_path / "again.json") == statistics
    written = json.loads((tmp_path / "again.json").read_text())
    for section in ("action", "state"):
        for name, value in written[section]["default"].items():
            assert content[section]["default"][name] == value


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"action__default__global_min": None}, "action.default.global_min is missing"),
        ({"state__default__global_max": [1.0] * 7}, "state.default: .*max has 7 values, min has 8"),
        ({"action__default__global_std": [math.nan] * 7}, "std has values that are not finite"),
        ({"action__default__global_std": [-1.0] * 7}, "std has negative values"),
        ({"state__default__global_min": [9.0] * 8}, "min 9.0 is above max"),
        ({"action__default__global_q01": 3}, "action.default.global_q01 is no list"),
        ({"action__default__global_q01": ["a"] * 7}, "could not convert"),
    ],
)
def test_wrong_statistics_are_named(tmp_path, changes, message):
    statistics_file(tmp_path / "stats.json", **changes)
    with pytest.raises(ValueError, match=message) as error:
        DatasetStatistics.load(tmp_path / "stats.json")
    assert "stats.json" in str(error.value)


def test_missing_and_foreign_statistics_files(tmp_path):
    with pytest.raises(FileNotFoundError, match="only with the statistics it was trained with"):
        DatasetStatistics.load(tmp_path / "none.json")
    (tmp_path / "text.json").write_text("{")
    with pytest.raises(ValueError, match="is not a JSON file"):
        DatasetStatistics.load(tmp_path / "text.json")
    (tmp_path / "other.json").write_text('{"action": {}}')
    with pytest.raises(ValueError, match="section 'action' has 0 entries"):
        DatasetStatistics.load(tmp_path / "other.json")
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(ValueError, match="section 'action' is missing"):
        DatasetStatistics.load(tmp_path / "list.json")
    statistics_file(tmp_path / "stats.json")
    with pytest.raises(ValueError, match=r"no entry 'libero', only \['default'\]"):
        DatasetStatistics.load(tmp_path / "stats.json", key="libero")


FIELD = FieldStatistics(
    min=(-2.0, 0.0, 5.0),
    max=(2.0, 1.0, 5.00001),
    mean=(0.5, 0.25, 5.0),
    std=(1.0, 0.5, 0.0),
    q01=(-1.0, 0.1, 5.0),
    q99=(1.0, 0.9, 5.00001),
)


@pytest.mark.parametrize(
    ("mode", "raw", "normalised"),
    [
        ("min/max", [[-2.0, 0.0, 5.0], [2.0, 1.0, 5.5]], [[-1, -1, 0], [1, 1, 0.5]]),
        ("q01/q99", [[-1.0, 0.1, 5.0], [1.0, 0.9, 5.0]], [[-1, -1, 0], [1, 1, 0]]),
        ("z-score", [[0.5, 0.25, 5.0], [1.5, 0.75, 5.0]], [[0, 0, 0], [1, 1, 0]]),
    ],
)
def test_normalisation_modes(mode, raw, normalised):
    normaliser = LinearNormaliser(FIELD, mode)
    raw, normalised = torch.tensor(raw), torch.tensor(normalised, dtype=torch.float32)
    torch.testing.assert_close(normaliser.normalise(raw), normalised, rtol=0, atol=1e-5)
    torch.testing.assert_close(normaliser.denormalise(normalised), raw, rtol=0, atol=1e-5)


def test_clamped_forward_but_not_backward():
    normaliser = LinearNormaliser(FIELD, "min/max")
    assert normaliser.normalise(torch.tensor([1e3, -1e3, 5.0])).tolist() == [5.0, -5.0, 0.0]
    assert normaliser.denormalise(torch.tensor([7.0, 0.0, 0.0]))[0].item() == 14.0
    with pytest.raises(ValueError, match="3 dimensions, the values 2"):
        normaliser.normalise(torch.zeros(4, 2))
    with pytest.raises(ValueError, match="unknown normalisation mode 'minmax'"):
        LinearNormaliser(FIELD, "minmax")


def test_computed_statistics_equal_numpy():
    generator = torch.Generator().manual_seed(0)
    episodes = [
        (torch.randn(n, 7, generator=generator), torch.randn(n + 1, 8, generator=generator))
        for n in (5, 12, 30)
    ]
    statistics = compute_statistics(episodes)
    actions = torch.cat([a for a, _ in episodes]).double().numpy()
    proprios = torch.cat([p for _, p in episodes]).double().numpy()
    assert statistics.num_episodes == 3
    assert statistics.num_transitions == 47
    for field, data in ((statistics.action, actions), (statistics.proprio, proprios)):
        np.testing.assert_allclose(field.min, data.min(0))
        np.testing.assert_allclose(field.max, data.max(0))
        np.testing.assert_allclose(field.mean, data.mean(0))
        np.testing.assert_allclose(field.std, data.std(0))
        np.testing.assert_allclose(field.q01, np.quantile(data, 0.01, axis=0))
        np.testing.assert_allclose(field.q99, np.quantile(data, 0.99, axis=0))
    with pytest.raises(ValueError, match="no episodes"):
        compute_statistics([])


@pytest.mark.parametrize("size", [(256, 256), (240, 320), (300, 224), (200, 224)])
def test_center_crop_resize_equals_pil(size):
    generator = np.random.default_rng(1)
    images = generator.integers(0, 256, (2, *size, 3), dtype=np.uint8)
    result = center_crop_resize(images, 224, 224)
    for image, ours in zip(images, result, strict=True):
        scale = max(224 / size[1], 224 / size[0])
        picture = Image.fromarray(image).resize(
            (round(size[1] * scale), round(size[0] * scale)), resample=Image.BILINEAR
        )
        left, top = (picture.width - 224) // 2, (picture.height - 224) // 2
        expected = np.asarray(picture.crop((left, top, left + 224, top + 224)))
        assert np.array_equal(ours.numpy(), expected)


def test_center_crop_resize_leaves_the_right_size_alone_and_refuses_other_things():
    images = torch.randint(0, 256, (2, 3, 8, 8, 3), dtype=torch.uint8)
    assert torch.equal(center_crop_resize(images, 8, 8), images)
    assert center_crop_resize(images, 4, 6).shape == (2, 3, 4, 6, 3)
    for bad in (images.float(), images[..., :2]):
        with pytest.raises(ValueError, match=r"uint8 \[...,H,W,3\]"):
            center_crop_resize(bad, 8, 8)


def test_pixels_round_trip():
    pixels = torch.arange(256, dtype=torch.uint8)
    values = pixels_to_unit(pixels)
    assert values[0] == -1
    assert values[255] == pytest.approx(1, abs=1e-6)
    assert torch.equal(unit_to_pixels(values), pixels)
    assert unit_to_pixels(torch.tensor([-3.0, 3.0])).tolist() == [0, 255]
    with pytest.raises(ValueError, match="must be uint8"):
        pixels_to_unit(values)


@pytest.mark.parametrize(
    ("convention", "binarise", "data", "executed"),
    [
        # FastWAM's data: 0 = close, 1 = open. The simulator: -1 = open, +1 = close.
        ("fastwam", True, [1.0, 0.9, 0.1, 0.0], [-1, -1, 1, 1]),
        ("fastwam", False, [1.0, 0.75, 0.25, 0.0], [-1, -0.5, 0.5, 1]),
        ("libero", True, [-1.0, -0.2, 0.3, 1.0], [-1, -1, 1, 1]),
        ("libero", False, [-1.0, -0.2, 0.3, 1.0], [-1, -0.2, 0.3, 1]),
    ],
)
def test_gripper(convention, binarise, data, executed):
    result = finish_gripper(torch.tensor(data), convention, binarise)
    torch.testing.assert_close(result, torch.tensor(executed, dtype=torch.float32))


@pytest.fixture
def processor(tmp_path):
    statistics_file(tmp_path / "stats.json")
    config = ProcessorConfig(image_height=8, image_width=8, gripper_convention="libero")
    return Processor.build(config, DatasetStatistics.load(tmp_path / "stats.json"))


def test_cameras_go_side_by_side(processor):
    main = torch.full((2, 8, 8, 3), 10, dtype=torch.uint8)
    wrist = np.full((2, 16, 16, 3), 200, dtype=np.uint8)
    image = processor.images(main, wrist)
    assert image.shape == (2, 3, 8, 16)
    assert image.dtype == torch.uint8
    assert image[..., :8].eq(10).all()
    assert image[..., 8:].eq(200).all()
    assert image.is_contiguous()
    with pytest.raises(ValueError, match="equal numbers"):
        processor.images(main, wrist[:1])


def test_recorded_actions_are_executed_as_recorded(processor):
    statistics = processor.statistics.action
    recorded = torch.tensor([statistics.min, statistics.max])
    recorded[:, -1] = torch.tensor([-0.4, 0.8])
    executed = processor.executable_actions(processor.normalise_actions(recorded))
    torch.testing.assert_close(executed[:, :6], recorded[:, :6])
    assert executed[:, 6].tolist() == [-1.0, 1.0]


def test_processor_configuration_is_checked():
    with pytest.raises(ValueError, match="'libero' for data recorded in LIBERO's own"):
        ProcessorConfig(gripper_convention="openvla")
    with pytest.raises(ValueError, match="normalisation='none' is unknown"):
        ProcessorConfig(normalisation="none")
    with pytest.raises(ValueError, match="image size must be positive"):
        ProcessorConfig(image_width=0)
