"""The learner's reward and video half on synthetic rollouts: shapes, order, what is kept."""

from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf

from rlinf_wamrl.instructions import pack_instructions
from rlinf_wamrl.rl.moments import Moments
from rlinf_wamrl.rl.reward import ReconstructionReward
from rlinf_wamrl.workers.imagination import ImaginationReward, model_frames
from rlinf_wamrl.workers.video_half import VideoHalf, success_episodes

T, B, C, STRIDE = 3, 2, 8, 4


def rollout():
    """Episode 0 succeeds at step 19 (action 3 of chunk 2); episode 1 runs to the end and fails.

    Pictures hold the step they were taken at, states ten times that.
    """
    executed = torch.ones(T, B, C, dtype=torch.bool)
    executed[2, 0, 4:] = False
    rewards = torch.zeros(T, B, C)
    rewards[2, 0, 3] = 1.0
    start = torch.arange(T)[:, None].expand(T, B) * C
    later = start[..., None] + STRIDE * torch.arange(1, 3)

    def picture(step):
        return step[..., None, None, None].expand(*step.shape, 3, 4, 8).to(torch.uint8)

    return {
        "rewards": rewards,
        "prev_logprobs": torch.zeros(T, B, C, 7),
        "loss_mask": torch.ones(T, B, 1, dtype=torch.bool),
        "advantages": torch.ones(T, B, 1),
        "forward_inputs": {
            "image": picture(start),
            "proprio": (10.0 * start)[..., None],
            "action": torch.arange(T * C).view(T, 1, C, 1).expand(T, B, C, 7).flatten(2).float(),
            "executed_mask": executed,
            "instruction": pack_instructions(["lift it"]).expand(T, B, -1),
            "task_id": torch.full((T, B), 5),
            "seed": torch.full((T, B), 6),
            "init_state_id": torch.full((T, B), 7),
            "episode_id": torch.arange(B).expand(T, B),
            "elapsed_steps": start,
        },
        "next_obs": {
            "future_frames": picture(later),
            "future_states": (10.0 * later)[..., None],
            "future_frames_mask": torch.ones(T, B, 2, dtype=torch.bool),
        },
    }


def test_a_success_becomes_pictures_states_and_the_actions_that_ran():
    (episode,) = success_episodes(rollout(), STRIDE)
    assert len(episode.executed_actions) == 20
    assert episode.executed_actions[:, 0].tolist() == list(range(20))
    assert episode.frames[:, 0, 0, 0].tolist() == [0, 4, 8, 12, 16]
    assert episode.proprio[::STRIDE, 0].tolist() == [0.0, 40.0, 80.0, 120.0, 160.0]
    assert (episode.task_id, episode.seed, episode.initial_state_id) == (5, 6, 7)
    assert episode.instruction == "lift it"


def test_with_a_reward_component_success_is_still_the_tasks_own(tmp_path):
    batch = rollout()
    batch["next_obs"]["task_reward"] = batch["rewards"].sum(-1)
    batch["rewards"] = batch["rewards"] - 0.01  # a weighted sum: the failure's is not 0 any more
    assert len(success_episodes(batch, STRIDE)) == 1


def video_half(folder, **changes):
    options = {
        "every": 2,
        "warmup": 1,
        "batch_size": 3,
        "lambda_kl": 0.0,
        "lambda_action": 0.0,
        "kl_decay": 0.9,
        "buffer_mib": 1,
        "buffer_memory_mib": 1,
        **changes,
    }
    cfg = OmegaConf.create(
        {
            "RL": {"video_sft": options},
            "env": {"train": {"action_video_freq_ratio": STRIDE}},
            "actor": {"seed": 3},
        }
    )
    return VideoHalf(cfg, folder, rank=0)


def test_windows_cut_from_the_buffer_are_aligned(tmp_path):
    half = video_half(tmp_path)
    assert half.collect(rollout()) == 1
    seen = []
    half.loss(lambda **call: seen.append(call["windows"]), 8, STRIDE, iteration=0, step=0)
    (windows,) = seen
    starts = windows.video[:, 0, 0, 0, 0].tolist()
    for row, start in enumerate(starts):
        real = ~windows.action_is_pad[row]
        first = windows.action[row, real, 0].tolist()
        assert first == [start + i for i in range(len(first))]
        assert windows.proprio[row, 0, 0] == 10.0 * start


def test_windows_depend_on_iteration_step_and_rank_alone(tmp_path):
    half = video_half(tmp_path, batch_size=8)
    half.collect(rollout())
    seen = []
    for step in (0, 0, 1):
        half.loss(lambda **call: seen.append(call["windows"].video), 8, STRIDE, 4, step)
    assert torch.equal(seen[0], seen[1]) and not torch.equal(seen[0], seen[2])


def test_calibration_looks_at_rows_that_ran_spread_over_the_whole_rollout(tmp_path):
    half = video_half(tmp_path, lambda_kl=1.0)
    ran = torch.ones(1000, 8, dtype=torch.bool)
    ran[::4] = False
    seen = []

    def forward(forward_type, records):
        seen.append(records["row"])
        return Moments.of(torch.randn(64, 1, 2, 3, generator=torch.Generator().manual_seed(0)))

    records = {"row": torch.arange(1000), "executed_mask": ran}
    half.calibrate(forward, records, lambda vector: [vector])
    (rows,) = seen
    assert len(rows) == 64 and rows[0] == 1 and rows[-1] == 999
    assert (rows % 4 != 0).all() and rows.diff().max() < 30
    half.calibrate(forward, records, lambda vector: [vector])
    assert len(seen) == 1  # once


def test_video_training_is_due_after_the_warm_up_at_intervals(tmp_path):
    half = video_half(tmp_path)
    assert [half.is_due(iteration) for iteration in range(5)] == [False, True, False, True, False]


@pytest.mark.parametrize("resumed", ["same", "other"])
def test_the_buffer_comes_back_from_a_checkpoint_also_in_another_run(tmp_path, resumed):
    half = video_half(tmp_path / "same")
    half.collect(rollout())
    state = half.state_dict()
    again = video_half(tmp_path / resumed)
    again.load_state_dict(state, source=tmp_path / "same")
    assert len(again.buffer) == 1 and again.statistics is None


def imagination(captured_ratio=STRIDE, watches_imagination=False):
    reconstruction = {
        "source": "frozen",
        "similarity": "pixel_mse",
        "encoder_path": None,
        "compare": "pixels",
        "weight": "uniform",
        "max_batch": 4,
    }
    rl = {"reconstruction": reconstruction, "imagination_steps": 5, "sigma_shift": None}
    rl["video_sft"] = {"enabled": watches_imagination}
    env = {"train": {"action_video_freq_ratio": captured_ratio}}
    model = SimpleNamespace(actions_per_frame=4)
    return ImaginationReward(OmegaConf.create({"RL": rl, "env": env}), model, "cpu")


def fake_forward(reward, mask):
    empty = torch.zeros(0, 2, 3, 4, 8, dtype=torch.uint8)
    result = ReconstructionReward(
        reward=reward,
        mask=mask,
        per_frame=reward[:, None],
        frame_mask=mask[:, None],
        imagined=empty,
    )
    return lambda **_: result


def test_rewards_are_normalised_over_all_ranks_and_laid_out_as_the_rollout():
    batch, scorer = rollout(), imagination()
    reward = -torch.arange(1.0, T * B + 1)
    mask = torch.tensor([True] * 5 + [False])
    other_rank = SimpleNamespace(values=-torch.arange(7.0, 9.0))

    def gather(vector):
        from rlinf_wamrl.rl.moments import Moments

        return [vector, Moments.of(other_rank.values).to_vector()]

    metrics = scorer.score(fake_forward(reward, mask), batch, gather)
    everything = torch.cat([reward[:5], other_rank.values]).double()
    expected = (reward[:5].double() - everything.mean()) / everything.std(correction=0)
    assert torch.allclose(batch["reconstruction_reward"].flatten()[:5].double(), expected)
    assert batch["reconstruction_reward"][2, 1] == 0.0 and not batch["reconstruction_mask"][2, 1]
    assert metrics["reward/reconstruction"] == pytest.approx(-3.0)
    assert metrics["reward/reconstruction_success"] == pytest.approx(-3.0)  # -1, -3, -5
    assert metrics["reward/reconstruction_failure"] == pytest.approx(-3.0)  # -2, -4


def test_raw_rewards_of_a_reward_component_are_taken_as_they_are():
    batch, scorer = rollout(), imagination()
    raw = -torch.arange(1.0, T * B + 1).view(T, B)
    batch["next_obs"]["reconstruction_raw"] = raw
    batch["next_obs"]["task_reward"] = batch["rewards"].sum(-1)
    scorer.score(None, batch, lambda vector: [vector])
    assert batch["reconstruction_mask"].all()
    assert torch.equal(batch["reconstruction_reward"].argsort(0), raw.argsort(0))


def test_frames_the_model_does_not_imagine_are_left_out():
    frames = torch.arange(5).view(1, 5, 1, 1, 1).expand(1, 5, 3, 2, 2).to(torch.uint8)
    kept, mask = model_frames(frames, torch.ones(1, 5, dtype=torch.bool), 2, 4)
    assert kept[0, :, 0, 0, 0].tolist() == [1, 3] and mask.shape == (1, 2)


def test_rewards_see_only_the_frames_that_are_imagined():
    batch, scorer = rollout(), imagination(captured_ratio=STRIDE // 2)
    given = {}

    def forward(**arguments):
        given.update(arguments)
        return fake_forward(torch.zeros(T * B), torch.ones(T * B, dtype=torch.bool))()

    scorer.score(forward, batch, lambda vector: [vector])
    captured = batch["next_obs"]["future_frames"].flatten(0, 1)
    assert torch.equal(given["frames"]["future_frames"], captured[:, 1::2])
    assert given["settings"].action_video_freq_ratio == STRIDE


def test_the_same_macro_steps_are_imagined_in_every_iteration_also_of_a_resumed_run():
    scorer, seen = imagination(watches_imagination=True), []

    def forward(*, records, settings, **_):
        seen.append((settings.source, records["image"]))
        reward = -records["image"].float().mean(dim=(1, 2, 3)) * len(seen)
        return fake_forward(reward, torch.ones_like(reward, dtype=torch.bool))()

    def gather(vector):
        return [vector, vector + 1.0]

    first, later = rollout(), rollout()
    later["forward_inputs"]["image"] = later["forward_inputs"]["image"] + 1
    metrics = scorer.score(forward, first, gather)
    resumed = imagination(watches_imagination=True)
    resumed.load_state_dict(scorer.state_dict())
    resumed.score(forward, later, gather)
    assert [source for source, _ in seen] == ["frozen", "frozen", "live"] * 2
    image = first["forward_inputs"]["image"].flatten(0, 1)
    assert all(torch.equal(seen[index][1], image) for index in (1, 2, 4, 5))
    mean = image.float().mean().item()
    assert metrics["reward/fixed_batch_frozen"] == pytest.approx(-2 * mean)
    assert metrics["reward/fixed_batch_live"] == pytest.approx(-3 * mean)
