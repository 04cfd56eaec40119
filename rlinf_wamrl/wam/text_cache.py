"""Text embeddings on disk, so that a large text encoder is loaded once and then freed."""

from __future__ import annotations

import fcntl
import gc
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlinf_wamrl.files import atomic_path
from rlinf_wamrl.wam.text import TextEncoder

__all__ = ["CachedTextEncoder"]


class CachedTextEncoder:
    """A text encoder whose results stay on disk; the real one is built only for new texts.

    One file per (instruction, encoder identity, length), written atomically, so that any number
    of processes may share a folder. Those that lack embeddings take turns: the first one to come
    computes them, and the others find them. Pads are zero and are not stored.
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
        if self._missing(instructions):
            with self._turn():
                missing = self._missing(instructions)
                if missing:
                    self._fill(missing)
        embeddings = torch.zeros(len(instructions), self.length, self.dim, dtype=self.dtype)
        for row, text in zip(embeddings, instructions, strict=True):
            tokens = self._read(self._path(text))
            row[: len(tokens)] = tokens.to(self.dtype)
        return embeddings, torch.ones(len(instructions), self.length, dtype=torch.bool)

    def _missing(self, instructions: Sequence[str]) -> list[str]:
        return [text for text in dict.fromkeys(instructions) if not self._path(text).exists()]

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Wait until no other process fills the cache: each would load the whole encoder."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / ".lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

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
