"""What surrounds a model on Wan2.2: its autoencoder, its text encoder and its processor."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from rlinf_wamrl.normalisation import DatasetStatistics
from rlinf_wamrl.processing import Processor, ProcessorConfig
from rlinf_wamrl.wam.pretrained import PretrainedWAM
from rlinf_wamrl.wam.text import build_text_encoder
from rlinf_wamrl.wam.vae import load_vae
from rlinf_wamrl.wam.wam import WAM

__all__ = ["Wan22Parts"]


@dataclass(frozen=True, kw_only=True)
class Wan22Parts:
    """Where the frozen parts lie. FastWAM's ``.pt`` files hold the two experts only."""

    vae: Path  # Wan2.2_VAE.pth, or the folder vae of Wan2.2-TI2V-5B-Diffusers
    text_encoder: Path  # the folder text_encoder of Wan2.2-TI2V-5B-Diffusers
    text_embedding_cache: Path  # folder of embeddings, filled on demand; shared by all processes
    tokenizer: Path | None = None  # None: the folder tokenizer beside the text encoder

    def surround(
        self, model: WAM, statistics: DatasetStatistics, processor: ProcessorConfig
    ) -> PretrainedWAM:
        """Complete a model.

        The text encoder is not loaded here, but when an instruction is asked for that is not in
        the cache, and is freed again.

        Args:
            model: the two experts; the autoencoder is loaded to their device and dtype.
            statistics: of the data that the model was trained on.
            processor: how observations and actions are prepared.

        Raises:
            FileNotFoundError: a part is missing.
            ValueError: a part is damaged, or does not fit the model.
        """
        model.vae = load_vae("wan22", self.vae, device=model.device, dtype=model.dtype)
        text_encoder = build_text_encoder(
            "umt5",
            model_folder=self.text_encoder,
            tokenizer_folder=self.tokenizer,
            cache_folder=self.text_embedding_cache,
            dtype=torch.bfloat16,
        )
        return PretrainedWAM(
            model=model,
            vae=model.vae,
            text_encoder=text_encoder,
            processor=Processor.build(processor, statistics),
        )
