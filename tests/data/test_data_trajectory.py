"""Resolving joined chunks into steps, and steps into trajectories."""

import pickle
import uuid

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic_rollout import Rollouts

from rlinf_wamrl.data.batch_values import batch_values_equal
from rlinf_wamrl.data.embodied_types import (
    EnvPart,
    EnvTransition,
    PolicyOutput,
    PolicyPart,
    Trajectory,
    TrajectoryKey,
    TrajectorySource,
    TrajectoryStep,
)

KEY = TrajectoryKey(0, 0, 0, 0, 0)
B, C, A = 2, 3, 2


def parts(*, output=None, transition=None, **env_fields):
    source = [TrajectorySource(KEY, B)]
    if output is None:
        output = PolicyOutput(
            forward_inputs={"action": torch.arange(12.0).reshape(B, C * A)},
            prev_logprobs=torch.ones(B, C, A),
            prev_values=torch.ones(B, 1),
            versions=torch.zeros(B, C, A),
        )
    policy = PolicyPart(sources=source, obs={"states": torch.ones(B, 1)}, output=output)
    transition = transition or EnvTransition(dones=torch.zeros(B, C, dtype=torch.bool))
    return policy, EnvPart(sources=source, transition=transition, **env_fields)


def resolve(policy, env, **options):
    values = {
        "rewards": torch.zeros(B, C),
        "collect_prev_infos": True,
        "collect_transitions": False,
        "enable_rlt": False,
        "include_final_value": False,
    }
    return TrajectoryStep.from_parts(policy, env, **{**values, **options})


def test_a_step_takes_its_data_from_both_halves():
    initial = EnvTransition(
        dones=torch.ones(B, C, dtype=torch.bool),
        truncations=torch.zeros(B, C, dtype=torch.bool),
        terminations=torch.ones(B, C, dtype=torch.bool),
    )
    policy, env = parts(initial_transition=initial, final_prev_values=torch.full((B, 1), 5.0))
    step = resolve(policy, env, include_final_value=True)
    assert step.actions is policy.output.forward_inputs["action"]
    assert step.intervene_flags.shape == step.actions.shape and not step.intervene_flags.any()
    assert step.prev_logprobs is policy.output.prev_logprobs
    assert step.versions is policy.output.versions
    assert step.initial_dones is initial.dones
    assert step.initial_truncations is initial.truncations
    assert step.initial_terminations is initial.terminations
    assert step.final_prev_values.tolist() == [[5.0], [5.0]]
    assert step.curr_obs == {} and step.next_obs == {}
    step.forward_inputs["later"] = 1
    assert "later" not in policy.output.forward_inputs


def test_statistics_of_the_acting_policy_are_optional():
    step = resolve(
        *parts(final_prev_values=torch.ones(B, 1)),
        collect_prev_infos=False,
        include_final_value=True,
    )
    assert step.prev_logprobs is None and step.prev_values is None
    assert step.final_prev_values is None and step.versions is not None


def test_a_part_that_skipped_inference_gives_no_step():
    policy, env = parts()
    external = PolicyPart(sources=policy.sources, obs={}, external_actions=torch.zeros(B, C, A))
    with pytest.raises(ValueError, match="skipped inference"):
        resolve(external, env)


@pytest.mark.parametrize("trailing", [(), (A,)])
def test_actions_that_did_not_run_have_log_prob_zero(trailing):
    mask = torch.tensor([[True, True, False], [True, False, False]])
    logprobs = torch.full((B, C, *trailing), float("nan"))
    logprobs[mask] = 1.0
    policy, env = parts(
        output=PolicyOutput(forward_inputs={"action": torch.ones(B, 6)}, prev_logprobs=logprobs),
        transition=EnvTransition(executed_mask=mask),
    )
    step = resolve(policy, env)
    expected = mask.float().reshape(B, C, *[1] * len(trailing)).expand(B, C, *trailing)
    assert torch.equal(step.prev_logprobs, expected)
    assert step.forward_inputs["executed_mask"] is mask
    assert policy.output.prev_logprobs.isnan().any()


def test_a_mask_needs_log_probs_per_action_only_if_they_are_kept():
    mask = torch.ones(B, C, dtype=torch.bool)
    policy, env = parts(
        output=PolicyOutput(forward_inputs={}, prev_logprobs=torch.ones(B, 1)),
        transition=EnvTransition(executed_mask=mask),
    )
    with pytest.raises(ValueError, match=r"executed_mask \[2, 3\] needs log-probs"):
        resolve(policy, env)
    step = resolve(policy, env, collect_prev_infos=False)
    assert step.forward_inputs["executed_mask"] is mask


def test_the_experts_actions_replace_whole_slots():
    forward_inputs = {"action": torch.zeros(B, C * A), "model_action": torch.zeros(B, C * A)}
    policy, env = parts(
        output=PolicyOutput(forward_inputs=forward_inputs),
        transition=EnvTransition(
            intervene_actions=torch.ones(B, C * A),
            intervene_flags=torch.tensor([[True, False, True], [False, False, False]]),
        ),
    )
    step = resolve(policy, env)
    assert step.actions.tolist() == [[1, 1, 0, 0, 1, 1], [0] * 6]
    assert step.intervene_flags.tolist() == [[True, True, False, False, True, True], [False] * 6]
    assert step.forward_inputs["action"] is step.actions
    assert "model_action" not in step.forward_inputs
    assert not policy.output.forward_inputs["action"].any()


def test_flags_of_the_policy_overwrite_expanded_ones_but_not_actions():
    policy, env = parts(
        output=PolicyOutput(
            forward_inputs={"action": torch.zeros(B, C * A)},
            intervene_flags=torch.zeros(B, C, dtype=torch.bool),
        ),
        transition=EnvTransition(
            intervene_actions=torch.ones(B, C * A),
            intervene_flags=torch.ones(B, dtype=torch.bool),
        ),
    )
    step = resolve(policy, env)
    assert step.actions.all() and not step.intervene_flags.any()


@pytest.mark.parametrize(
    ("actions", "expert", "flags", "words"),
    [
        ((B, 6), (B, 6), None, "without flags"),
        ((B, C, A), (B, 6), (B, C), "actions must be flattened"),
        ((B, 6), (B, C, A), (B, C), "intervene_actions must be flattened"),
        ((B, 6), (B, 6), (B, C, A), "intervention flags must be"),
        ((B, 6), (B, 6), (B, 4), "intervention flags must be"),
    ],
)
def test_interventions_of_another_layout_are_refused(actions, expert, flags, words):
    step = TrajectoryStep(actions=torch.zeros(actions))
    with pytest.raises(ValueError, match=words):
        step.apply_interventions(
            torch.ones(expert), None if flags is None else torch.ones(flags, dtype=torch.bool)
        )


def test_raw_transitions_leave_the_instruction_out():
    policy, env = parts(
        next_obs={"states": torch.zeros(B, 1), "task_descriptions": ["a", "b"]},
    )
    policy.obs["task_descriptions"] = ["a", "b"]
    step = resolve(policy, env, collect_transitions=True)
    assert set(step.curr_obs) == set(step.next_obs) == {"states"}
    assert "task_descriptions" in policy.obs
    with pytest.raises(ValueError, match="need next_obs"):
        resolve(*parts(), collect_transitions=True)


@pytest.mark.parametrize("reference", [(B, 4, A), (B, 4 * A)])
def test_rlt_transitions_win_and_show_interventions_in_the_current_state(reference):
    forward_inputs = {
        "action": torch.zeros(B, C * A),
        "z_rl": torch.ones(B, 2),
        "proprio": torch.ones(B, 1),
        "ref_chunk": torch.full(reference, -1.0),
    }
    next_features = {"z_rl": torch.zeros(B, 2), "ref_chunk": torch.full(reference, -2.0)}
    policy, env = parts(
        output=PolicyOutput(forward_inputs=forward_inputs),
        transition=EnvTransition(
            intervene_actions=torch.ones(B, C * A),
            intervene_flags=torch.tensor([[False, True, False], [False, False, False]]),
        ),
        next_obs={"states": torch.zeros(B, 1)},
        next_rlt_obs=next_features,
    )
    step = resolve(policy, env, collect_transitions=True, enable_rlt=True)
    assert set(step.curr_obs) == {"z_rl", "proprio", "ref_chunk"}
    chunk = step.curr_obs["ref_chunk"]
    assert chunk.shape == reference
    # Only the expert's slots change; rows and slots of the policy keep the reference.
    assert chunk.reshape(B, 4, A)[0].tolist() == [[-1, -1], [1, 1], [-1, -1], [-1, -1]]
    assert (chunk[1] == -1).all() and (step.next_obs["ref_chunk"] == -2).all()


def test_rlt_transitions_need_their_features():
    with pytest.raises(ValueError, match=r"need \['z_rl', 'proprio', 'ref_chunk'\]"):
        resolve(*parts(), enable_rlt=True)
    features = {name: torch.zeros(B, 1) for name in ("z_rl", "proprio", "ref_chunk")}
    with pytest.raises(ValueError, match="need next_rlt_obs"):
        resolve(*parts(output=PolicyOutput(forward_inputs=features)), enable_rlt=True)


# ---------------------------------------------------------------- trajectories


def steps_of(epochs: int, chunks: int, rows: int = 4, seed: int = 0) -> list[TrajectoryStep]:
    rollouts = Rollouts(seed=seed, rows=rows)
    return [
        resolve(
            pair.policy,
            pair.env,
            rewards=pair.env.transition.rewards,
            include_final_value=pair.key.chunk_id == chunks - 1,
        )
        for epoch in range(epochs)
        for pair in rollouts.epoch(chunks, epoch=epoch)
    ]


@pytest.mark.parametrize(("epochs", "chunks", "rows"), [(1, 1, 1), (2, 3, 4)])
def test_boundaries_and_values_have_one_entry_more_per_epoch(epochs, chunks, rows):
    steps = steps_of(epochs, chunks, rows)
    trajectory = Trajectory.from_steps(steps, max_episode_length=9)
    total = epochs * chunks
    assert trajectory.max_episode_length == 9
    assert trajectory.actions.shape == (total, rows, 6)
    assert trajectory.forward_inputs["image"].dtype == torch.uint8
    assert trajectory.dones.shape == (total + epochs, rows, 2)
    assert trajectory.prev_values.shape == (total + epochs, rows, 1)
    expected_flags, expected_values = [], []
    for step in steps:
        expected_flags += [] if step.initial_dones is None else [step.initial_dones]
        expected_flags.append(step.dones)
        expected_values.append(step.prev_values)
        expected_values += [] if step.final_prev_values is None else [step.final_prev_values]
    assert torch.equal(trajectory.dones, torch.stack(expected_flags))
    assert torch.equal(trajectory.prev_values, torch.stack(expected_values))


def test_weights_are_identified_by_the_versions():
    steps = steps_of(1, 2)
    trajectory = Trajectory.from_steps(steps)
    raw = trajectory.versions.numpy().tobytes()
    assert trajectory.model_weights_id == str(uuid.uuid5(uuid.NAMESPACE_DNS, raw.hex()))
    empty = Trajectory.from_steps([TrajectoryStep(), TrajectoryStep()])
    zero = torch.zeros(1).numpy().tobytes()
    assert empty.model_weights_id == str(uuid.uuid5(uuid.NAMESPACE_DNS, zero.hex()))
    assert empty.actions is None and empty.forward_inputs == {}


@pytest.mark.parametrize("lacking", [0, 1])
@pytest.mark.parametrize("error", [KeyError, ValueError])
def test_a_key_on_only_some_chunks_is_named(lacking, error):
    steps = steps_of(1, 3)
    del steps[lacking].forward_inputs["k_star"]
    with pytest.raises(error, match=r"forward_inputs\['k_star'\] is present on 2 of 3 chunks"):
        Trajectory.from_steps(steps)


def test_a_chunk_without_any_forward_inputs_is_no_silent_gap():
    steps = steps_of(1, 2)
    steps[0].forward_inputs = {}
    with pytest.raises(ValueError, match="1 of 2 chunks"):
        Trajectory.from_steps(steps)


@pytest.mark.parametrize("value", ["text", ["a", "b"]])
def test_leaves_that_cannot_be_stacked_are_named(value):
    steps = steps_of(1, 2)
    for step in steps:
        step.forward_inputs["note"] = value
    with pytest.raises(ValueError, match=r"forward_inputs\['note'\] has to be tensors"):
        Trajectory.from_steps(steps)


def test_nested_and_absent_leaves():
    steps = steps_of(1, 2)
    for step in steps:
        step.forward_inputs.update(nested={"x": torch.ones(4, 1)}, absent=None)
    trajectory = Trajectory.from_steps(steps)
    assert trajectory.forward_inputs["nested"]["x"].shape == (2, 4, 1)
    assert "absent" not in trajectory.forward_inputs
    batch = Trajectory.to_batch(trajectory.split(2))
    assert batch["forward_inputs"]["nested"]["x"].shape == (2, 4, 1)


@given(st.lists(st.integers(1, 2), min_size=1, max_size=4), st.integers(1, 3))
@settings(max_examples=30, deadline=None)
def test_to_batch_inverts_split_under_every_partition(sizes, chunks):
    trajectory = Trajectory.from_steps(steps_of(1, chunks, rows=sum(sizes)))
    trajectory.forward_inputs["half"] = trajectory.forward_inputs["chain"].bfloat16()
    whole = Trajectory.to_batch([trajectory])
    shards = trajectory.split(sizes)
    assert [shard.actions.shape[1] for shard in shards] == sizes
    assert all(shard.model_weights_id == trajectory.model_weights_id for shard in shards)
    assert batch_values_equal(Trajectory.to_batch(shards), whole)
    assert batch_values_equal(
        Trajectory.to_batch([pickle.loads(pickle.dumps(shard)) for shard in shards]), whole
    )


def test_a_batch_has_the_fields_of_the_first_trajectory():
    first, second = Trajectory.from_steps(steps_of(1, 2)).split(2)
    first.versions = None
    batch = Trajectory.to_batch([first, second])
    assert "versions" not in batch and "max_episode_length" not in batch
    assert "curr_obs" not in batch and "forward_inputs" in batch
    assert Trajectory.to_batch([]) == {}


@pytest.mark.parametrize(
    ("sizes", "words"),
    [(3, "into 3 equal shards"), (0, "into 0 equal shards"), ([1, 2], "4 rows")],
)
def test_shards_must_fit_the_batch(sizes, words):
    with pytest.raises(ValueError, match=words):
        Trajectory.from_steps(steps_of(1, 1)).split(sizes)


def test_an_empty_trajectory_has_no_batch_to_split():
    with pytest.raises(ValueError, match="its batch is unknown"):
        Trajectory().split(1)


@pytest.mark.parametrize("mode", ["any", "all"])
def test_intervened_chunks_are_extracted_per_environment(mode):
    trajectory = Trajectory.from_steps(steps_of(2, 2, rows=3))
    trajectory.intervene_flags[1, 0, :2] = True
    trajectory.intervene_flags[2, 2, :] = True
    extracted = trajectory.extract_intervene_traj(mode)
    kept = {"any": [(0, 1), (2, 2)], "all": [(2, 2)]}[mode]
    assert len(extracted) == len(kept)
    for part, (env_id, chunk) in zip(extracted, kept, strict=True):
        assert torch.equal(part.actions, trajectory.actions[chunk : chunk + 1, env_id, None])
        assert part.rewards.shape == (1, 1, 2)
        # Flags keep each epoch's state before its first chunk, values each epoch's final one.
        row = chunk + chunk // 2 + 1
        flag_rows = sorted([0, 3, row])
        assert torch.equal(part.dones[:, 0], trajectory.dones[flag_rows, env_id])
        value_rows = sorted([2, 5, chunk + chunk // 2])
        assert torch.equal(part.prev_values[:, 0], trajectory.prev_values[value_rows, env_id])
        assert torch.equal(
            part.forward_inputs["chain"][0, 0], trajectory.forward_inputs["chain"][chunk, env_id]
        )


def test_no_intervention_extracts_nothing():
    trajectory = Trajectory.from_steps(steps_of(1, 2))
    assert trajectory.extract_intervene_traj() is None
    assert Trajectory().extract_intervene_traj() is None
    with pytest.raises(ValueError, match="'any' or 'all'"):
        trajectory.extract_intervene_traj("some")
