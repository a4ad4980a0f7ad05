"""GPT (Radford et al. 2019) that predicts the next character: a causal transformer."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

#: Width of each attention head.
HEAD = 64

Tensor = Any


class Size(NamedTuple):
    """Size of a model; `width` is a multiple of `HEAD`, `context` the longest input in tokens."""

    ntokens: int
    layers: int
    width: int
    context: int


class _Block(nn.Module):  # type: ignore[misc]
    """Attention, then a perceptron, each behind a layer norm and added to its input."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        width = size.width
        self.before_attention, self.before_perceptron = nn.LayerNorm(width), nn.LayerNorm(width)
        self.to_heads, self.from_heads = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.perceptron = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the output for `x`, both of shape (batch, context, width)."""
        batch, context, width = x.shape
        heads = self.to_heads(self.before_attention(x)).view(batch, context, 3, -1, HEAD)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.from_heads(mixed.transpose(1, 2).reshape(batch, context, width))
        return x + self.perceptron(self.before_perceptron(x))


class Gpt(nn.Module):  # type: ignore[misc]
    """GPT of a given `Size`; its output layer has the weights of the token embedding."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.token = nn.Embedding(size.ntokens, size.width)
        self.position = nn.Embedding(size.context, size.width)
        self.blocks = nn.Sequential(*[_Block(size) for _ in range(size.layers)])
        self.norm = nn.LayerNorm(size.width)
        for name, weights in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(weights)
            elif weights.dim() > 1:
                # Narrower where a block adds to its input, so that the sum does not grow.
                adds = name.endswith(("from_heads.weight", "perceptron.2.weight"))
                nn.init.normal_(weights, std=0.02 / (math.sqrt(2 * size.layers) if adds else 1.0))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy of `targets`, the tokens that follow `tokens`.

        Both have shape (batch, context).
        """
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        logits = self.norm(self.blocks(x)) @ self.token.weight.t()
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def nweights(size: Size) -> int:
    """Return the number of weights of a `Gpt` of this size."""
    with torch.device("meta"):
        return sum(weights.numel() for weights in Gpt(size).parameters())
