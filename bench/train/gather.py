"""Gather values other than tensors from ranks, as JSON or plain bytes; never as a pickle, which could run code."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist


def gather_json(own: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return the JSON value of every rank of the group, in rank order; every rank of the group must call."""
    return [json.loads(text) for text in gather_bytes(json.dumps(own).encode(), group)]


def gather_bytes(own: bytes, group: dist.ProcessGroup | None = None) -> list[bytes]:
    """Return the bytes of every rank of the group, in rank order; every rank of the group must call."""
    device = torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")
    length = torch.tensor([len(own)], device=device)
    lengths = [torch.empty_like(length) for _ in range(dist.get_world_size(group))]
    dist.all_gather(lengths, length, group=group)
    padded = torch.zeros(int(max(lengths)), dtype=torch.uint8, device=device)
    padded[: len(own)] = torch.frombuffer(bytearray(own), dtype=torch.uint8)
    everyone = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(everyone, padded, group=group)
    return [bytes(raw[: int(size)].cpu().numpy()) for raw, size in zip(everyone, lengths, strict=True)]
