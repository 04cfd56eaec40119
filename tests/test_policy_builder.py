"""From a configuration to a policy: shipped, own, official and base checkpoints on one path."""

import dataclasses

import pytest
import torch
from example_statistics import statistics
from safetensors.torch import save_file
from tiny_parts import BATCH, LIFT, observations, tiny_policy, tiny_wam, write_release
from tiny_run import EXAMPLES, compose_5b, compose_tiny, tiny_model_keys
from wan22_vae_keys import real_keys

from rlinf_wamrl.config.checkpoints import resolve_checkpoint
from rlinf_wamrl.config.compose import compose_run
from rlinf_wamrl.policy_builder import build_policy, policy_of
from rlinf_wamrl.processing import Processor, ProcessorConfig
from rlinf_wamrl.wam.pretrained import PretrainedWAM
from rlinf_wamrl.wam.text import HashedWordEncoder
from rlinf_wamrl.wam.vae_wan22 import Wan22VAE, build_wan22_model
from rlinf_wamrl.wam.wam import WAM

VIDEO_PARAMETERS, ACTION_PARAMETERS, PROPRIO_PARAMETERS = 4_999_787_712, 1_020_886_023, 36_864
ADAPTER_PARAMETERS = 40_304_640


@pytest.fixture(scope="module")
def release(tmp_path_factory):
    """Folder of a tiny FastWAM file and its parts."""
    return write_release(tmp_path_factory.mktemp("release"), variant="optional_idm").parent


def instructions_known(observation):
    """The tiny tokeniser knows few words."""
    return observation | {"task_descriptions": [LIFT] * BATCH}


@pytest.mark.parametrize("mode", ["first_frame", "idm"])
def test_an_official_file_becomes_the_policy_of_a_run(release, tmp_path, mode):
    keys = tiny_model_keys(release, release / "mine.pt") | {
        "action_infer_mode": mode,
        "text_embedding_cache_dir": str(tmp_path / "texts"),
    }
    run = compose_tiny(tmp_path, keys, "RL.denoising_steps=3", "RL.imagination_steps=2")
    policy = build_policy(run.actor.model, torch.float32)
    assert policy.imagines == (mode == "idm")
    for name, value in tiny_wam(variant="optional_idm").action_expert.state_dict().items():
        assert torch.equal(policy.wam.action_expert.state_dict()[name], value), name
    assert policy.processor.config.gripper_convention == "fastwam"
    assert policy.wam.infer_action_scheduler.shift == 1.0
    actions, result = policy.predict_action_batch(instructions_known(observations()))
    record = result["forward_inputs"]
    assert actions.shape == (BATCH, 10, 7)
    assert record["chain"].shape == (BATCH, 4, 32, 7)
    assert ("video_latents" in record) == (mode == "idm")
    assert torch.equal(policy.default_forward(record)["logprobs"], result["prev_logprobs"])


def test_the_instructions_of_all_tasks_are_encoded_before_the_first_rollout(release, tmp_path):
    keys = tiny_model_keys(release, release / "mine.pt")
    keys["text_embedding_cache_dir"] = str(tmp_path / "texts")
    run = compose_tiny(tmp_path, keys, "env.train.task_ids=[0,1]", "env.eval.task_ids=[2]")
    assert LIFT in run.actor.model.instructions
    build_policy(run.actor.model, torch.float32)
    assert len(list((tmp_path / "texts").rglob("*.safetensors"))) == 3


def test_precision_is_that_of_the_section(release, tmp_path):
    run = compose_tiny(tmp_path, tiny_model_keys(release, release / "mine.pt"))
    policy = build_policy(run.actor.model, torch.bfloat16)
    assert {p.dtype for p in policy.parameters()} == {torch.bfloat16}
    actions, _ = policy.predict_action_batch(instructions_known(observations()), mode="eval")
    assert actions.dtype == torch.float32


def test_statistics_may_lie_elsewhere(release, tmp_path):
    named = dataclasses.replace(statistics(), num_episodes=77)
    named.save(tmp_path / "stats.json")
    keys = tiny_model_keys(release, release / "mine.pt")
    run = compose_tiny(tmp_path, keys | {"dataset_stats_path": str(tmp_path / "stats.json")})
    policy = build_policy(run.actor.model, torch.float32)
    assert policy.processor.statistics.num_episodes == 77


def test_paths_are_absolute_whatever_the_folder(release, tmp_path, monkeypatch):
    monkeypatch.chdir(release)
    keys = tiny_model_keys(release.relative_to(release), "mine.pt")
    run = compose_tiny(tmp_path, keys)
    monkeypatch.chdir(tmp_path)
    assert run.rollout.model.model_path == run.actor.model.model_path == str(release / "mine.pt")
    build_policy(run.actor.model, torch.float32)


def test_a_base_model_starts_alike_in_every_process(release, tmp_path):
    source = tiny_wam().video_expert.state_dict()
    save_file(source, tmp_path / "diffusion_pytorch_model.safetensors")
    statistics().save(tmp_path / "dataset_stats.json")
    keys = tiny_model_keys(release, tmp_path) | {
        "dataset_stats_path": str(tmp_path / "dataset_stats.json"),
        "variant": "uncond",
        "action_infer_mode": None,
    }
    with pytest.warns(UserWarning, match="has to be trained on demonstrations"):
        run = compose_tiny(tmp_path, keys, "RL.sigma_shift=1.0")
    first, second = (build_policy(run.actor.model, torch.float32) for _ in range(2))
    for (name, one), other in zip(first.named_parameters(), second.parameters(), strict=True):
        assert torch.equal(one, other), name
    for name, value in source.items():
        assert torch.equal(first.wam.video_expert.get_parameter(_adapted(first, name)), value)


def _adapted(policy, name):
    """Name of a weight, which an adapter may have wrapped."""
    known = dict(policy.wam.video_expert.named_parameters())
    module, _, kind = name.rpartition(".")
    return name if name in known else f"{module}.base_layer.{kind}"


def test_the_shipped_model_and_its_switches(tmp_path):
    run = compose_run(EXAMPLES / "libero_wamrl.yaml", ["actor.model.binarize_gripper=false"])
    policy = build_policy(run.actor.model, torch.float32)
    assert not policy.processor.config.binarise_gripper
    assert policy.wam.action_horizon == 16
    size = (BATCH, 64, 64, 3)
    images = {
        name: torch.zeros(size, dtype=torch.uint8) for name in ("main_images", "wrist_images")
    }
    actions, _ = policy.predict_action_batch(observations() | images, mode="eval")
    assert not set(actions[..., -1].unique().tolist()) <= {-1.0, 1.0}


@pytest.mark.parametrize(
    ("overrides", "trained"),
    [
        ([], ACTION_PARAMETERS + PROPRIO_PARAMETERS + ADAPTER_PARAMETERS),
        (["RL.video_sft.enabled=false"], ACTION_PARAMETERS + PROPRIO_PARAMETERS),
        (["RL.train_actions=false"], ADAPTER_PARAMETERS),
    ],
)
@pytest.mark.parametrize("example", ["libero_wamrl_5b", "libero_wamrl_5b_1gpu"])
def test_the_5b_examples_build_on_the_meta_device(tmp_path, example, overrides, trained):
    run = compose_5b(example, tmp_path, *overrides)
    assert run.env.train.max_steps_per_rollout_epoch == 400
    assert run.env.train.num_settle_steps == 30
    config = resolve_checkpoint(run.actor.model).config
    assert (config.variant, config.action_infer_shift) == ("optional_idm", 1.0)
    with torch.device("meta"):
        parts = PretrainedWAM(
            model=WAM(config),
            vae=Wan22VAE(build_wan22_model(real_keys())),
            text_encoder=HashedWordEncoder(dim=4096, length=128),
            processor=Processor.build(ProcessorConfig(), statistics()),
        )
        policy = policy_of(parts, run.actor.model)
    base = sum(p.numel() for n, p in policy.wam.named_parameters() if ".lora_" not in n)
    assert base == VIDEO_PARAMETERS + ACTION_PARAMETERS + PROPRIO_PARAMETERS
    assert sum(p.numel() for p in policy.parameters() if p.requires_grad) == trained


def test_an_action_width_that_does_not_fit_is_refused(tmp_path):
    run = compose_run(EXAMPLES / "libero_wamrl.yaml")
    section = run.actor.model
    section.action_dim = 14
    policy = tiny_policy()
    parts = PretrainedWAM(
        model=policy.wam,
        vae=policy.vae,
        text_encoder=policy.text_encoder,
        processor=policy.processor,
    )
    with pytest.raises(ValueError, match=r"action_dim = 14, but the checkpoint 'small' predicts"):
        policy_of(parts, section)
