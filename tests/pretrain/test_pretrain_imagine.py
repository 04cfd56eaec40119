"""``rlinf imagine`` on the shipped model, and on a checkpoint of a run."""

import json
from pathlib import Path

import pytest
import torch

from rlinf_wamrl.checkpoint import write_learner
from rlinf_wamrl.cli import main
from rlinf_wamrl.config.compose import compose_run
from rlinf_wamrl.policy_builder import build_policy

EXAMPLE = str(Path(__file__).parents[2] / "examples" / "libero_wamrl.yaml")
SHORT = (
    "env.eval.init_state_range=[80,82]",
    "env.eval.total_num_envs=2",
    "env.eval.num_processes=1",
    "env.eval.max_episode_steps=16",
)


@pytest.fixture(scope="module")
def trained():
    """The trained weights of the example's policy, its adapters no longer without effect."""
    policy = build_policy(compose_run(EXAMPLE).actor.model, torch.float32)
    generator = torch.Generator().manual_seed(0)
    return {
        name: value.detach() + 0.05 * torch.randn(value.shape, generator=generator)
        if "lora_B" in name
        else value.detach()
        for name, value in policy.named_parameters()
        if value.requires_grad
    }


def save(folder, weights):
    checkpoint = folder / "run/checkpoints/global_step_3"
    (checkpoint / "actor").mkdir(parents=True)
    write_learner(checkpoint / "actor", {"model": weights})
    return checkpoint


def test_a_checkpoint_imagines_the_same_macro_steps_with_and_without_what_it_learnt(
    trained, tmp_path
):
    checkpoint = save(tmp_path, trained)
    assert main(["imagine", EXAMPLE, *SHORT, f"runner.resume_dir={checkpoint}"]) == 0
    folder = tmp_path / "run/imagination/global_step_3"
    measured = json.loads((folder / "imagination.json").read_text())
    frozen, live = (measured[source][0]["frames"] for source in ("frozen", "live"))
    for before, after in zip(frozen, live, strict=True):
        assert before["frames"] == after["frames"] == 4  # two states, two chunks of 8 actions
        assert before["copied"] == after["copied"] > 0
        assert before["imagined"] != after["imagined"]


def test_without_a_checkpoint_there_is_one_imagination(tmp_path):
    assert main(["imagine", EXAMPLE, *SHORT, f"--output={tmp_path}"]) == 0
    assert list(json.loads((tmp_path / "imagination.json").read_text())) == ["live"]


def test_a_checkpoint_of_another_configuration_is_refused(trained, tmp_path, capsys):
    checkpoint = save(tmp_path, {k: v for k, v in trained.items() if "lora" not in k})
    assert main(["imagine", EXAMPLE, *SHORT, f"runner.resume_dir={checkpoint}"]) == 1
    assert f"give {tmp_path / 'run/config.yaml'} as the configuration" in capsys.readouterr().err
