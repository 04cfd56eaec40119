"""UMT5 through transformers: the text encoder of Wan2.2, 5.7 billion weights for UMT5-XXL."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rlinf_wamrl.wam.text import FASTWAM_PROMPT, TextEncoder, format_prompt
from rlinf_wamrl.wam.text_cache import CachedTextEncoder

__all__ = ["UMT5Encoder", "umt5_encoder", "umt5_identity"]

DEFAULT_LENGTH = 128
"""Tokens of an encoding in the released FastWAM checkpoints."""


def umt5_encoder(
    model_folder: str | Path,
    *,
    cache_folder: str | Path | None = None,
    **settings: Any,
) -> TextEncoder:
    """Build a UMT5 text encoder, by default as it is, with ``cache_folder`` behind a cache.

    With a cache nothing is loaded here: the encoder is loaded when a new instruction comes, and
    freed again.

    Args:
        model_folder: see :meth:`UMT5Encoder.from_folder`.
        cache_folder: where embeddings are kept (see :class:`CachedTextEncoder`).
        **settings: the other arguments of :meth:`UMT5Encoder.from_folder`.

    Raises:
        FileNotFoundError: a folder is missing.
    """
    build = functools.partial(UMT5Encoder.from_folder, model_folder, **settings)
    if cache_folder is None:
        return build()
    described = {key: value for key, value in settings.items() if key != "device"}
    folder, _ = _umt5_folders(model_folder, settings.get("tokenizer_folder"))
    return CachedTextEncoder(
        cache_folder,
        build,
        identity=umt5_identity(model_folder, **described),
        length=settings.get("length", DEFAULT_LENGTH),
        dim=json.loads((folder / "config.json").read_text())["d_model"],
        dtype=settings.get("dtype", torch.bfloat16),
    )


class UMT5Encoder:
    """A loaded UMT5 encoder with its tokeniser (UMT5-XXL: D = 4096; FastWAM uses L = 128).

    The tokeniser pads to L; pad embeddings are set to zero and stay visible.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Callable,
        *,
        length: int = DEFAULT_LENGTH,
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
        length: int = DEFAULT_LENGTH,
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
    length: int = DEFAULT_LENGTH,
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
