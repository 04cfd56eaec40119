"""Adapters on the video expert: names, bits, and which gradients reach which weights."""

import dataclasses

import fake_official
import golden_fastwam as golden
import pytest
import torch
from peft.tuners.lora import LoraLayer
from torch import nn

from rlinf_wamrl.rl.flow_sde import logprob_chain, sample_chain
from rlinf_wamrl.rl.losses import (
    FeatureStatistics,
    feature_kl_loss,
    feature_moments,
    ppo_flow_loss,
    video_sft_loss,
)
from rlinf_wamrl.wam.adapter import adapt
from rlinf_wamrl.wam.config import fastwam_5b
from rlinf_wamrl.wam.lora import (
    frozen_features,
    inject_lora,
    live_and_frozen_features,
    merged_state_dict,
    select_trainable,
    trainable_set,
)
from rlinf_wamrl.wam.memory import lora_parameters
from rlinf_wamrl.wam.wam import WAM

ADAPTED = ("self_attn.", "cross_attn.", "ffn.")


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def adapted(rank=2, seed=0, dtype=None, **changes):
    model = golden.model(**changes)
    inject_lora(model, generator=generator(seed), rank=rank, alpha=4, dtype=dtype)
    select_trainable(model)
    return model


def native_or_official(kind):
    model = adapted()
    return model if kind == "native" else adapt(fake_official.FakeFastWAM(model, kind))


def scramble(model):
    for name, parameter in model.video_expert.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1, generator=generator(1))


def train(model, steps=3):
    optimiser = torch.optim.AdamW(
        [p for n, p in model.named_parameters() if "lora_" in n], lr=0.05, weight_decay=0.1
    )
    for step in range(steps):
        optimiser.zero_grad()
        loss, _ = video_sft_loss(model, golden.sample(), generator(step))
        loss.backward()
        optimiser.step()


def video_outputs(model):
    """Everything the video expert computes: its velocity, and keys and values of the prefill."""
    cache = model.prefill(golden.observation())
    velocity = model.video_velocity(
        golden.inputs()["latents"],
        torch.tensor([700.0, 200.0]),
        *model.encode_context(golden.observation()),
    )
    return [velocity, *cache.video_keys, *cache.video_values]


def equal(left, right):
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def gradients(model):
    """Names of the parameters that got a gradient other than 0, and of those that got none."""
    reached = {
        name
        for name, parameter in model.named_parameters()
        if parameter.grad is not None and bool((parameter.grad != 0).any())
    }
    return reached, {name for name, _ in model.named_parameters()} - reached


def test_names_stay_and_adapters_sit_where_they_should():
    plain = dict(golden.model().named_parameters())
    model = adapted()
    names = dict(model.named_parameters())
    lora = [name for name in names if "lora_" in name]
    assert len(lora) == 2 * 10 * 3
    assert all(name.startswith("mot.mixtures.video.blocks.") for name in lora)
    layers = {name.rsplit(".lora_", 1)[0] for name in lora}
    for name, value in plain.items():
        layer, _, kind = name.rpartition(".")
        now = f"{layer}.base_layer.{kind}" if layer in layers else name
        assert torch.equal(names.pop(now), value), now
    assert sorted(names) == sorted(lora)
    expected = {
        f"mot.mixtures.video.blocks.{i}.{part}"
        for i in range(3)
        for part in (
            *(f"{a}.{p}" for a in ("self_attn", "cross_attn") for p in "qkvo"),
            "ffn.0",
            "ffn.2",
        )
    }
    assert layers == expected


def test_names_do_not_depend_on_what_the_adapters_do():
    model = adapted()
    names = list(model.state_dict())
    with frozen_features(model):
        assert list(model.state_dict()) == names
    train(model, 1)
    assert list(model.state_dict()) == names
    assert list(adapted(seed=5).state_dict()) == names


def test_a_fresh_adapter_changes_nothing_and_draws_from_its_own_generator():
    model = golden.model()
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    inject_lora(model, generator=generator(7), rank=2, alpha=4)
    assert torch.equal(torch.rand(3), expected)
    assert equal(video_outputs(model), video_outputs(golden.model()))
    again, other = adapted(seed=7).state_dict(), adapted(seed=8).state_dict()
    for name, value in model.state_dict().items():
        assert torch.equal(value, again[name])
        assert torch.equal(value, other[name]) == ("lora_A" not in name), name


def test_an_adapter_adds_alpha_over_r_b_a():
    model = adapted(rank=2)
    scramble(model)
    layer = model.video_expert.blocks[1].ffn[0]
    assert isinstance(layer, LoraLayer)
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    x = torch.randn(5, a.shape[1], generator=generator())
    expected = nn.functional.linear(x, layer.base_layer.weight + 4 / 2 * b @ a)
    torch.testing.assert_close(layer(x), expected + layer.base_layer.bias)


@pytest.mark.parametrize("kind", ["native", "dict", "tensor"])
def test_disabled_adapters_are_the_pretrained_expert_bit_for_bit_after_training(kind):
    model = native_or_official(kind)
    before = video_outputs(model)
    train(model)
    live = video_outputs(model)
    assert not equal(live, before)
    with frozen_features(model):
        assert equal(video_outputs(model), before)
    assert equal(video_outputs(model), live)


def test_disabling_leaves_what_trains_as_it_is_even_after_an_error():
    model = adapted()
    frozen = model.video_expert.blocks[0].self_attn.q.lora_A["default"].weight
    frozen.requires_grad_(False)
    flags = [p.requires_grad for p in model.parameters()]
    with pytest.raises(KeyError), frozen_features(model):
        assert [p.requires_grad for p in model.parameters()] == flags
        raise KeyError
    assert [p.requires_grad for p in model.parameters()] == flags
    scramble(model)
    assert not equal(video_outputs(model), video_outputs(golden.model()))
    with frozen_features(model), frozen_features(model):
        pass
    with frozen_features(model):
        with frozen_features(model):
            pass
        assert equal(video_outputs(model), video_outputs(golden.model()))


def test_disabling_in_the_middle_of_a_graph_keeps_its_gradient():
    model = adapted()
    scramble(model)
    loss, _ = video_sft_loss(model, golden.sample(), generator())
    with frozen_features(model):
        video_outputs(model)
    loss.backward()
    interrupted = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    video_sft_loss(model, golden.sample(), generator())[0].backward()
    assert len(interrupted) == 60
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            assert torch.equal(parameter.grad, interrupted[name]), name


def test_without_adapters_a_fixed_expert_is_its_own_pretrained_state():
    model = golden.model()
    with pytest.raises(ValueError, match="trains without adapters"), frozen_features(model):
        pass
    model.requires_grad_(False)
    expected = video_outputs(model)
    with frozen_features(model):
        assert equal(video_outputs(model), expected)


def test_merged_adapters_have_lost_the_pretrained_state():
    model = adapted()
    model.video_expert.blocks[0].self_attn.q.merge()
    with pytest.raises(ValueError, match="merged"), frozen_features(model):
        pass


@pytest.mark.parametrize("kind", ["native", "dict"])
def test_merged_weights_have_the_names_and_the_outputs_of_a_plain_model(kind):
    model = adapted()
    fresh = merged_state_dict(model)
    plain = golden.model().state_dict()
    assert fresh.keys() == plain.keys()
    assert all(torch.equal(fresh[name], value) for name, value in plain.items())
    scramble(model)
    if kind == "native":
        merged = golden.model()
        merged.load_state_dict(merged_state_dict(model))
    else:
        official = fake_official.FakeFastWAM(golden.model(), kind)
        names = official.state_dict().keys()
        state = merged_state_dict(fake_official.FakeFastWAM(model, kind))
        assert state.keys() == names
        official.load_state_dict(state)
        merged = adapt(official)
    for left, right in zip(video_outputs(merged), video_outputs(model), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-5)


def test_5b_on_the_meta_device():
    with torch.device("meta"):
        model = WAM(fastwam_5b())
    inject_lora(model, generator=generator())
    chosen = select_trainable(model)
    config = model.config.video_dit_config
    assert chosen.counts == {
        "lora": lora_parameters(config, 16),
        "action_expert": 1_020_886_023,
        "proprio_encoder": 36_864,
    }
    assert chosen.counts["lora"] == 30 * (2 * 4 * 16 * 6144 + 2 * 16 * (3072 + 14336))
    assert chosen.frozen == 4_999_787_712
    assert all(p.is_meta for p in model.parameters())
    assert "40,304,640 in 600 tensors" in str(chosen)


def test_float32_adapters_on_bfloat16_weights():
    model = golden.model().to(torch.bfloat16)
    before = video_outputs(model)
    inject_lora(model, generator=generator(), rank=2, dtype=torch.float32)
    select_trainable(model)
    dtypes = {"lora_" in name: p.dtype for name, p in model.video_expert.named_parameters()}
    assert dtypes == {True: torch.float32, False: torch.bfloat16}
    train(model)
    assert not equal(video_outputs(model), before)
    with frozen_features(model):
        assert equal(video_outputs(model), before)


def test_exactly_what_should_train_is_named():
    model = adapted()
    chosen = trainable_set(model)
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    assert {name for names in chosen.names.values() for name in names} == trained
    assert chosen.names["proprio_encoder"] == ("proprio_encoder.weight", "proprio_encoder.bias")
    assert all("lora_" in name for name in chosen.names["lora"])
    assert all(".mixtures.action." in name for name in chosen.names["action_expert"])
    assert chosen.trained + chosen.frozen == sum(p.numel() for p in model.parameters())
    for parts in (("lora",), ("action_expert", "proprio_encoder"), ("lora", "action_expert")):
        assert tuple(select_trainable(model, parts).names) == parts


def test_what_trains_and_should_not_is_an_error_by_name():
    model = adapted()
    model.video_expert.head.head.bias.requires_grad_(True)
    with pytest.raises(ValueError, match=r"1 parameters train and must not.*head\.head\.bias"):
        trainable_set(model)
    select_trainable(model)
    model.action_expert.head.bias.requires_grad_(False)
    with pytest.raises(ValueError, match=r"1 parameters do not train.*action\.head\.bias"):
        trainable_set(model)
    policy = nn.ModuleDict({"wam": adapted(), "vae": nn.Linear(2, 2)})
    with pytest.raises(ValueError, match=r"2 parameters train and must not.*vae\.weight"):
        trainable_set(policy["wam"], root=policy)
    chosen = select_trainable(policy["wam"], root=policy)
    assert chosen.names["lora"][0].startswith("wam.mot.mixtures.video.blocks.0.")
    with pytest.raises(ValueError, match="unknown parts"):
        trainable_set(model, ("vae",))
    with pytest.raises(ValueError, match="call inject_lora"):
        select_trainable(golden.model())


def test_impossible_adapters_are_refused():
    with pytest.raises(ValueError, match="adapters already"):
        inject_lora(adapted(), generator=generator())
    with pytest.raises(ValueError, match="at least 1"):
        inject_lora(golden.model(), generator=generator(), rank=0)
    model = golden.model()
    model.video_expert.blocks[0].cross_attn.value = model.video_expert.blocks[0].cross_attn.v
    del model.video_expert.blocks[0].cross_attn.v
    with pytest.raises(ValueError, match="29 layers .* 30 were expected"):
        inject_lora(model, generator=generator())


@pytest.mark.parametrize("variant", ["uncond", "idm"])
def test_ppo_reaches_the_action_expert_and_the_proprio_encoder_alone(variant):
    model = adapted(variant=variant)
    scramble(model)
    video = golden.inputs()["latents"] if variant == "idm" else None
    state = golden.observation(video=video)
    sample = sample_chain(
        model, state, 4, 0.5, generator(), horizon=model.action_horizon, action_dim=7
    )
    new = logprob_chain(model, state, sample.chain, sample.k_star, 0.5).squeeze(1)
    loss, _ = ppo_flow_loss(new, sample.logp_old.squeeze(1), torch.tensor([1.0, -0.5]), 0.2, 0.2)
    loss.backward()
    reached, untouched = gradients(model)
    assert reached == {
        name
        for name in reached | untouched
        if name.startswith(("mot.mixtures.action.", "proprio_encoder."))
    }


@pytest.mark.parametrize("variant", ["uncond", "joint", "idm", "optional_idm"])
def test_video_sft_reaches_the_adapters_alone(variant):
    model = adapted(variant=variant)
    scramble(model)
    loss, metrics = video_sft_loss(model, golden.sample(padded=True), generator())
    expected, _ = model.training_loss(golden.sample(padded=True), generator(), 1.0, 0.0)
    assert torch.equal(loss, expected)
    assert metrics.keys() == {"video/sft_loss", "video/sft_video_loss"}
    loss.backward()
    reached, untouched = gradients(model)
    assert reached == {name for name in reached | untouched if "lora_" in name}
    assert all(p.grad is None for n, p in model.named_parameters() if n in untouched)


def test_video_sft_with_an_action_weight_also_reaches_the_action_expert():
    model = adapted()
    scramble(model)
    loss, metrics = video_sft_loss(model, golden.sample(), generator(), lambda_action=0.5)
    total = metrics["video/sft_video_loss"] + 0.5 * metrics["video/sft_action_loss"]
    torch.testing.assert_close(loss.detach(), total)
    loss.backward()
    reached, untouched = gradients(model)
    assert all(name in reached for name in reached | untouched if "lora_" in name)
    assert any(name.startswith("mot.mixtures.action.") for name in reached)
    assert not any(name.startswith("proprio_encoder.") for name in reached)
    with pytest.raises(ValueError, match="must not be negative"):
        video_sft_loss(model, golden.sample(), generator(), lambda_action=-1.0)


@pytest.mark.parametrize("kind", ["dict", "tensor"])
def test_video_sft_of_an_official_object_has_the_same_gradients(kind):
    official, native = native_or_official(kind), adapted()
    for model in (official, native):
        scramble(model)
    video_sft_loss(official, golden.sample(), generator())[0].backward()
    torch.manual_seed(int(torch.randint(2**62, (), generator=generator())))
    video_sft_loss(native, golden.sample(), None)[0].backward()
    pairs = zip(
        official.video_expert.named_parameters(),
        native.video_expert.parameters(),
        strict=True,
    )
    for (name, ours), theirs in pairs:
        if "lora_" in name:
            torch.testing.assert_close(ours.grad, theirs.grad)
    assert all(p.grad is None for p in official.proprio_encoder.parameters())


@pytest.mark.parametrize("variant", ["uncond", "idm"])
@pytest.mark.parametrize("kind", ["native", "dict", "tensor"])
def test_feature_kl_starts_at_zero_with_zero_gradient_and_then_reaches_the_adapters_alone(
    kind, variant
):
    model, state = adapted(variant=variant), golden.observation(video=golden.inputs()["latents"])
    if kind != "native":
        classes = {"uncond": fake_official.FakeFastWAM, "idm": fake_official.FakeFastWAMIDM}
        model = adapt(classes[variant](model, kind))
    live, frozen = live_and_frozen_features(model, state)
    assert len(live) == len(frozen) == 3
    assert not any(tensor.requires_grad for pair in frozen for tensor in pair)
    statistics = FeatureStatistics.calibrate(feature_moments(frozen))
    loss = feature_kl_loss(live, frozen, statistics).loss
    loss.backward()
    assert loss.item() == 0.0
    assert not gradients(model)[0]

    scramble(model)
    live, frozen = live_and_frozen_features(model, state)
    result = feature_kl_loss(live, frozen, statistics)
    result.loss.backward()
    reached, untouched = gradients(model)
    # nothing of the last layer but its keys and values is read
    last = ("blocks.2.self_attn.q", "blocks.2.self_attn.o", "blocks.2.cross_attn", "blocks.2.ffn")
    expected = {
        name
        for name in reached | untouched
        if "lora_" in name and not any(part in name for part in last)
    }
    assert reached == expected
    assert bool((result.per_layer > 0).all())


def test_features_are_those_of_the_same_context_whatever_the_proprio_encoder_learned():
    model, state = adapted(), golden.observation()
    nn.init.normal_(model.proprio_encoder.weight, generator=generator())
    live, frozen = live_and_frozen_features(model, state)
    assert equal([t for pair in live for t in pair], [t for pair in frozen for t in pair])
    cache = model.prefill(state)
    assert equal([key for key, _ in live], cache.video_keys)
    assert equal([value for _, value in live], cache.video_values)


def test_recomputed_activations_give_the_same_gradient():
    results = []
    for recompute in (False, True):
        config = golden.config()
        experts = {
            name: dataclasses.replace(getattr(config, name), use_gradient_checkpointing=recompute)
            for name in ("video_dit_config", "action_dit_config")
        }
        model = adapted(**experts)
        scramble(model)
        live, frozen = live_and_frozen_features(model, golden.observation())
        statistics = FeatureStatistics.calibrate(feature_moments(frozen))
        loss = feature_kl_loss(live, frozen, statistics).loss
        loss = loss + video_sft_loss(model, golden.sample(), generator())[0]
        loss.backward()
        results.append([p.grad for p in model.parameters() if p.grad is not None])
    for plain, recomputed in zip(*results, strict=True):
        torch.testing.assert_close(recomputed, plain)
