"""Official checkpoints: strict reading, the identity round trip, and each kind of bad file."""

import os
import pickle
import zipfile
from pathlib import Path

import golden_fastwam as golden
import pytest
import torch
from example_statistics import statistics

from rlinf_wamrl.normalisation import DatasetStatistics
from rlinf_wamrl.wam.checkpoint_files import KNOWN_RELEASES
from rlinf_wamrl.wam.config import fastwam_5b
from rlinf_wamrl.wam.loading import from_fastwam, save_fastwam


def official_payload(**changes):
    """The golden model as the official code would have saved it."""
    state = golden.tensors("tiny_state")
    payload = {
        "mot": {k[4:]: v for k, v in state.items() if k.startswith("mot.")},
        "step": 7,
        "torch_dtype": "torch.float32",
        "proprio_encoder": {k[16:]: v for k, v in state.items() if k.startswith("proprio_")},
    }
    payload |= changes
    return {key: value for key, value in payload.items() if value is not None}


@pytest.fixture
def folder(tmp_path):
    statistics().save(tmp_path / "dataset_stats.json")
    return tmp_path


def write(folder, payload, name="model.pt"):
    torch.save(payload, folder / name)
    return folder / name


def test_official_to_ours_to_official_is_the_identity(folder):
    path = write(folder, official_payload())
    loaded = from_fastwam(path, config=golden.config())
    assert loaded.step == 7
    assert loaded.statistics == statistics()
    save_fastwam(loaded.model, folder / "again" / "ours.pt", step=7, statistics=loaded.statistics)
    ours = torch.load(folder / "again" / "ours.pt", weights_only=True)
    official = torch.load(path, weights_only=True)
    assert ours.keys() == official.keys()
    assert (ours["step"], ours["torch_dtype"]) == (7, "torch.float32")
    for section in ("mot", "proprio_encoder"):
        assert ours[section].keys() == official[section].keys()
        for key, value in official[section].items():
            assert ours[section][key].dtype == value.dtype
            assert torch.equal(ours[section][key], value), key
    assert (folder / "again" / "ours_dataset_stats.json").is_file()
    from_fastwam(folder / "again" / "ours.pt", config=golden.config())


def test_a_loaded_model_computes_the_golden_numbers(folder):
    model = from_fastwam(write(folder, official_payload()), config=golden.config()).model
    reference = golden.tensors("d_ode")
    action = model.infer_action(golden.observation(), 4, noise=reference["k4.x"][0])
    golden.assert_golden(action, reference["k4.x"][-1])
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_dtype_is_the_declared_one_or_the_asked_one(folder):
    half = official_payload(torch_dtype="torch.bfloat16")
    for section in ("mot", "proprio_encoder"):
        half[section] = {key: value.bfloat16() for key, value in half[section].items()}
    path = write(folder, half)
    assert from_fastwam(path, config=golden.config()).model.dtype == torch.bfloat16
    single = from_fastwam(path, config=golden.config(), dtype=torch.float32).model
    assert single.dtype == torch.float32
    assert single.video_expert.rotary[0].cos.dtype == torch.float32
    assert single.video_expert.rotary[0].cos.device.type == "cpu"


def test_weights_do_not_hang_on_the_file(folder):
    path = write(folder, official_payload())
    model = from_fastwam(path, config=golden.config()).model
    path.write_bytes(bytes(path.stat().st_size))
    assert torch.equal(
        model.proprio_encoder.weight, golden.tensors("tiny_state")["proprio_encoder.weight"]
    )


def edited(section, edit):
    payload = official_payload()
    payload[section] = dict(payload[section])
    edit(payload[section])
    return payload


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        (
            lambda: edited("mot", lambda s: s.pop("mixtures.action.head.bias")),
            r"1 missing: mot.mixtures.action.head.bias$",
        ),
        (
            lambda: edited("mot", lambda s: s.update(extra=torch.zeros(1))),
            r"1 unexpected: mot.extra$",
        ),
        (
            lambda: edited("mot", lambda s: [s.pop(k) for k in list(s)[:20]]),
            r"20 missing: .* and 12 more$",
        ),
        (
            lambda: edited(
                "mot", lambda s: s.update({"mixtures.action.head.bias": torch.zeros(5)})
            ),
            r"1 of another shape: mot.mixtures.action.head.bias \(\[5\] there, \[7\] in the model",
        ),
        (
            lambda: edited("mot", lambda s: s.update(note="hello")),
            r"mot.note is no tensor but str",
        ),
        (lambda: official_payload(proprio_encoder=None), "2 missing: proprio_encoder.bias"),
        (lambda: official_payload(torch_dtype="bf16"), "names the dtype 'bf16'; one of torch.fl"),
        (lambda: official_payload(torch_dtype=None), "names the dtype None"),
        (lambda: official_payload(mot=None), r"no 'mot' section but \['step'"),
        (lambda: official_payload(ema={}), "does not have: ema"),
        (lambda: torch.zeros(3), "no 'mot' section but Tensor"),
    ],
)
def test_wrong_payloads_are_refused_in_words(folder, payload, message):
    path = write(folder, payload())
    with pytest.raises(ValueError, match=message) as error:
        from_fastwam(path, config=golden.config())
    assert "model.pt" in str(error.value)


class RunsCode:
    def __reduce__(self):
        return os.mkdir, (str(Path(__file__).parent / "was_executed"),)


def test_a_pickle_with_code_in_it_is_refused_and_not_run(folder):
    path = write(folder, official_payload(step=RunsCode()))
    with pytest.raises(ValueError, match=r"model.pt holds Python objects .* nothing in it was run"):
        from_fastwam(path, config=golden.config())
    (folder / "bare.pt").write_bytes(pickle.dumps(RunsCode()))
    with pytest.raises(ValueError, match="bare.pt is no complete torch.save file"):
        from_fastwam(folder / "bare.pt", config=golden.config())
    assert not (Path(__file__).parent / "was_executed").exists()


def test_a_truncated_or_damaged_file_is_refused(folder):
    path = write(folder, official_payload())
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match="the download was cut short"):
        from_fastwam(path, config=golden.config())
    with zipfile.ZipFile(folder / "other.pt", "w") as archive:
        archive.writestr("hello.txt", "hello")
    with pytest.raises(ValueError, match="other.pt is damaged"):
        from_fastwam(folder / "other.pt", config=golden.config())
    with pytest.raises(FileNotFoundError, match="no checkpoint at"):
        from_fastwam(folder / "none.pt", config=golden.config())


def test_statistics_are_found_or_missed(tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    path = write(tmp_path / "a" / "b", official_payload())
    with pytest.raises(
        FileNotFoundError, match=r"looked for .*model_dataset_stats.json.*name their"
    ):
        from_fastwam(path, config=golden.config())
    statistics().save(tmp_path / "dataset_stats.json")
    assert from_fastwam(path, config=golden.config()).statistics == statistics()
    named = DatasetStatistics(
        action=statistics().action, proprio=statistics().proprio, num_episodes=9, num_transitions=9
    )
    named.save(tmp_path / "a" / "b" / "model_dataset_stats.json")
    assert from_fastwam(path, config=golden.config()).statistics == named
    statistics(action=14).save(tmp_path / "robotwin.json")
    with pytest.raises(ValueError, match="7 action dimensions, the dataset statistics have 14"):
        from_fastwam(path, tmp_path / "robotwin.json", config=golden.config())


def test_released_files_carry_their_shift(folder):
    name = "libero_optional_idm_2cam224.pt"
    path = write(folder, official_payload(), name)
    with pytest.warns(UserWarning, match=r"action_infer_shift=1.0 \(not 5.0\), video"):
        from_fastwam(path, config=golden.config(variant="optional_idm"))
    with pytest.raises(ValueError, match="does not fit the model"):
        from_fastwam(path)  # a known name means the 5B model
    with pytest.raises(ValueError, match=r"model.pt is no released checkpoint .* sigma shift"):
        from_fastwam(write(folder, official_payload()))
    assert fastwam_5b(**KNOWN_RELEASES[name]).action_infer_shift == 1.0
    assert fastwam_5b(**KNOWN_RELEASES["libero_uncond_2cam224.pt"]).action_infer_shift == 5.0


@pytest.mark.filterwarnings("error")
def test_a_fitting_configuration_does_not_warn(folder):
    path = write(folder, official_payload(), "libero_uncond_2cam224.pt")
    from_fastwam(path, config=golden.config())


def test_a_legacy_payload_holds_the_video_expert_alone(folder):
    state = official_payload()["mot"]
    video = {k[15:]: v for k, v in state.items() if k.startswith("mixtures.video.")}
    path = write(folder, official_payload(mot=None, dit=video))
    with pytest.warns(UserWarning, match="video expert alone"):
        model = from_fastwam(
            path, config=golden.config(), generator=torch.Generator().manual_seed(0)
        ).model
    assert torch.equal(
        model.proprio_encoder.weight, golden.tensors("tiny_state")["proprio_encoder.weight"]
    )
    assert torch.equal(model.video_expert.head.head.bias, video["head.head.bias"])
    with (
        pytest.warns(UserWarning, match="legacy"),
        pytest.raises(ValueError, match="starting one needs a generator"),
    ):
        from_fastwam(path, config=golden.config())


def test_saving_a_model_with_other_keys_is_refused(folder):
    model = golden.model()
    model.action_expert.head = torch.nn.Sequential(model.action_expert.head)
    with pytest.raises(
        ValueError, match=r"the model to save .* unexpected: mot.mixtures.action.hea"
    ):
        save_fastwam(model, folder / "model.pt")
    assert not (folder / "model.pt").exists()


def test_a_failed_save_leaves_the_old_file(folder, monkeypatch):
    path = write(folder, official_payload())
    content = path.read_bytes()

    def fails(payload, target):
        Path(target).write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(torch, "save", fails)
    with pytest.raises(OSError, match="disk full"):
        save_fastwam(golden.model(), path)
    assert path.read_bytes() == content
    assert sorted(p.name for p in folder.iterdir()) == ["dataset_stats.json", "model.pt"]
