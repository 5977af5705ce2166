"""GPT: a transformer that predicts the next byte of a text.

Source: Radford, Wu, Child, Luan, Amodei, Sutskever, "Language Models are Unsupervised Multitask Learners" (2019):
normalisation before attention and MLP and after the last block; weights drawn with standard deviation 0.02, and divided
by sqrt(2 layers) where they add to the residual stream. preset=nanogpt has the small shape of Karpathy's nanoGPT, 10.7
million parameters without the position embeddings.
Differs: no biases, as in nanoGPT's default configuration; no dropout of attention weights; a vocabulary of 256 bytes.
"""

import dataclasses
import math
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge, Le, Lt
from torch import nn
from torch.nn import functional
from typing_extensions import Doc, override

from bench.models.base import TextModel
from collectives.options import Count, OptionError

PRESETS: dict[str, dict[str, Any]] = {
    "none": {},
    "small": {"layers": 3, "width": 96, "heads": 3, "context": 128},
    "nanogpt": {"layers": 6, "width": 384, "heads": 6, "context": 256},
}


@dataclasses.dataclass(kw_only=True)
class Gpt(TextModel):
    """A transformer that predicts the next byte of a text: 836 736 parameters with the default options.

    A preset changes the defaults of other options; options that you give take precedence. preset=nanogpt has 10.8
    million parameters; preset=small has 0.37 million, for short trainings on few cores.
    """

    presets = PRESETS

    layers: Annotated[int, Ge(1), Le(1000), Doc("blocks of attention and MLP")] = 4
    width: Annotated[int, Ge(1), Le(65_536), Doc("size of a byte's embedding; a multiple of heads")] = 128
    heads: Annotated[Count, Doc("heads of the attention")] = 4
    context: Annotated[int, Ge(1), Le(65_536), Doc("largest number of bytes that the network gets at once")] = 128
    dropout: Annotated[
        float, Ge(0), Lt(1), Doc("dropout: share of the embeddings, and of the blocks' outputs, that is set to 0")
    ] = 0.0
    preset: Annotated[
        Literal["none", "small", "nanogpt"], Doc("change the defaults of the other options to those of a known shape")
    ] = "none"

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        if self.width % self.heads:
            raise OptionError(
                f"gpt: width={self.width} cannot be divided among heads={self.heads}; make it a multiple of heads"
            )

    @property
    @override
    def longest(self) -> int:
        return self.context

    @override
    def build(self, num_classes: int) -> nn.Module:
        return Transformer(num_classes, self.layers, self.width, self.heads, context=self.context, dropout=self.dropout)


class Transformer(nn.Module):
    """Maps bytes, int64 [n, length], to logits [n, length, num_classes]; the output layer reuses the embedding matrix.

    The length is at most `context`. The code reads no shapes, and every operation returns one tensor, so that torch.fx
    can trace the module.
    """

    def __init__(
        self, num_classes: int, layers: int, width: int, heads: int, *, context: int, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.token = nn.Embedding(num_classes, width)
        self.position = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(layers)))
        self.norm = nn.LayerNorm(width, bias=False)
        for name, parameter in self.named_parameters():
            if "norm" not in name:
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if name.endswith("out.weight") else 0.02)

    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        positions = torch.ones_like(x[0]).cumsum(0) - 1
        x = self.dropout(self.token(x) + self.position(positions))
        return functional.linear(self.norm(self.blocks(x)), self.token.weight)


class Block(nn.Module):
    """Attention, then an MLP; each normalises its input [n, context, width] and adds its output to the input."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width, bias=False)
        self.attention = CausalSelfAttention(width, heads)
        self.mlp_norm = nn.LayerNorm(width, bias=False)
        self.hidden = nn.Linear(width, 4 * width, bias=False)
        self.gelu = nn.GELU()
        self.out = nn.Linear(4 * width, width, bias=False)
        self.dropout = nn.Dropout(dropout)

    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        added: torch.Tensor = self.dropout(self.out(self.gelu(self.hidden(self.mlp_norm(x)))))
        return x + added


class CausalSelfAttention(nn.Module):
    """Attention of each position to itself and all earlier positions: [n, context, width] to the same shape."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        qkv = self.qkv(x).unflatten(2, (3, self.heads, -1)).transpose(1, 3)  # [n, heads, 3, context, width / heads]
        mixed = functional.scaled_dot_product_attention(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2], is_causal=True)
        out: torch.Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out
