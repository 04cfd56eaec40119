"""What a checkpoint holds, and gradient clipping, on a plain model in one process."""

import pytest
import torch

from rlinf_wamrl.checkpoint import read_learner, read_trained_weights, write_learner
from rlinf_wamrl.workers.gradients import clip_gradients
from rlinf_wamrl.workers.training_state import load_training_state, training_state


def halves(seed):
    torch.manual_seed(seed)
    model = torch.nn.ModuleDict({n: torch.nn.Linear(3, 3) for n in ("frozen", "action", "video")})
    model["frozen"].requires_grad_(False)
    optimizers = {
        name: torch.optim.AdamW(model[name].parameters(), lr=0.1) for name in ("action", "video")
    }
    return model, optimizers


def step(model, optimizers, seed):
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(seed))
    for name, optimizer in optimizers.items():
        optimizer.zero_grad()
        model[name](x).square().sum().backward()
        optimizer.step()


TRAINED = [f"{part}.{kind}" for part in ("action", "video") for kind in ("weight", "bias")]


def test_a_restored_model_takes_the_same_next_steps(tmp_path):
    model, optimizers = halves(0)
    step(model, optimizers, 1)
    write_learner(tmp_path, training_state(model, optimizers, TRAINED))
    step(model, optimizers, 2)
    again, others = halves(9)
    again["frozen"].load_state_dict(model["frozen"].state_dict())
    step(again, others, 5)  # optimisers must have a state to be replaced
    load_training_state(again, others, TRAINED, read_learner(tmp_path), "here")
    step(again, others, 2)
    for name, value in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name


def test_the_frozen_base_is_never_written(tmp_path):
    model, optimizers = halves(0)
    step(model, optimizers, 1)
    write_learner(tmp_path, training_state(model, optimizers, TRAINED))
    assert sorted(read_learner(tmp_path)["model"]) == sorted(TRAINED)


def test_a_checkpoint_of_another_set_up_is_refused_in_words():
    model, optimizers = halves(0)
    state = training_state(model, optimizers, TRAINED)
    with pytest.raises(ValueError, match="other trainable parameters; 2 differ"):
        load_training_state(model, optimizers, TRAINED[:2], state, "here")
    with pytest.raises(ValueError, match=r"other optimisers; 1 differ.*\['video'\]"):
        load_training_state(model, {"action": optimizers["action"]}, TRAINED, state, "here")


def test_damaged_and_missing_files_are_said_in_words(tmp_path):
    with pytest.raises(FileNotFoundError, match="no learner checkpoint"):
        read_learner(tmp_path)
    with pytest.raises(FileNotFoundError, match="learner_rank_1.pt"):
        read_learner(tmp_path, rank=1)
    (tmp_path / "learner.pt").write_bytes(b"half a file")
    with pytest.raises(ValueError, match="is damaged"):
        read_learner(tmp_path)


def test_trained_weights_are_read_from_a_global_step_folder(tmp_path):
    (tmp_path / "actor").mkdir()
    write_learner(tmp_path / "actor", {"model": {"w": torch.ones(2)}})
    assert read_trained_weights(tmp_path)["w"].tolist() == [1.0, 1.0]


@pytest.mark.parametrize(("bound", "scale"), [(1.0, 1 / 5), (10.0, 1.0)])
def test_gradients_are_scaled_to_the_bound_and_the_norm_before_is_returned(bound, scale):
    one, two, untouched = (torch.nn.Parameter(torch.zeros(1)) for _ in range(3))
    one.grad, two.grad = torch.tensor([3.0]), torch.tensor([4.0])
    norm = clip_gradients(torch.nn.Identity(), [one, two, untouched], bound)
    assert norm == pytest.approx(5.0)
    torch.testing.assert_close(one.grad, torch.tensor([3.0 * scale]), rtol=1e-5, atol=0)
    assert untouched.grad is None
