"""Find the parameters that a DistributedDataParallel model reduces, and check that they have not changed since."""

from __future__ import annotations

from torch.nn.parallel import DistributedDataParallel

from compressors.layer import Layer, layers_of


def reduced_layers(ddp: DistributedDataParallel) -> list[Layer]:
    """Return the trainable parameters whose gradients DDP reduces, with the ids that `layers_of` gives them."""
    reduced = {
        id(parameter) for bucket in ddp.reducer._get_zeros_like_grad_buckets() for parameter in bucket.parameters()
    }
    return [layer for layer in layers_of(ddp.module) if id(layer.weight) in reduced]


def change_since_wrapping(ddp: DistributedDataParallel) -> str | None:
    """Return which parameter was changed after wrapping so that DDP misses its gradient and what to do, or None."""
    buffer_of = {
        id(parameter): bucket.buffer()
        for bucket in ddp.reducer._get_zeros_like_grad_buckets()
        for parameter in bucket.parameters()
    }
    for name, parameter in ddp.module.named_parameters():
        buffer = buffer_of.get(id(parameter))
        if buffer is None:
            if parameter.requires_grad and name not in ddp.parameters_to_ignore:
                return f"{name} was added or unfrozen after the model was wrapped; do that first, then wrap it in DDP"
        elif not parameter.requires_grad:
            return f"{name} was frozen after it was wrapped; freeze first, then wrap the model in DDP"
        elif (parameter.dtype.to_real(), parameter.device) != (buffer.dtype, buffer.device):
            was, now = (f"{tensor.dtype} on {tensor.device}" for tensor in (buffer, parameter))
            return f"{name} was {was} when it was wrapped and is {now}; convert first, then wrap the model in DDP"
    return None
