"""Text encoders: fixed vectors, the Wan padding convention, and the cache on disk."""

import hashlib
import multiprocessing
import weakref

import numpy as np
import pytest
import torch
from tiny_parts import LIFT, write_umt5
from transformers import UMT5EncoderModel

from rlinf_wamrl.wam.text import (
    FASTWAM_PROMPT,
    HashedWordEncoder,
    TextEncoder,
    build_text_encoder,
    format_prompt,
)
from rlinf_wamrl.wam.text_cache import CachedTextEncoder
from rlinf_wamrl.wam.text_umt5 import UMT5Encoder


def test_a_word_is_its_hash_plus_its_position():
    encoder = HashedWordEncoder(dim=8, length=6, seed=3)
    embeddings, mask = encoder.encode([LIFT])
    raw = np.frombuffer(hashlib.shake_256(b"3:red").digest(32), dtype="<i4").astype(np.float64)
    word = torch.from_numpy((raw + 0.5) / 2**31 * 3**0.5)
    angles = 2 * 10000.0 ** (-torch.arange(4, dtype=torch.float64) / 4)
    expected = (word + torch.cat([angles.cos(), angles.sin()])).float()
    torch.testing.assert_close(embeddings[0, 2], expected)
    assert torch.equal(embeddings[0, 4:], torch.zeros(2, 8))
    assert mask.all()
    assert mask.shape == (1, 6)


def test_words_have_unit_variance_and_are_nearly_orthogonal():
    encoder = HashedWordEncoder(dim=256, length=1)
    words = torch.cat([encoder.encode([f"word{i}"])[0][0] for i in range(200)])
    position = torch.cat([torch.ones(128), torch.zeros(128)])
    words = words - position
    assert words.mean().abs() < 0.02
    assert words.var() == pytest.approx(1.0, abs=0.02)
    cosine = torch.corrcoef(words).fill_diagonal_(0).abs().max()
    assert cosine < 0.35


def test_case_and_punctuation_do_not_matter_and_batches_equal_singles():
    encoder = HashedWordEncoder(dim=16, length=12)
    assert torch.equal(encoder.encode(["Lift the red cube."])[0], encoder.encode([LIFT])[0])
    other = "push the red cube into the green zone"
    both = encoder.encode([LIFT, other])[0]
    assert torch.equal(both[1], encoder.encode([other])[0][0])
    assert isinstance(encoder, TextEncoder)


def test_hashed_encoder_refuses_in_words():
    encoder = HashedWordEncoder(dim=16, length=3)
    with pytest.raises(ValueError, match=r"'lift the red cube' has 4 words.*at most 3"):
        encoder.encode([LIFT])
    with pytest.raises(ValueError, match="no words"):
        encoder.encode(["  . "])
    with pytest.raises(ValueError, match="dim must be even"):
        HashedWordEncoder(dim=7, length=3)


def test_prompt_template():
    assert format_prompt(FASTWAM_PROMPT, " lift  the cube ").endswith("instruction: lift the cube")
    with pytest.raises(ValueError, match=r"lacks the place holder \{task\}"):
        format_prompt("do it", LIFT)
    with pytest.raises(ValueError, match="empty"):
        format_prompt("{task}", " ")


@pytest.fixture(scope="module")
def umt5_folder(tmp_path_factory):
    return write_umt5(tmp_path_factory.mktemp("wan"))


def test_umt5_pads_are_zero_and_visible(umt5_folder):
    encoder = UMT5Encoder.from_folder(umt5_folder, length=24, dtype=torch.float32)
    embeddings, mask = encoder.encode([LIFT, "lift cube"])
    tokens = len(FASTWAM_PROMPT.split()) - 1 + 4 + 1
    assert embeddings.shape == (2, 24, 16) == (2, encoder.length, encoder.dim)
    assert mask.all()
    assert mask.dtype == torch.bool
    assert embeddings[0, tokens:].eq(0).all()
    assert embeddings[0, :tokens].ne(0).any(1).all()
    # Tokens do not see the pads: the embedding is that of the unpadded prompt.
    ids = encoder.tokenizer(format_prompt(FASTWAM_PROMPT, LIFT), return_tensors="pt").input_ids
    plain = encoder.model(input_ids=ids).last_hidden_state[0]
    torch.testing.assert_close(embeddings[0, :tokens], plain, rtol=1e-4, atol=1e-5)
    assert not any(p.requires_grad for p in encoder.model.parameters())


def test_umt5_refuses_in_words(umt5_folder, tmp_path):
    encoder = UMT5Encoder.from_folder(umt5_folder, length=8)
    with pytest.raises(ValueError, match="at most 8; shorten the instruction"):
        encoder.encode([LIFT])
    with pytest.raises(FileNotFoundError, match="no UMT5 encoder at"):
        UMT5Encoder.from_folder(tmp_path)


def test_cache_loads_the_encoder_once_and_frees_it(umt5_folder, tmp_path, monkeypatch):
    expected = UMT5Encoder.from_folder(umt5_folder, length=24).encode([LIFT, "lift cube"])[0]
    loads = []
    load = UMT5EncoderModel.from_pretrained

    def counted(*arguments, **settings):
        model = load(*arguments, **settings)
        loads.append(weakref.ref(model))
        return model

    monkeypatch.setattr(UMT5EncoderModel, "from_pretrained", counted)

    def cached():
        return build_text_encoder(
            "umt5", model_folder=umt5_folder, cache_folder=tmp_path, length=24
        )

    encoder = cached()
    assert loads == []
    assert (encoder.length, encoder.dim) == (24, 16)
    embeddings, mask = encoder.encode([LIFT, "lift cube", LIFT])
    assert embeddings.dtype == torch.bfloat16
    assert torch.equal(embeddings[:2], expected)
    assert torch.equal(embeddings[2], embeddings[0])
    assert mask.all()
    assert [reference() for reference in loads] == [None]
    assert torch.equal(cached().encode(["lift cube"])[0], expected[1:])
    assert len(loads) == 1
    assert not list(tmp_path.rglob("*.tmp"))


def test_build_text_encoder():
    encoder = HashedWordEncoder(dim=8, length=6, seed=3)
    assert build_text_encoder(**encoder.settings).identity == encoder.identity
    with pytest.raises(ValueError, match="unknown kind of text encoder 'bert'"):
        build_text_encoder("bert")
    with pytest.raises(ValueError, match="text encoder 'hashed_words': .*width"):
        build_text_encoder("hashed_words", width=3)


def test_cache_keys_tell_encoders_and_lengths_apart(tmp_path):
    def cached(length, seed):
        encoder = HashedWordEncoder(dim=4, length=length, seed=seed)
        return CachedTextEncoder(
            tmp_path, lambda: encoder, identity=encoder.identity, length=length, dim=4
        )

    values = [cached(length, seed).encode([LIFT])[0] for length, seed in ((4, 0), (5, 0), (4, 1))]
    assert len(list(tmp_path.rglob("*.safetensors"))) == 3
    assert not torch.equal(values[0], values[2])


def test_cache_errors_name_the_file(tmp_path):
    encoder = HashedWordEncoder(dim=4, length=4)
    wrong = CachedTextEncoder(tmp_path, lambda: encoder, identity="other", length=4, dim=4)
    with pytest.raises(ValueError, match="declared for encoder 'other'"):
        wrong.encode([LIFT])
    cached = CachedTextEncoder(
        tmp_path, lambda: encoder, identity=encoder.identity, length=4, dim=4
    )
    cached.encode([LIFT])
    (path,) = tmp_path.rglob("*.safetensors")
    path.write_bytes(path.read_bytes()[:20])
    with pytest.raises(ValueError, match=r"safetensors is unreadable .* delete the file"):
        cached.encode([LIFT])


def _encode_many(folder):
    def build():
        with (folder / "builds").open("a") as log:
            log.write("built\n")
        encoder = HashedWordEncoder(dim=4, length=4)
        encoder.identity = "x"
        return encoder

    cached = CachedTextEncoder(folder, build, identity="x", length=4, dim=4)
    texts = [f"word {i}" for i in range(20)]
    return cached.encode(texts)[0].sum().item()


def test_one_of_several_processes_fills_the_cache_for_all(tmp_path):
    with multiprocessing.get_context("fork").Pool(4) as pool:
        sums = pool.map(_encode_many, [tmp_path] * 8)
    assert len(set(sums)) == 1
    assert (tmp_path / "builds").read_text() == "built\n"
    assert len(list(tmp_path.rglob("*.safetensors"))) == 20
    assert not list(tmp_path.rglob("*.tmp"))
