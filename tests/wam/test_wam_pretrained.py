"""The checkpoint folder: everything comes back, and what is wrong with it is said."""

import json

import golden_fastwam as golden
import pytest
import torch
from example_statistics import statistics

from rlinf_wamrl.processing import Processor, ProcessorConfig
from rlinf_wamrl.wam.pretrained import PretrainedWAM, load_pretrained, save_pretrained
from rlinf_wamrl.wam.text import HashedWordEncoder
from rlinf_wamrl.wam.vae_patch import PatchVAE, PatchVAEConfig

TRAINING = {"steps": 926, "success": "37/60 (49 to 73 %)", "recipe": {"train": {"lr": 0.001}}}


@pytest.fixture(scope="module")
def videos():
    return torch.rand(4, 3, 9, 32, 48, generator=torch.Generator().manual_seed(0)) * 2 - 1


@pytest.fixture(scope="module")
def pretrained(videos):
    processor = ProcessorConfig(image_height=32, image_width=24, gripper_convention="libero")
    return PretrainedWAM(
        model=golden.model(variant="optional_idm", action_infer_shift=1.0),
        vae=PatchVAE.fit(
            [videos], PatchVAEConfig(image_height=32, image_width=48, spatial_factor=8)
        ),
        text_encoder=HashedWordEncoder(dim=32, length=12, seed=1),
        processor=Processor.build(processor, statistics()),
        training=TRAINING,
    )


@pytest.fixture
def folder(pretrained, tmp_path):
    save_pretrained(pretrained, tmp_path / "lift")
    return tmp_path / "lift"


def test_everything_comes_back(pretrained, folder, videos):
    loaded = load_pretrained(folder)
    assert loaded.model.config == pretrained.model.config
    for key, value in pretrained.model.state_dict().items():
        assert torch.equal(loaded.model.state_dict()[key], value), key
    latents = pretrained.vae.encode(videos)
    assert torch.equal(loaded.vae.encode(videos), latents)
    assert torch.equal(loaded.model.encode_video(videos), latents)
    text = ["lift the red cube"]
    assert torch.equal(loaded.text_encoder.encode(text)[0], pretrained.text_encoder.encode(text)[0])
    assert loaded.processor.config == pretrained.processor.config
    assert loaded.processor.statistics == pretrained.processor.statistics
    assert loaded.training == TRAINING
    assert load_pretrained(folder, dtype=torch.bfloat16).model.dtype == torch.bfloat16


def test_weights_have_the_official_names(folder):
    from safetensors.torch import load_file

    assert load_file(folder / "model.safetensors").keys() == golden.tensors("tiny_state").keys()


def test_model_card(folder):
    card = (folder / "README.md").read_text()
    assert card.startswith("# lift\n")
    for line in (
        "| variant | optional_idm |",
        "| sigma shift at inference | 1.0 (actions), 5.0 (video) |",
        "| images | two of 32 x 24, side by side |",
        "| success | 37/60 (49 to 73 %) |",
        "| recipe.train.lr | 0.001 |",
    ):
        assert line in card


def test_an_existing_folder_is_replaced_only_when_asked(pretrained, folder):
    (folder / "note.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="exists already"):
        save_pretrained(pretrained, folder)
    assert (folder / "note.txt").exists()
    save_pretrained(pretrained, folder, overwrite=True)
    assert not (folder / "note.txt").exists()
    assert [path.name for path in folder.parent.iterdir()] == ["lift"]


def test_a_failed_save_leaves_nothing(pretrained, tmp_path, monkeypatch):
    monkeypatch.setattr(PatchVAE, "save", lambda self, path: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        save_pretrained(pretrained, tmp_path / "lift")
    assert list(tmp_path.iterdir()) == []


def edit_config(folder, edit):
    config = json.loads((folder / "config.json").read_text())
    edit(config)
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda c: c.update(format_version=9), "format_version 9, this version reads 1"),
        (lambda c: c.pop("vae"), "lacks vae"),
        (lambda c: c["model"].update(horizon=3), "unknown fields horizon"),
        (lambda c: c["processor"].update(crop=3), "crop"),
        (lambda c: c["processor"].update(normalisation="max"), "normalisation='max' is unknown"),
        (lambda c: c["text_encoder"].update(kind="t6"), "unknown kind of text encoder 't6'"),
        (lambda c: c["text_encoder"].update(size=6), "text encoder 'hashed_words': .*size"),
        (lambda c: c["text_encoder"].update(dim=16), "takes 32 text dimensions, .* has 16"),
        (lambda c: c["model"].update(proprio_dim=9), "does not fit the model"),
    ],
)
def test_wrong_configurations_are_refused_in_words(folder, edit, message):
    edit_config(folder, edit)
    with pytest.raises(ValueError, match=message):
        load_pretrained(folder)


def test_missing_and_damaged_files(folder, tmp_path):
    with pytest.raises(FileNotFoundError, match="lacks model.safetensors, vae.safetensors"):
        load_pretrained(tmp_path / "none")
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[:1000])
    with pytest.raises(ValueError, match="model.safetensors is damaged"):
        load_pretrained(folder)
    (folder / "dataset_stats.json").unlink()
    with pytest.raises(FileNotFoundError, match="lacks dataset_stats.json"):
        load_pretrained(folder)
    (folder / "config.json").write_text("{")
    statistics().save(folder / "dataset_stats.json")
    with pytest.raises(ValueError, match="config.json is not a JSON file"):
        load_pretrained(folder)


def test_parts_that_do_not_fit_together(pretrained):
    fields = {
        "model": pretrained.model,
        "vae": pretrained.vae,
        "text_encoder": pretrained.text_encoder,
        "processor": pretrained.processor,
    }
    small = PatchVAE(PatchVAEConfig(image_height=64, image_width=96, latent_channels=16))
    with pytest.raises(ValueError, match="takes 48 latent channels, .* has 16"):
        PretrainedWAM(**{**fields, "vae": small})
    other = Processor.build(ProcessorConfig(), statistics(proprio=14))
    with pytest.raises(ValueError, match="takes 8 proprio dimensions, .* has 14"):
        PretrainedWAM(**{**fields, "processor": other})
