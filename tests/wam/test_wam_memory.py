"""The memory plan against the model itself: on the meta device, and by counting what is kept."""

import dataclasses
import re

import pytest
import torch
from live_bytes import LiveBytes
from peft import LoraConfig, inject_adapter_in_model
from wan22_vae_keys import real_keys

from rlinf_wamrl.wam.config import (
    ActionExpertConfig,
    VideoExpertConfig,
    WAMConfig,
    fastwam_5b,
)
from rlinf_wamrl.wam.memory import (
    GIB,
    LEARNER_PHASES,
    PHASES,
    VAE_ELEMENTS_PER_PIXEL,
    MemorySetup,
    action_parameters,
    checkpoint_bytes,
    lora_parameters,
    memory_table,
    plan_memory,
    proprio_parameters,
    video_parameters,
)
from rlinf_wamrl.wam.state import WAMState
from rlinf_wamrl.wam.vae_wan22 import Wan22VAE, build_wan22_model
from rlinf_wamrl.wam.wam import WAM

LORA = r"blocks\.\d+\.((self|cross)_attn\.[qkvo]|ffn\.[02])"


def small_config(layers=4, checkpointing=False, **changes):
    """Wide enough for the terms that the plan leaves out to be small."""
    shared = {
        "num_heads": 4,
        "attn_head_dim": 24,
        "num_layers": layers,
        "text_dim": 64,
        "freq_dim": 32,
        "use_gradient_checkpointing": checkpointing,
    }
    return WAMConfig(
        video_dit_config=VideoExpertConfig(hidden_dim=120, ffn_dim=400, **shared),
        action_dit_config=ActionExpertConfig(hidden_dim=48, ffn_dim=192, **shared),
        proprio_dim=8,
        **changes,
    )


def item(plan, phase, name):
    (found,) = [i.bytes for i in plan.items if i.phase == phase and i.name == name]
    return found


def count(module):
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize(
    "config",
    [fastwam_5b(), small_config(), dataclasses.replace(small_config(), proprio_dim=None)],
    ids=["5b", "small", "without proprio"],
)
def test_parameter_counts_equal_the_model_on_the_meta_device(config):
    with torch.device("meta"):
        model = WAM(config)
    assert video_parameters(config.video_dit_config) == count(model.video_expert)
    assert action_parameters(config.action_dit_config) == count(model.action_expert)
    proprio = 0 if model.proprio_encoder is None else count(model.proprio_encoder)
    assert proprio_parameters(config) == proprio
    inject_adapter_in_model(
        LoraConfig(r=16, target_modules=LORA), model.video_expert, low_cpu_mem_usage=True
    )
    adapters = [p for name, p in model.video_expert.named_parameters() if "lora_" in name]
    assert lora_parameters(config.video_dit_config, 16) == sum(p.numel() for p in adapters)


def test_action_conditioned_parameters():
    config = small_config().video_dit_config
    config = dataclasses.replace(config, action_conditioned=True)
    with torch.device("meta"):
        model = WAM(dataclasses.replace(small_config(), video_dit_config=config))
    assert video_parameters(config) == count(model.video_expert)


def kept_bytes(model, function):
    """Bytes that a forward pass keeps for its backward pass, weights aside."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        function()
    return sum(size for size, _ in kept.values())


SETUP = MemorySetup(text_length=20, lora_rank=4)
BATCH = 3


def observation(frames=1):
    return WAMState(
        first_frame=torch.randn(BATCH, 48, 1, 14, 28),
        context=torch.randn(BATCH, 20, 64),
        context_mask=torch.ones(BATCH, 20, dtype=torch.bool),
        proprio=torch.randn(BATCH, 8),
        video=torch.randn(BATCH, 48, 3, 14, 28),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("variant", ["uncond", "idm"])
def test_caches_and_kept_activations_of_the_action_expert(dtype, variant):
    config = small_config(variant=variant)
    model = WAM(config).to(dtype)
    model.video_expert.requires_grad_(False)
    setup = dataclasses.replace(SETUP, weight_dtype=dtype, micro_batch=BATCH, rollout_batch=BATCH)
    plan = plan_memory(config, setup)

    cache = model.prefill(observation())
    for name, tensors in (
        ("K/V cache of the video", cache.video_keys + cache.video_values),
        ("K/V cache of the context", cache.context_keys + cache.context_values),
    ):
        assert item(plan, "rollout", name) == sum(t.nbytes for t in tensors)

    def velocity():
        cache = model.prefill(observation())
        model.action_velocity(torch.randn(BATCH, 32, 7), torch.full((BATCH,), 500.0), cache)

    measured = kept_bytes(model, velocity)
    assert item(plan, "PPO step", "activations of the action expert") == pytest.approx(
        measured, rel=0.07
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kept_activations_of_the_video_expert_with_adapters(dtype):
    config = small_config()
    model = WAM(config)
    inject_adapter_in_model(LoraConfig(r=4, target_modules=LORA), model.video_expert)
    model.to(dtype)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
    setup = dataclasses.replace(SETUP, weight_dtype=dtype, sft_micro_batch=BATCH)
    state = observation()
    sample = {
        "video_latents": state.video,
        "context": state.context,
        "context_mask": state.context_mask,
        "action": torch.randn(BATCH, 32, 7),
        "proprio": state.proprio[:, None],
    }

    def loss():
        model.training_loss(sample, torch.Generator().manual_seed(0), lambda_action=0)

    measured = kept_bytes(model, loss)
    plan = plan_memory(config, setup)
    assert item(plan, "video SFT step", "activations of the video expert") == pytest.approx(
        measured, rel=0.07
    )


def test_gradient_checkpointing_keeps_little_more_than_layer_inputs():
    def planned(layers, checkpointing):
        plan = plan_memory(small_config(layers, checkpointing), SETUP)
        return item(plan, "video SFT step", "activations of the video expert")

    per_layer = planned(5, True) - planned(4, True)
    tokens = 2 * 3 * 98
    assert per_layer == tokens * 120 * 2
    assert planned(4, True) < planned(4, False) / 3


def test_autoencoder_activations_equal_a_run_on_the_meta_device():
    with torch.device("meta"):
        vae = Wan22VAE(build_wan22_model(real_keys())).to(torch.bfloat16)
        image = torch.empty(2, 3, 1, 224, 448, dtype=torch.bfloat16)
    runs = {
        "encode_image": lambda: vae.encode(image),
        "decode_video": lambda: vae.decode(torch.empty(2, 48, 3, 14, 28, device="meta")),
    }
    for name, run in runs.items():
        with torch.no_grad(), LiveBytes() as live:
            run()
        elements = live.peak / 2 / (2 * 224 * 448)
        assert VAE_ELEMENTS_PER_PIXEL[name] == pytest.approx(elements, rel=0.02), name


def test_the_5b_plan():
    one = plan_memory(fastwam_5b(), MemorySetup())
    assert item(one, "always", "video expert, frozen") == 4_999_787_712 * 2
    policy = 1_020_886_023 + 36_864
    assert item(one, "always", "action expert and proprio encoder") == policy * 4
    adapters = 40_304_640
    assert item(one, "always", "AdamW moments") == 2 * 4 * (policy + adapters)
    assert item(one, "PPO step", "gradients of action expert and proprio") == policy * (2 + 4)
    # 98 tokens of the first frame, 30 layers, keys and values of 3072 in bf16.
    assert item(one, "rollout", "K/V cache of the video") == 32 * 30 * 2 * 98 * 3072 * 2
    assert one.peak < 80e9
    assert checkpoint_bytes(fastwam_5b(), MemorySetup()) == 3 * 4 * (policy + adapters)


def test_sharding_divides_what_is_stored_but_gathers_all_weights():
    config = fastwam_5b()
    one = plan_memory(config, MemorySetup())
    eight = plan_memory(config, MemorySetup(num_gpus=8))
    for name in ("video expert, frozen", "AdamW moments", "LoRA adapters", "autoencoder"):
        assert item(eight, "always", name) == item(one, "always", name) // 8
    everything = 6_020_710_599 + 40_304_640 + 704_688_668
    for phase in LEARNER_PHASES:
        for plan in (one, eight):
            assert item(plan, phase, "weights as the arithmetic reads them") == 2 * everything
        assert item(eight, phase, "buffer they were gathered in") == 2 * everything
    policy = 1_020_886_023 + 36_864
    assert (
        item(eight, "PPO step", "gradients of action expert and proprio")
        == 2 * policy + 4 * policy // 8
    )
    assert eight.peak < one.peak


def test_the_rollout_copy_can_leave():
    config = fastwam_5b()
    stays, leaves = (
        plan_memory(config, MemorySetup(offload_rollout=offload)) for offload in (False, True)
    )
    copy = 2 * (6_020_710_599 + 40_304_640 + 704_688_668)
    assert item(stays, "always", "rollout worker's copy of the model") == copy
    assert leaves.total("rollout") == stays.total("rollout")
    assert leaves.total("PPO step") == stays.total("PPO step") - copy


def test_totals_and_table_agree():
    config = fastwam_5b()
    setups = {"1 GPU": MemorySetup(), "8 GPUs": MemorySetup(num_gpus=8)}
    table = memory_table(config, setups)
    plans = [plan_memory(config, setup) for setup in setups.values()]
    lines = table.splitlines()
    assert len({line.count("|") for line in lines}) == 1
    totals = [re.findall(r"\*\*([\d.]+)\*\*", line) for line in lines if "**total" in line]
    assert totals == [[f"{plan.total(phase) / GIB:.2f}" for plan in plans] for phase in PHASES]
    assert f"{plans[0].peak / GIB:.2f}, fits" in table
    tight = memory_table(config, setups, budget=10 * GIB)
    assert "too much" in tight
