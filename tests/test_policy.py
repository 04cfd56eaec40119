"""The policy: what a rollout records, what the learner makes of it, and what it depends on."""

import fake_official
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rlinf.models.embodiment.base_policy import ForwardType
from tiny_parts import (
    BATCH,
    EXECUTED,
    HORIZON,
    IMAGE_HEIGHT,
    IMAGE_WIDTH,
    LATENT_SIZE,
    LIFT,
    STEPS,
    observations,
    tiny_policy,
    tiny_wam,
)

from rlinf_wamrl.data.macro_step import MacroStep, RecordSpec
from rlinf_wamrl.instructions import INSTRUCTION_BYTES, pack_instructions, unpack_instructions
from rlinf_wamrl.streams import random_stream
from rlinf_wamrl.wam.adapter import adapt
from rlinf_wamrl.wam.memory import MemorySetup, video_cache_bytes

MODES = ["first_frame", "idm"]
VIDEO_SHAPE = (48, 3, *LATENT_SIZE)


def policy_in(mode, **settings):
    return tiny_policy(tiny_wam(variant="optional_idm", action_infer_mode=mode), **settings)


def rows(observation, chosen):
    return {
        key: [value[row] for row in chosen] if isinstance(value, list) else value[chosen]
        for key, value in observation.items()
    }


def rollout(policy, **changes):
    actions, result = policy.predict_action_batch(observations(**changes))
    return actions, result, result["forward_inputs"]


@pytest.mark.parametrize("mode", MODES)
def test_a_rollout_records_a_macro_step(mode):
    actions, result, record = rollout(policy_in(mode))
    assert actions.shape == (BATCH, EXECUTED, 7)
    assert actions.dtype == torch.float32
    assert torch.equal(record["action"], actions.flatten(1))
    assert result["prev_logprobs"].shape == (BATCH, EXECUTED, 7)
    assert all(value.device.type == "cpu" for value in record.values())
    spec = RecordSpec(
        image_size=(IMAGE_HEIGHT, IMAGE_WIDTH),
        denoising_steps=STEPS,
        action_horizon=HORIZON,
        executed_actions=EXECUTED,
        video_latents_shape=VIDEO_SHAPE if mode == "idm" else None,
    )
    ended = torch.zeros(BATCH, EXECUTED, dtype=torch.bool)
    step = MacroStep.from_record(record, rewards=ended.float(), dones=ended, spec=spec)
    assert (step.video_latents is not None) == (mode == "idm")
    assert step.task_id.tolist() == [0, 1, 2]
    torch.testing.assert_close(step.logp_old[:, 0], result["prev_logprobs"].sum(dim=(1, 2)))


def test_executed_actions_are_the_end_of_the_chain_in_the_simulators_units():
    policy = policy_in("first_frame")
    actions, _, record = rollout(policy)
    expected = policy.processor.executable_actions(record["chain"][:, -1, :EXECUTED])
    assert torch.equal(actions, expected)
    assert set(actions[..., -1].unique().tolist()) <= {-1.0, 1.0}


@pytest.mark.parametrize("steps", ["one_random", "all", (0, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode", MODES)
def test_the_learner_scores_what_the_rollout_recorded_bit_for_bit(mode, dtype, steps):
    policy = policy_in(mode, stochastic_steps=steps).to(dtype)
    _, result, record = rollout(policy)
    scored = policy.forward(ForwardType.DEFAULT, forward_inputs=record)
    assert torch.equal(scored["logprobs"], result["prev_logprobs"])
    assert scored["values"] is None
    assert scored["entropy"] is None


@pytest.mark.parametrize("steps", ["one_random", (0, 2)])
def test_noise_along_few_directions_is_scored_bit_for_bit(steps):
    policy = policy_in("first_frame", stochastic_steps=steps, noise_modes=2, noise_dims=(0, 1, 2))
    _, result, record = rollout(policy)
    scored = policy.forward(ForwardType.DEFAULT, forward_inputs=record)["logprobs"]
    assert torch.equal(scored, result["prev_logprobs"])
    assert int((scored != 0).sum()) == BATCH * 2 * 3
    white = policy_in("first_frame", stochastic_steps=steps)
    assert not torch.equal(rollout(white)[2]["chain"], record["chain"])


@pytest.mark.parametrize("mode", MODES)
def test_scores_hardly_depend_on_the_batch_they_are_computed_in(mode):
    policy = policy_in(mode)
    _, result, record = rollout(policy)
    for row in range(BATCH):
        one = {key: value[row : row + 1] for key, value in record.items()}
        scored = policy.default_forward(one)["logprobs"].sum()
        torch.testing.assert_close(
            scored, result["prev_logprobs"][row].sum(), rtol=0, atol=1e-5 * EXECUTED * 7
        )


def test_the_learner_needs_no_autoencoder_for_what_was_imagined():
    policy = policy_in("idm")
    _, _, record = rollout(policy)
    policy.vae.encode = lambda video: pytest.fail("the image was encoded again")
    policy.default_forward(record)


def test_actions_follow_from_the_imagined_video_alone():
    policy = policy_in("idm")
    _, _, record = rollout(policy)
    before = policy.default_forward(record)["logprobs"]
    blind = policy.default_forward(record | {"image": torch.zeros_like(record["image"])})
    assert torch.equal(blind["logprobs"], before)
    other = policy.default_forward(record | {"video_latents": -record["video_latents"]})
    assert not torch.allclose(other["logprobs"], before)
    with pytest.raises(ValueError, match=r"no video_latents.*action_infer_mode"):
        policy.default_forward({k: v for k, v in record.items() if k != "video_latents"})


def test_the_imagined_video_starts_with_the_observation():
    policy = policy_in("idm")
    _, _, record = rollout(policy)
    instructions = unpack_instructions(record["instruction"])
    state = policy.state(record["image"], record["proprio"], instructions)
    assert torch.equal(record["video_latents"][:, :, :1], state.first_frame.half())
    assert record["video_latents"].dtype == torch.float16


def test_more_imagination_steps_or_another_shift_give_another_video():
    videos = [
        rollout(policy_in("idm", **settings))[2]["video_latents"]
        for settings in ({}, {"imagination_steps": 3}, {"shift": 1.0})
    ]
    assert not torch.equal(videos[0], videos[1])
    assert not torch.equal(videos[0], videos[2])


@pytest.mark.parametrize("variant", ["idm", "joint"])
def test_variants_that_always_imagine(variant):
    policy = tiny_policy(tiny_wam(variant=variant))
    _, result, record = rollout(policy)
    assert record["video_latents"].shape == (BATCH, *VIDEO_SHAPE)
    assert torch.equal(policy.default_forward(record)["logprobs"], result["prev_logprobs"])


@pytest.mark.parametrize("mode", MODES)
def test_evaluation_is_deterministic(mode):
    policy = policy_in(mode)
    first, nothing = policy.predict_action_batch(observations(), mode="eval")
    rollout(policy)
    again, _ = policy.predict_action_batch(observations(), mode="eval")
    assert torch.equal(first, again)
    assert nothing == {}
    with pytest.raises(ValueError, match="mode must be 'train' or 'eval', got 'test'"):
        policy.predict_action_batch(observations(), mode="test")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("phase", ["train", "eval"])
def test_an_episode_acts_alike_in_every_batch(mode, phase):
    policy, whole = policy_in(mode), observations()
    together, result = policy.predict_action_batch(whole, mode=phase)
    for chosen in ([2], [1, 0]):
        apart, other = policy.predict_action_batch(rows(whole, chosen), mode=phase)
        torch.testing.assert_close(apart, together[chosen], rtol=0, atol=1e-5)
        if phase == "train":
            record, same = other["forward_inputs"], result["forward_inputs"]
            assert torch.equal(record["chain"][:, 0], same["chain"][chosen, 0])
            assert torch.equal(record["k_star"], same["k_star"][chosen])


def test_random_streams_differ_between_episodes_steps_phases_and_seeds():
    start = rollout(policy_in("idm"))[2]
    assert not torch.equal(start["chain"][0, 0], start["chain"][1, 0])
    later = rollout(policy_in("idm"), elapsed=5)[2]
    reseeded = rollout(policy_in("idm", seed=1))[2]
    for other in (later, reseeded):
        assert not torch.equal(other["chain"][:, 0], start["chain"][:, 0])
        assert not torch.equal(other["video_latents"], start["video_latents"])
    draws = {
        torch.randn(4, generator=random_stream(*key))[0].item()
        for key in ((0, "train", 1, 2), (0, "eval", 1, 2), (0, "train", "video", 1, 2), (0, "t"))
    }
    assert len(draws) == 4


def test_members_of_a_group_may_share_what_is_not_scored():
    policy, seen = policy_in("idm", initial_noise="group"), observations()
    alike = {key: seen[key][:1].expand_as(seen[key]) for key in ("main_images", "wrist_images")}
    seen |= alike | {"task_descriptions": [LIFT] * BATCH, "states": torch.zeros(BATCH, 8)}
    record = policy.predict_action_batch(seen)[1]["forward_inputs"]
    for shared in (record["chain"][:, 0], record["video_latents"]):
        torch.testing.assert_close(shared[1:], shared[:1].expand_as(shared[1:]), rtol=0, atol=1e-3)
    assert not torch.allclose(record["chain"][0, -1], record["chain"][1, -1], atol=1e-2)
    other = policy.predict_action_batch(seen | {"group_id": torch.ones(BATCH, dtype=torch.int64)})
    assert not torch.equal(other[1]["forward_inputs"]["chain"][:, 0], record["chain"][:, 0])


def test_actions_start_from_the_same_noise_whether_or_not_a_video_is_imagined():
    chains = [rollout(policy_in(mode))[2]["chain"] for mode in MODES]
    assert torch.equal(chains[0][:, 0], chains[1][:, 0])
    assert not torch.equal(chains[0][:, -1], chains[1][:, -1])


def test_without_episode_numbers_the_own_generator_serves():
    def sample(policy):
        bare = {k: v for k, v in observations().items() if k not in ("episode_id", "elapsed_steps")}
        return policy.predict_action_batch(bare)[1]["forward_inputs"]["chain"]

    policy = policy_in("first_frame")
    first, second = sample(policy), sample(policy)
    assert not torch.equal(first, second)
    assert torch.equal(sample(policy_in("first_frame")), first)


def test_actions_that_did_not_run_score_zero():
    policy = policy_in("first_frame")
    _, result, record = rollout(policy)
    executed = torch.tensor([[True] * EXECUTED, [True, True] + [False] * 3, [False] * EXECUTED])
    scored = policy.default_forward(record | {"executed_mask": executed})["logprobs"]
    assert torch.equal(scored[0], result["prev_logprobs"][0])
    assert torch.equal(scored[1, :2], result["prev_logprobs"][1, :2])
    assert not scored[1, 2:].any()
    assert not scored[2].any()


@pytest.mark.parametrize("mode", MODES)
def test_gradients_reach_the_action_expert_and_the_proprio_encoder_only(mode):
    policy = policy_in(mode)
    policy.wam.video_expert.requires_grad_(False)
    _, _, record = rollout(policy)
    policy.default_forward(record)["logprobs"].sum().backward()
    reached = {name for name, p in policy.named_parameters() if p.grad is not None}
    trained = {
        name
        for name, _ in policy.named_parameters()
        if name.startswith(("wam.mot.mixtures.action.", "wam.proprio_encoder."))
    }
    assert reached == trained
    assert all(p.grad.abs().sum() > 0 for n, p in policy.named_parameters() if n in reached)


def test_each_instruction_is_encoded_once():
    policy = policy_in("first_frame")
    asked = []
    encode = policy.text_encoder.encode
    policy.text_encoder.encode = lambda texts: asked.extend(texts) or encode(texts)
    _, _, record = rollout(policy)
    policy.default_forward(record)
    rollout(policy, seed=1)
    assert sorted(asked) == sorted(observations()["task_descriptions"])


@settings(deadline=None)
@given(st.lists(st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=60), max_size=4))
def test_instructions_survive_packing(instructions):
    packed = pack_instructions(instructions)
    assert packed.shape == (len(instructions), INSTRUCTION_BYTES)
    assert packed.dtype == torch.uint8
    assert unpack_instructions(packed) == instructions


def test_an_instruction_that_is_too_long_is_an_error():
    with pytest.raises(ValueError, match="may have 256 bytes, this one has 257"):
        pack_instructions(["a" * 257])


def test_impossible_settings_and_calls_are_refused():
    with pytest.raises(ValueError, match=r"num_action_chunks = 9 must be within 1..8"):
        policy_in("first_frame", num_executed=9)
    with pytest.raises(ValueError, match="no forward of type .*sft"):
        policy_in("first_frame").forward(ForwardType.SFT)


SURFACES = ["dict", "tensor"]
OFFICIAL = {
    "first_frame": fake_official.FakeFastWAM,
    "idm": fake_official.FakeFastWAMIDM,
}


@pytest.mark.parametrize("surface", SURFACES)
@pytest.mark.parametrize("mode", MODES)
def test_an_official_object_is_sampled_and_scored_as_our_model_is(mode, surface):
    native = tiny_wam(variant="idm" if mode == "idm" else "uncond")
    official = OFFICIAL[mode](native, surface)
    model = adapt(official, action_horizon=HORIZON)
    theirs, ours = (tiny_policy(wam, model.vae) for wam in (model, native))
    _, result, record = rollout(theirs)
    assert record["chain"].shape == (BATCH, STEPS + 1, HORIZON, 7)
    scored = theirs.default_forward(record)["logprobs"]
    assert torch.equal(scored, result["prev_logprobs"])
    torch.testing.assert_close(scored, ours.default_forward(record)["logprobs"], rtol=0, atol=1e-4)
    torch.testing.assert_close(record["chain"], rollout(ours)[2]["chain"], rtol=0, atol=1e-4)
    scored.sum().backward()
    assert official.action_expert.expert.head.weight.grad is not None
    assert official.video_expert.expert.head.head.weight.grad is None


def test_an_official_object_moves_and_trains_with_the_policy():
    model = adapt(fake_official.FakeFastWAM(tiny_wam(), "dict"), action_horizon=HORIZON)
    policy = tiny_policy(model, model.vae)
    inside = {id(parameter) for parameter in policy.parameters()}
    assert {id(parameter) for parameter in model.model.parameters()} <= inside
    assert policy.dtype == torch.float32


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("surface", [None, *SURFACES])
def test_recorded_video_caches_replace_the_autoencoder_and_the_video_expert(mode, surface):
    wam = tiny_wam(variant="idm" if mode == "idm" else "uncond")
    if surface is not None:
        wam = adapt(OFFICIAL[mode](wam, surface), action_horizon=HORIZON)
    policy = tiny_policy(wam, wam.vae, keep_video_cache=True)
    _, result, record = rollout(policy)
    made = policy.forward("video_cache", records=record)
    assert torch.equal(made, record["video_cache"])
    without = {name: value for name, value in record.items() if name != "video_cache"}
    expected = policy.default_forward(without)["logprobs"]
    policy.vae.encode = lambda video: pytest.fail("the image was encoded")
    policy.wam.video_expert.register_forward_pre_hook(lambda *_: pytest.fail("it was run"))
    blind = record | {"image": torch.zeros_like(record["image"])}
    scored = policy.default_forward(blind)["logprobs"]
    assert torch.equal(scored, expected) and torch.equal(scored, result["prev_logprobs"])


def test_what_a_video_cache_costs_is_what_the_plan_says():
    policy = tiny_policy(tiny_wam(), keep_video_cache=True)
    cache = rollout(policy)[2]["video_cache"]
    setup = MemorySetup(
        weight_dtype=torch.float32, image_height=IMAGE_HEIGHT, image_width=IMAGE_WIDTH
    )
    assert cache[0].nbytes == video_cache_bytes(policy.wam.config, setup)


def test_text_is_projected_once_per_instruction():
    policy, seen = policy_in("first_frame"), observations()
    lengths = []
    for expert in (policy.wam.video_expert, policy.wam.action_expert):
        expert.text_embedding.register_forward_pre_hook(
            lambda module, arguments: lengths.append(arguments[0].shape[0])
        )
    same = seen | {"task_descriptions": [LIFT] * BATCH}
    policy.predict_action_batch(same)
    assert lengths == [1, BATCH] * 2  # the text, and each observation's proprio token


@pytest.mark.slow
def test_compiled_sampling_gives_the_same_chunks():
    plain, compiled = policy_in("first_frame"), policy_in("first_frame")
    compiled.enable_torch_compile()
    expected, result, _ = rollout(plain)
    actions, again, _ = rollout(compiled)
    torch.testing.assert_close(actions, expected, rtol=0, atol=1e-4)
    torch.testing.assert_close(again["prev_logprobs"], result["prev_logprobs"], rtol=0, atol=1e-4)


def test_an_official_object_cannot_be_compiled():
    model = adapt(fake_official.FakeFastWAM(tiny_wam(), "dict"), action_horizon=HORIZON)
    with pytest.raises(ValueError, match=r"enable_torch_compile works with this package's own"):
        tiny_policy(model, model.vae).enable_torch_compile()


def test_cuda_graphs_need_a_cuda_device():
    with pytest.raises(ValueError, match=r"enable_cuda_graph needs .* the model is on cpu"):
        policy_in("first_frame").capture_cuda_graph(train_batch_size=3, eval_batch_size=2)
