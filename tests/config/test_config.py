"""Configuration: what is accepted, what is refused, and in which words."""

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rlinf_wamrl.config import schema, schema_env, schema_rl
from rlinf_wamrl.config.compose import compose_run, compose_typed, shipped_config
from rlinf_wamrl.config.errors import ConfigError
from rlinf_wamrl.config.placement import world_size
from rlinf_wamrl.pretrain import config as pretrain_config

ABLATIONS = Path(__file__).parents[2] / "configs" / "ablation"
EXAMPLE = Path(__file__).parents[2] / "examples" / "libero_wamrl.yaml"


BESIDE = {"RL.ignore_last=true": ["RL.window=[3,4]"], "RL.lambda_step=1": ["RL.lambda_rec=0"]}
"""What makes a value impossible that is possible by itself."""


def compose(*overrides):
    return compose_run(EXAMPLE, overrides)


def test_the_example_composes_and_is_complete():
    run = compose()
    assert run.env.train.task_suite_name == "wamrl_demo"
    assert run.algorithm.group_size == run.RL.group_size == run.env.train.group_size
    assert run.actor.optim.lr == run.RL.action_lr
    assert run.actor.model.sampling.denoising_steps == run.RL.denoising_steps


def test_training_and_evaluation_use_disjoint_initial_states():
    run = compose()
    train, held_out = run.env.train.init_state_range, run.env.eval.init_state_range
    assert train[1] <= held_out[0]
    assert held_out[1] - held_out[0] >= 120


def test_rollout_length_and_states_follow_from_the_tasks():
    run = compose("env.train.task_ids=[0,3]")
    assert run.env.train.max_steps_per_rollout_epoch == 248
    assert list(run.env.train.init_state_range) == [0, 80]
    assert compose("env.train.max_episode_steps=30").env.eval.max_steps_per_rollout_epoch == 32


def test_overrides_reach_every_section_that_shares_a_value():
    run = compose("RL.group_size=4", "RL.denoising_steps=7", "env.train.image_size=96")
    assert run.algorithm.group_size == run.env.train.group_size == 4
    assert run.actor.model.sampling.denoising_steps == 7
    assert run.env.eval.image_size == 96


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("RL.group_sise=4", r"unknown key 'RL.group_sise'; did you mean RL.group_size\?"),
        ("runner.max_step=4", r"did you mean runner.max_steps\?"),
        ("nonsense.key=1", "unknown key 'nonsense'"),
        ("runner.max_steps=many", "runner.max_steps.*'many'.*[Ii]nteger"),
        ("RL.noise_level=0", "RL.noise_level must be positive, got 0"),
        ("RL.group_size=1", "RL.group_size must be at least 2"),
        ("RL.group_size=3", "env.train.group_size = 3 must divide the 32 environments"),
        ("env.train.total_num_envs=12", "must divide the 12 environments"),
        ("env.train.max_steps_per_rollout_epoch=90", "multiple of .*num_action_chunks = 8; use 88"),
        ("env.train.max_steps_per_rollout_epoch=80", "cuts episodes of task 0 .* take 88 steps"),
        ("env.train.num_future_frames=3", "do not fit into a chunk of 8 actions"),
        ("env.train.init_state_range=[80,0]", r"env.train.init_state_range=\[80, 0\]: give"),
        ("env.train.render_quality=nice", "must be one of stock, fast, light, got 'nice'"),
        ("env.train.auto_reset=true", "env.train.auto_reset must be False"),
        ("env.train.task_suite_name=libero_nine", "env.train.task_suite_name=.libero_nine"),
        ("env.train.task_ids=[9]", r"env.train.task_ids=\[9\].*lift the red cube"),
        ("actor.global_batch_size=48", "multiple of actor.micro_batch_size x actor ranks = 32 x 1"),
        ("actor.model.precision=fp8", "must be one of fp32, bf16, got 'fp8'"),
        ("RL.wam_cache=keep", "RL.wam_cache must be one of store, recompute, none, got 'keep'"),
        ("actor.model.model_path=nowhere", "'nowhere' is neither a folder nor a checkpoint"),
        ("RL.stochastic_steps=all", "needs RL.stochastic_steps: window"),
        ("RL.window=[]", "RL.window must list ascending step indices within 0..4"),
        ("RL.noise_modes=9", "RL.noise_modes must be within 1..8 .*, got 9"),
        ("RL.noise_dims=[7]", r"RL.noise_dims must be distinct and within 0..6, got \[7\]"),
        ("RL.lambda_rec=-1", "RL.lambda_rec must not be negative"),
        ("RL.reconstruction.similarity=dino", "set RL.reconstruction.encoder_path"),
        (
            "RL.reconstruction.similarity=ssim",
            "one of pixel_mse, .*, or module:function, got 'ssim'",
        ),
        ("RL.reconstruction.similarity=no.such:f", "there is no module 'no.such' to import"),
        ("env.train.action_video_freq_ratio=3", "RL.video_sft needs pictures at even distances"),
        ("RL.dual_clip=1", "RL.dual_clip must be above 1"),
        ("RL.degenerate=skip", "RL.degenerate must be one of drop, rec_only, keep"),
        ("RL.sde=ddpm", "RL.sde must be one of sde, cps"),
        ("runner.resume_dir=runs/x", "must be a folder named global_step_N"),
        ("runner.resume_dir=global_step_3", "does not exist"),
        ("rollout.pipeline_stage_num=3", "multiple of env ranks x pipeline stages = 1 x 3"),
        ("algorithm.staleness_threshold=2", "staleness_threshold must be one of 0, 1, got 2"),
        ("RL.lambda_step=-0.5", "RL.lambda_step must not be negative, got -0.5"),
        ("RL.video_sft.kl_decay=3", r"kl_decay must be within \[0, 1\), got 3"),
        ("actor.optim.adam_beta1=7", r"adam_beta1 must be within \[0, 1\), got 7"),
        ("algorithm.gamma=0.9", "algorithm.gamma must be 1.0 .* got 0.9"),
        ("env.train.ignore_terminations=true", "env.train.ignore_terminations must be False"),
        ("actor.fsdp_config.gradient_checkpointing=true", "gradient_checkpointing must be False"),
        ("RL.ignore_last=true", "contradicts the last step, 4, in RL.window"),
        ("runner.ckpt_path=nowhere.pt", "runner.ckpt_path = 'nowhere.pt' is not a file"),
        ("runner.weight_sync_interval=3", "val_check_interval = 8 must be a multiple of .* = 3"),
        ("RL.video_sft.lora_alpha=0", "RL.video_sft.lora_alpha must be positive, got 0"),
        ("RL.task_choice.epsilon=-1", "RL.task_choice.epsilon must not be negative, got -1"),
        ("actor.seed=-1", "actor.seed must be within 0..2147483647, got -1"),
        (
            "env.train.seed=2147483648",
            "env.train.seed must be within 0..2147483647, got 2147483648",
        ),
        ("env.eval.video_cfg.fps=-3", "env.eval.video_cfg.fps must be positive, got -3"),
        ("env.train.is_eval=true", "env.train.is_eval must be False"),
        ("env.train.env_type=libero", "env.train.env_type must be 'wamrl_libero'"),
        ("RL.reconstruction.encoder_path=/none", "encoder_path = '/none' is not a folder"),
        ("RL.lambda_step=1", "RL.lambda_step = 1.0 needs RL.lambda_rec > 0"),
        ("RL.dual_clip=nan", "RL.dual_clip must be a finite number, got nan"),
        ("RL.reconstruction.max_batch=inf", "max_batch.*inf"),
        ("actor.model.sampling.noise_level=inf", "noise_level must be a finite number, got inf"),
        ("max_steps", "not of the form key=value"),
    ],
)
def test_impossible_values_name_key_value_and_remedy(override, words):
    with pytest.raises(ConfigError, match=words):
        compose(override, *BESIDE.get(override, ()))


def test_window_steps_must_lie_on_the_grid():
    with pytest.raises(ConfigError, match=r"within 0..4 .*got \[0, 5\]"):
        compose("RL.stochastic_steps=window", "RL.window=[0,5]")
    run = compose("RL.stochastic_steps=window", "RL.window=[0,1]")
    assert list(run.actor.model.sampling.window) == [0, 1]


def test_a_mean_over_actions_refuses_noise_along_few_directions():
    with pytest.raises(ConfigError, match="take sum with RL.noise_modes"):
        compose("RL.noise_modes=2", "RL.logprob_reduction=mean")
    run = compose("RL.noise_modes=2", "RL.noise_dims=[0,1,2]")
    assert list(run.actor.model.sampling.noise_dims) == [0, 1, 2]


def test_cps_refuses_a_stochastic_last_step():
    with pytest.raises(ConfigError, match="cps has no noise at the last step"):
        compose("RL.sde=cps", "RL.window=[0,4]")


def test_a_missing_file_and_broken_yaml_are_said_in_words(tmp_path):
    with pytest.raises(ConfigError, match="does not exist"):
        compose_run(tmp_path / "none.yaml")
    broken = tmp_path / "broken.yaml"
    broken.write_text("runner: [1, 2\n")
    with pytest.raises(ConfigError, match="broken.yaml"):
        compose_run(broken)


def test_a_key_without_default_must_be_set(tmp_path):
    file = tmp_path / "bare.yaml"
    file.write_text("defaults:\n  - rl/libero_wamrl\n  - _self_\n")
    with pytest.raises(ConfigError, match="must be set"):
        compose_run(file)


@pytest.mark.parametrize(
    ("placement", "ranks"), [("0", 1), ("0-3", 4), ("0:0-1", 2), ("0,1", 2), ("0-1,4-5", 4)]
)
def test_world_sizes_follow_the_placement(placement, ranks):
    run = compose()
    run.cluster.component_placement = {"actor": placement, "env,rollout": 0}
    assert world_size(run, "actor") == ranks
    assert world_size(run, "env") == 1


def test_an_unplaced_component_is_named():
    run = compose()
    run.cluster.component_placement = {"actor": 0}
    with pytest.raises(ConfigError, match="places no 'env'"):
        world_size(run, "env")


@pytest.mark.parametrize("name", sorted(path.stem for path in ABLATIONS.glob("*.yaml")))
def test_every_ablation_composes(name):
    run = compose(f"+ablation={name}")
    assert run.RL.train_actions or run.RL.video_sft.enabled


def test_ablations_switch_what_they_are_named_after():
    actor_only, no_kl = compose("+ablation=actor_only"), compose("+ablation=no_kl")
    assert not actor_only.RL.video_sft.enabled and actor_only.RL.lambda_rec == 0
    assert no_kl.RL.video_sft.enabled and no_kl.RL.video_sft.lambda_kl == 0
    assert not compose("+ablation=video_only").RL.train_actions
    assert compose("+ablation=action_loss").RL.video_sft.lambda_action == 1
    assert compose("+ablation=recon_only").RL.task_reward_weight == 0
    assert compose("+ablation=reward_flow").RL.reconstruction.similarity == "optical_flow"


def test_the_reward_needs_a_frame_that_the_model_imagines():
    frames = ["env.train.action_video_freq_ratio=2", "env.train.num_future_frames=1"]
    with pytest.raises(ConfigError, match="do not reach the first: take at least 2"):
        compose("+ablation=actor_recon", *frames)
    compose("+ablation=actor_only", *frames)


def test_rollouts_in_bf16_that_run_ahead_are_warned_of():
    overrides = ["rollout.model.precision=bf16", "RL.recompute_logprobs=false"]
    with pytest.warns(UserWarning, match="ratios do not start at 1"):
        compose("algorithm.staleness_threshold=1", *overrides)


def test_a_similarity_of_ones_own_is_named_by_where_it_is():
    run = compose("RL.reconstruction.similarity=json:loads")
    assert run.RL.reconstruction.similarity == "json:loads"


def test_few_episodes_per_iteration_are_warned_of(recwarn):
    compose("env.train.total_num_envs=32", "env.train.rollout_epoch=2")
    assert not [w for w in recwarn if "few to learn from" in str(w.message)]
    with pytest.warns(UserWarning, match="32 episodes in 4 groups per iteration .* take 64 or"):
        compose("env.train.total_num_envs=32", "env.train.rollout_epoch=1")


def test_nothing_to_train_is_refused():
    with pytest.raises(ConfigError, match="nothing would train"):
        compose("RL.train_actions=false", "RL.video_sft.enabled=false")


def test_the_pretraining_recipe_composes():
    recipe = compose_typed(
        shipped_config("pretrain/small"), ["train.steps=3"], pretrain_config.PretrainConfig
    )
    assert recipe.train.steps == 3 and recipe.model.action_horizon == 16


@pytest.mark.parametrize("module", [schema, schema_env, schema_rl, pretrain_config])
def test_every_configuration_field_has_a_line_that_explains_it(module):
    tree = ast.parse(inspect.getsource(module))
    bare = []
    for node in (item for item in tree.body if isinstance(item, ast.ClassDef)):
        for index, item in enumerate(node.body):
            if isinstance(item, ast.AnnAssign):
                after = node.body[index + 1] if index + 1 < len(node.body) else None
                if not (isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)):
                    bare.append(f"{node.name}.{item.target.id}")
    assert not bare


def test_help_and_validation_load_no_torch():
    code = (
        "import sys; from rlinf_wamrl.config.compose import compose_run;"
        f"compose_run({str(EXAMPLE)!r}); import rlinf_wamrl.cli;"
        "sys.exit('torch' in sys.modules or 'ray' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_stored_keys_and_values_need_one_precision():
    with pytest.raises(ConfigError, match=r"wam_cache: store .* = bf16 .* = fp32: make them equal"):
        compose("RL.wam_cache=store", "rollout.model.precision=bf16")
    assert compose("RL.wam_cache=store").actor.model.sampling.wam_cache == "store"


def test_cuda_graphs_without_a_cuda_device_are_refused():
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    with pytest.raises(ConfigError, match="rollout.enable_cuda_graph needs a CUDA device"):
        compose("rollout.enable_cuda_graph=true")


def test_learning_overlaps_with_the_next_round_or_with_the_next_iteration():
    with pytest.raises(ConfigError, match="staleness_threshold = 1 exclude each other"):
        compose("runner.use_training_pipeline=true", "algorithm.staleness_threshold=1")
