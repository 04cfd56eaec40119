"""Context tokens that observations share: what is done to a token is done once per text.

A batch of observations knows few instructions, but has one each. Everything the experts do to
context tokens before attention (text network, keys, values, their norms) looks at one token alone,
so it can be done to the few texts and laid out for the observations afterwards.

Shapes: B observations, U texts, L text tokens, D width of a token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["Context", "SharedContext", "each_token", "joined"]

PerToken = Callable[[Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class SharedContext:
    """The context tokens of a batch, with each text once."""

    text: Tensor  # [U, L, D]
    rows: Tensor  # [B] int64, the text of each observation
    own: Tensor  # [B, n, D] tokens of each observation's own, after its text; n may be 0


Context = Tensor | SharedContext
"""Context tokens of a batch: [B, L, D], or with each text once."""


def each_token(context: Context, function: PerToken) -> Context:
    """Apply a function of single tokens [*, L, D] to all of them."""
    if isinstance(context, Tensor):
        return function(context)
    return SharedContext(text=function(context.text), rows=context.rows, own=function(context.own))


def joined(context: Context) -> Tensor:
    """Lay context tokens out per observation, [B, L, D] or with own tokens [B, L + n, D].

    A text is picked by a product with zeros and a one: the same bits as indexing, but its gradient
    is a product, too, in place of a scatter that is slow here and in no fixed order on a GPU.
    """
    if isinstance(context, Tensor):
        return context
    text = context.text
    pick = functional.one_hot(context.rows, len(text)).to(text.dtype)  # [B, U]
    chosen = (pick @ text.flatten(1)).unflatten(1, text.shape[1:])
    return torch.cat((chosen, context.own), dim=1)
