"""A small language model with embeddings, attention, norms and tied weights, and lines that it learns in few steps."""

from __future__ import annotations

import torch
from torch import nn

VOCABULARY, CONTEXT, WIDTH, HEADS = 32, 8, 32, 2


class CausalSelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inputs = nn.Linear(WIDTH, 3 * WIDTH)
        self.output = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return float [n, context, width] from the same."""
        query, key, value = self.inputs(x).unflatten(2, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: torch.Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return out


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), CausalSelfAttention()
        self.mlp = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return float [n, context, width] from the same."""
        x = x + self.attention(self.norm(x))
        out: torch.Tensor = x + self.mlp(x)
        return out


class SmallTransformer(nn.Module):
    """Maps tokens, int64 [n, context], to the logits of their successors, [n, context, vocabulary]."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(Block(), Block(), nn.LayerNorm(WIDTH))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight
        nn.init.normal_(self.tokens.weight, std=0.1)
        nn.init.normal_(self.places.weight, std=0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        logits: torch.Tensor = self.head(self.blocks(self.tokens(x) + self.places.weight))
        return logits


def loss_of(model: nn.Module, step: int, rank: int, samples: int = 4) -> torch.Tensor:
    """Return the mean loss on lines in which each token is its predecessor plus 1, from random starts."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    line = torch.randint(0, VOCABULARY, (samples, 1), generator=generator) + torch.arange(CONTEXT + 1)
    line %= VOCABULARY
    return nn.functional.cross_entropy(model(line[:, :-1]).flatten(0, 1), line[:, 1:].flatten())
