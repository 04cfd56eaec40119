"""Text encoders: an instruction becomes a fixed number of context tokens.

Wan's convention holds for every encoder here: embeddings are padded with zeros to a fixed length
and the pads stay visible (mask all True). So the length is part of what a model was trained with.
"""

from __future__ import annotations

import gc
import hashlib
import json
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from rlinf_wamrl.files import atomic_path

__all__ = [
    "FASTWAM_PROMPT",
    "TEXT_ENCODER_KINDS",
    "CachedTextEncoder",
    "HashedWordEncoder",
    "TextEncoder",
    "UMT5Encoder",
    "build_text_encoder",
    "format_prompt",
    "umt5_identity",
]

FASTWAM_PROMPT = (
    "A video recorded from a robot's point of view executing the following instruction: {task}"
)
"""The prompt that the released FastWAM checkpoints were trained with."""


@runtime_checkable
class TextEncoder(Protocol):
    """Turns instructions into context tokens.

    Attributes:
        length: tokens L of every encoding.
        dim: width D of a token.
        identity: a string that differs whenever the same instruction would be encoded otherwise.
    """

    length: int
    dim: int
    identity: str

    def encode(self, instructions: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Encode B ``instructions`` to embeddings [B,L,D] and a mask [B,L] bool, True = visible.

        Raises:
            ValueError: an instruction is empty or needs more than L tokens.
        """
        ...


def format_prompt(template: str, instruction: str) -> str:
    """Put ``instruction`` in place of ``{task}``, with white space collapsed.

    Raises:
        ValueError: the instruction is empty, or the template has no ``{task}``.
    """
    if "{task}" not in template:
        raise ValueError(f"prompt template {template!r} lacks the place holder {{task}}")
    words = instruction.split()
    if not words:
        raise ValueError("an instruction is empty")
    return template.replace("{task}", " ".join(words))


class HashedWordEncoder:
    """The small model's text encoder: each word is a fixed pseudo-random vector.

    It has no weights and downloads nothing, and knows nothing of meaning: instructions that share
    words share tokens, which is what a model of a few tasks needs. The values of a word come
    from the stream SHAKE-256(seed, word), read as 32-bit integers and mapped to the uniform
    distribution of mean 0 and variance 1: integer arithmetic, so every machine and every version
    of any library gives the same bits. Word i gets ``[cos(i w) | sin(i w)]`` added,
    ``w_j = 10000^(-j/(D/2))``.
    """

    def __init__(self, dim: int, length: int, seed: int = 0) -> None:
        """Set the width ``dim`` (even) and the number of words ``length`` of an encoding."""
        if dim < 2 or dim % 2:
            raise ValueError(f"dim must be even and positive, got {dim}")
        if length < 1:
            raise ValueError(f"length must be at least 1, got {length}")
        self.dim = dim
        self.length = length
        self.seed = seed
        self.identity = f"hashed-words-v1 dim={dim} length={length} seed={seed}"

    @property
    def settings(self) -> dict[str, Any]:
        """What :func:`build_text_encoder` makes this encoder from."""
        return {
            "kind": "hashed_words",
            "dim": self.dim,
            "length": self.length,
            "seed": self.seed,
        }

    def encode(self, instructions: Sequence[str]) -> tuple[Tensor, Tensor]:
        """See :meth:`TextEncoder.encode`; embeddings are float32 on the CPU."""
        embeddings = torch.zeros(len(instructions), self.length, self.dim)
        for row, instruction in zip(embeddings, instructions, strict=True):
            words = re.findall(r"\w+", instruction.lower())
            if not words:
                raise ValueError(f"instruction {instruction!r} has no words")
            if len(words) > self.length:
                raise ValueError(
                    f"instruction {instruction!r} has {len(words)} words, the text encoder takes "
                    f"at most {self.length}; shorten it, or train with a larger text length"
                )
            vectors = torch.stack([self._word(word) for word in words])
            row[: len(words)] = vectors + _sinusoid(len(words), self.dim)
        return embeddings, torch.ones(len(instructions), self.length, dtype=torch.bool)

    def _word(self, word: str) -> Tensor:
        stream = hashlib.shake_256(f"{self.seed}:{word}".encode()).digest(4 * self.dim)
        integers = torch.from_numpy(np.frombuffer(stream, dtype="<i4").astype(np.float64))
        # int32 is uniform on [-2^31, 2^31); variance 1 needs the half width sqrt(3).
        return ((integers + 0.5) * (math.sqrt(3.0) / 2**31)).float()


def _sinusoid(count: int, dim: int) -> Tensor:
    frequencies = 10000.0 ** (-torch.arange(dim // 2, dtype=torch.float64) / (dim // 2))
    angles = torch.arange(count, dtype=torch.float64)[:, None] * frequencies
    return torch.cat([angles.cos(), angles.sin()], dim=1).float()


class UMT5Encoder:
    """UMT5 through transformers: the text encoder of Wan2.2 (UMT5-XXL, D = 4096, L = 128).

    The tokeniser pads to L; pad embeddings are set to zero and stay visible.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Callable,
        *,
        length: int = 128,
        prompt_template: str = FASTWAM_PROMPT,
        identity: str,
    ) -> None:
        """Wrap a loaded encoder.

        Args:
            model: a ``transformers.UMT5EncoderModel``.
            tokenizer: its tokeniser.
            length: tokens L of an encoding.
            prompt_template: text around the instruction, with ``{task}``.
            identity: names the weights (see :class:`TextEncoder`).
        """
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.length = length
        self.dim = model.config.d_model
        self.prompt_template = prompt_template
        self.identity = identity

    @classmethod
    def from_folder(
        cls,
        model_folder: str | Path,
        tokenizer_folder: str | Path | None = None,
        *,
        length: int = 128,
        prompt_template: str = FASTWAM_PROMPT,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.bfloat16,
    ) -> UMT5Encoder:
        """Load encoder and tokeniser from local folders; nothing is downloaded.

        Args:
            model_folder: a transformers folder (``text_encoder`` of ``Wan2.2-TI2V-5B-Diffusers``).
            tokenizer_folder: the tokeniser's folder; by default ``tokenizer`` beside
                ``model_folder`` if there is one, else ``model_folder`` itself.
            length: tokens L of an encoding.
            prompt_template: text around the instruction, with ``{task}``.
            device: where the encoder runs.
            dtype: dtype of its weights.

        Raises:
            FileNotFoundError: a folder is missing.
        """
        from transformers import AutoTokenizer, UMT5EncoderModel

        model_folder, tokenizer_folder = _umt5_folders(model_folder, tokenizer_folder)
        tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder, local_files_only=True)
        model = UMT5EncoderModel.from_pretrained(
            model_folder, local_files_only=True, dtype=dtype
        ).to(device)
        return cls(
            model,
            tokenizer,
            length=length,
            prompt_template=prompt_template,
            identity=umt5_identity(
                model_folder,
                tokenizer_folder,
                length=length,
                prompt_template=prompt_template,
                dtype=dtype,
            ),
        )

    @torch.no_grad()
    def encode(self, instructions: Sequence[str]) -> tuple[Tensor, Tensor]:
        """See :meth:`TextEncoder.encode`; embeddings are in the model's dtype and device."""
        prompts = [format_prompt(self.prompt_template, text) for text in instructions]
        tokens = self.tokenizer(
            prompts, padding="max_length", max_length=self.length, return_tensors="pt"
        )
        mask = tokens["attention_mask"]
        if mask.shape[1] > self.length:
            longest = int(mask.sum(1).argmax())
            raise ValueError(
                f"prompt {prompts[longest]!r} has {int(mask[longest].sum())} tokens, "
                f"the text encoder takes at most {self.length}; shorten the instruction"
            )
        device = next(self.model.parameters()).device
        mask = mask.to(device)
        output = self.model(input_ids=tokens["input_ids"].to(device), attention_mask=mask)
        embeddings = output.last_hidden_state * mask[..., None].to(output.last_hidden_state.dtype)
        return embeddings, torch.ones_like(mask, dtype=torch.bool)


def umt5_identity(
    model_folder: str | Path,
    tokenizer_folder: str | Path | None = None,
    *,
    length: int,
    prompt_template: str = FASTWAM_PROMPT,
    dtype: torch.dtype = torch.bfloat16,
) -> str:
    """Identity of :meth:`UMT5Encoder.from_folder` with the same arguments, without loading it.

    Weight files are told apart by name and size: hashing 11 GB at every start would cost more
    than the embeddings do.
    """
    model_folder, tokenizer_folder = _umt5_folders(model_folder, tokenizer_folder)
    config = (model_folder / "config.json").read_bytes()
    files = sorted(
        (path.name, path.stat().st_size)
        for folder in {model_folder, tokenizer_folder}
        for path in folder.iterdir()
        if path.suffix in (".safetensors", ".bin", ".model", ".json")
    )
    description = [hashlib.sha256(config).hexdigest(), files, prompt_template, str(dtype), length]
    digest = hashlib.sha256(json.dumps(description).encode()).hexdigest()
    return f"umt5 {digest[:32]}"


def _umt5_folders(
    model_folder: str | Path, tokenizer_folder: str | Path | None
) -> tuple[Path, Path]:
    model_folder = Path(model_folder)
    if tokenizer_folder is None:
        beside = model_folder.parent / "tokenizer"
        tokenizer_folder = beside if beside.is_dir() else model_folder
    tokenizer_folder = Path(tokenizer_folder)
    if not (model_folder / "config.json").is_file():
        raise FileNotFoundError(
            f"no UMT5 encoder at {model_folder}: a transformers folder with config.json and "
            "weights is needed (the folder text_encoder of Wan2.2-TI2V-5B-Diffusers)"
        )
    if not tokenizer_folder.is_dir():
        raise FileNotFoundError(f"no tokeniser folder at {tokenizer_folder}")
    return model_folder, tokenizer_folder


TEXT_ENCODER_KINDS: dict[str, Callable[..., TextEncoder]] = {
    "hashed_words": HashedWordEncoder,
    "umt5": UMT5Encoder.from_folder,
}
"""Kind of text encoder -> what builds it from its settings."""


def build_text_encoder(kind: str, **settings: Any) -> TextEncoder:
    """Build a text encoder of a registered kind.

    Raises:
        ValueError: the kind is unknown, or it does not take these settings.
    """
    if kind not in TEXT_ENCODER_KINDS:
        raise ValueError(
            f"unknown kind of text encoder {kind!r}; known kinds: {', '.join(TEXT_ENCODER_KINDS)}"
        )
    try:
        return TEXT_ENCODER_KINDS[kind](**settings)
    except TypeError as error:
        raise ValueError(f"text encoder {kind!r}: {error}") from error


class CachedTextEncoder:
    """A text encoder whose results stay on disk; the real one is built only for new texts.

    One file per (instruction, encoder identity, length), written atomically, so that any number
    of processes may share a folder. Pads are zero and are not stored.
    """

    def __init__(
        self,
        folder: str | Path,
        build: Callable[[], TextEncoder],
        *,
        identity: str,
        length: int,
        dim: int,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Describe the encoder without building it.

        Args:
            folder: the cache; created when first written to.
            build: makes the encoder; called once per :meth:`encode` that misses, and the encoder
                is dropped again before that call returns.
            identity: the encoder's ``identity``.
            length: the encoder's ``length``.
            dim: the encoder's ``dim``.
            dtype: dtype of the embeddings returned.
        """
        self.folder = Path(folder)
        self.identity = identity
        self.length = length
        self.dim = dim
        self.dtype = dtype
        self._build = build

    def encode(self, instructions: Sequence[str]) -> tuple[Tensor, Tensor]:
        """See :meth:`TextEncoder.encode`; embeddings are on the CPU in ``dtype``."""
        missing = [text for text in dict.fromkeys(instructions) if not self._path(text).exists()]
        if missing:
            self._fill(missing)
        embeddings = torch.zeros(len(instructions), self.length, self.dim, dtype=self.dtype)
        for row, text in zip(embeddings, instructions, strict=True):
            tokens = self._read(self._path(text))
            row[: len(tokens)] = tokens.to(self.dtype)
        return embeddings, torch.ones(len(instructions), self.length, dtype=torch.bool)

    def _path(self, text: str) -> Path:
        key = hashlib.sha256(json.dumps([self.identity, self.length, text]).encode()).hexdigest()
        return self.folder / key[:2] / f"{key}.safetensors"

    def _fill(self, texts: list[str]) -> None:
        encoder = self._build()
        if (encoder.identity, encoder.length, encoder.dim) != (
            self.identity,
            self.length,
            self.dim,
        ):
            raise ValueError(
                f"the cache was declared for encoder {self.identity!r} ({self.length} x "
                f"{self.dim}), but {encoder.identity!r} ({encoder.length} x {encoder.dim}) was "
                "built"
            )
        for text in texts:
            embedding = encoder.encode([text])[0][0].cpu()
            used = int(embedding.ne(0).any(1).nonzero().max()) + 1
            with atomic_path(self._path(text)) as temporary:
                save_file(
                    {"embedding": embedding[:used].contiguous()},
                    temporary,
                    metadata={"text": text, "identity": self.identity},
                )
        del encoder
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _read(self, path: Path) -> Tensor:
        try:
            tokens = load_file(path)["embedding"]
        except (SafetensorError, KeyError) as error:
            raise ValueError(
                f"cached text embedding {path} is unreadable ({error}); delete the file"
            ) from error
        if tokens.shape[0] > self.length or tokens.shape[1] != self.dim:
            raise ValueError(
                f"cached text embedding {path} has shape {list(tokens.shape)}, "
                f"at most {self.length} x {self.dim} is expected; delete the file"
            )
        return tokens
