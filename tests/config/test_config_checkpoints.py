"""Model paths of every kind: what is found, what is missing, and in which words."""

import json
import shutil
import subprocess
import sys

import pytest
import torch
from example_statistics import statistics
from tiny_parts import VIDEO_SIZES, write_release
from tiny_run import compose_tiny, tiny_model_keys

from rlinf_wamrl.config.checkpoints import resolve_checkpoint, shipped_checkpoints
from rlinf_wamrl.config.errors import ConfigError

RELEASED = "libero_optional_idm_2cam224.pt"


@pytest.fixture(scope="module")
def release(tmp_path_factory):
    folder = tmp_path_factory.mktemp("release")
    return write_release(folder, RELEASED, variant="optional_idm").parent


@pytest.fixture
def compose(release, tmp_path):
    """Compose a run of the released file; keyword arguments change ``actor.model``."""

    def composed(*overrides, **keys):
        model = tiny_model_keys(release, release / RELEASED) | keys
        return compose_tiny(tmp_path, model, *overrides)

    return composed


def rename(release, tmp_path, name="mine.pt"):
    """The release under a name of its own."""
    for part in ("vae", "text_encoder", "tokenizer"):
        shutil.copytree(release / part, tmp_path / part)
    shutil.copy(release / RELEASED, tmp_path / name)
    return tmp_path / name


@pytest.mark.filterwarnings("error")
def test_a_released_file_brings_what_it_was_trained_with(compose):
    checkpoint = resolve_checkpoint(compose(variant=None, action_infer_mode=None).actor.model)
    assert checkpoint.kind == "fastwam"
    config = checkpoint.config
    assert (config.variant, config.action_infer_mode) == ("optional_idm", "first_frame")
    assert (config.action_train_shift, config.action_infer_shift) == (1.0, 1.0)
    assert config.video_infer_shift == 1.0
    assert (config.action_horizon, config.num_video_frames) == (32, 9)
    assert checkpoint.statistics.name == f"{RELEASED[:-3]}_dataset_stats.json"
    assert checkpoint.warnings == ()


def test_a_contradicting_configuration_warns(compose):
    with pytest.warns(UserWarning, match=r"action_infer_shift=1.0 \(not 5.0\).*RL.sigma_shift"):
        config = resolve_checkpoint(compose("RL.sigma_shift=5.0").actor.model).config
    assert (config.action_train_shift, config.action_infer_shift) == (1.0, 5.0)
    with pytest.warns(UserWarning, match=r"variant='optional_idm' \(not 'uncond'\)"):
        compose("model=fastwam_uncond", variant="uncond")


def test_another_shift_than_a_shipped_checkpoint_was_trained_with_warns(tmp_path):
    with pytest.warns(UserWarning, match=r"RL.sigma_shift = 3.0, but small was trained for 1.0"):
        compose_tiny(
            tmp_path,
            {"num_action_chunks": 8},
            "model=small",
            "RL.sigma_shift=3.0",
            "env.train.num_future_frames=3",
        )


def test_other_files_need_variant_and_shift(compose, release, tmp_path):
    path = rename(release, tmp_path)
    statistics().save(tmp_path / "dataset_stats.json")
    unnamed = {"model_path": str(path), "variant": None, "action_infer_mode": None}
    with pytest.raises(ConfigError, match=r"actor.model.variant and RL.sigma_shift must be set"):
        compose("RL.sigma_shift=null", **unnamed)
    config = resolve_checkpoint(compose(**unnamed | {"variant": "idm"}).actor.model).config
    assert (config.action_train_shift, config.action_infer_mode) == (1.0, "idm")


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"vae_path": None}, r"holds the experts only; set also actor.model.vae_path \(Wan2.2_VAE"),
        (
            {"text_encoder_path": None, "text_embedding_cache_dir": None},
            r"text_encoder_path \(the folder text_encoder of huggingface.*text_embedding_cache_dir",
        ),
        (
            {"vae_path": "nowhere"},
            r"actor.model.vae_path = 'nowhere' does not exist; give Wan2.2_V",
        ),
        ({"text_encoder_path": "nowhere"}, "text_encoder_path = 'nowhere' has no config.json"),
        ({"tokenizer_path": "nowhere"}, "tokenizer_path = 'nowhere' is not a folder"),
        (
            {"dataset_stats_path": "nowhere.json"},
            "actor.model.dataset_stats_path: no dataset statistics at nowhere.json",
        ),
        ({"variant": "both"}, "actor.model: WAMConfig.variant must be one of uncond, joint"),
        ({"action_infer_mode": "later"}, "action_infer_mode must be one of first_frame, idm"),
        (
            {"variant": "idm", "action_infer_mode": "first_frame"},
            "action_infer_mode must be 'idm' for variant 'idm'",
        ),
        ({"video_dit_config": VIDEO_SIZES | {"depth": 3}}, "unknown fields depth"),
        ({"video_dit_config": VIDEO_SIZES | {"num_layers": 3}}, "must have the same num_layers"),
        ({"num_video_frames": 8}, "one more than a multiple of 4, got 8"),
        ({"num_video_frames": 5, "action_horizon": 20}, "captures no frame where .* every 5 act"),
    ],
)
def test_what_cannot_work_is_said_before_anything_starts(compose, keys, words):
    with pytest.raises(ConfigError, match=words):
        compose(**keys)


def test_more_actions_cannot_be_executed_than_are_predicted(compose):
    with pytest.raises(ConfigError, match="num_action_chunks = 40, but the model predicts .* 32"):
        compose("RL.video_sft.enabled=false", num_action_chunks=40)


def test_a_short_download_and_missing_statistics(compose, release, tmp_path):
    path = rename(release, tmp_path)
    with pytest.raises(ConfigError, match=r"dataset_stats_path: no dataset statistics for .*mine"):
        compose(model_path=str(path))
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ConfigError, match="the download was cut short"):
        compose(model_path=str(path))


def test_a_base_model_needs_statistics(compose, tmp_path):
    (tmp_path / "diffusion_pytorch_model-00001-of-00003.safetensors").touch()
    base = {"model_path": str(tmp_path)}
    with pytest.raises(ConfigError, match="dataset_stats_path = None must name the statistics"):
        compose(**base)
    statistics().save(tmp_path / "dataset_stats.json")
    with pytest.warns(UserWarning, match="is a base model"):
        run = compose(**base, dataset_stats_path=str(tmp_path / "dataset_stats.json"))
    checkpoint = resolve_checkpoint(run.actor.model)
    assert (checkpoint.kind, checkpoint.config.variant) == ("wan22", "optional_idm")


def test_a_folder_without_a_model_is_no_checkpoint(compose, tmp_path):
    with pytest.raises(ConfigError, match=r"is a folder without a model; give the name .*small"):
        compose(model_path=str(tmp_path))


@pytest.fixture
def small(tmp_path):
    """Compose the demo run on a copy of the shipped checkpoint."""
    from rlinf_wamrl.config.checkpoints import _ROOT

    folder = tmp_path / "copy"
    shutil.copytree(_ROOT / "small", folder)

    def composed(*overrides, **keys):
        model = {"model_path": str(folder)} | keys
        frames = ("env.train.num_future_frames=3", "env.eval.num_future_frames=3")
        return compose_tiny(tmp_path, model, "model=small", *frames, *overrides)

    return folder, composed


def test_an_own_folder_is_described_by_its_own_file(small):
    folder, compose = small
    checkpoint = resolve_checkpoint(compose().actor.model)
    assert (checkpoint.kind, checkpoint.path) == ("folder", folder)
    assert checkpoint.config.action_horizon == 16
    assert "small" in shipped_checkpoints()
    for keys, words in (
        ({"vae_path": "x"}, "vae_path belongs to an official FastWAM file.*: leave it out"),
        ({"action_horizon": 32}, "action_horizon = 32, but the checkpoint .* has 16: leave it out"),
        ({"variant": "idm"}, "variant = 'idm', but the checkpoint .* has 'optional_idm'"),
        ({"action_infer_mode": "both"}, "action_infer_mode must be one of first_frame, idm"),
        ({"action_dim": 14}, "action_dim = 14, but copy predicts actions of width 7"),
    ):
        with pytest.raises(ConfigError, match=words):
            compose(**keys)


def test_a_damaged_folder_is_named(small):
    folder, compose = small
    stored = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(stored | {"format_version": 9}))
    with pytest.raises(ConfigError, match="model_path: .*format_version 9, this version reads 1"):
        compose()


def test_groups_are_chosen_on_the_command_line(compose):
    run = compose("task=libero_optional_idm_2cam224_1e-4")
    assert run.actor.model.variant == "optional_idm"
    with pytest.raises(ConfigError, match=r"model/huge.*fastwam_optional_idm fastwam_uncond small"):
        compose("model=huge")


def test_asking_needs_no_torch(release):
    code = (
        "import sys\n"
        "from rlinf_wamrl.config.checkpoints import resolve_checkpoint\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert torch.load(release / RELEASED, weights_only=True).keys() >= {"mot"}
