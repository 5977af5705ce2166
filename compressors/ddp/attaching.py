"""Attach: a compressor and a collective as the communication hook of your own DistributedDataParallel, in one call.

    ddp = DistributedDataParallel(model)
    hook = attach(ddp, "group_topk:ratio=0.01", "ring")
    for x, y in batches:
        loss_of(ddp(x), y).backward()
        if hook.step_ok():
            optimizer.step()
        optimizer.zero_grad()
    hook.close()

`examples/train_digits.py` is a whole script.
"""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from collectives.base import Collective
from collectives.spec import build
from compressors.base import Compressor
from compressors.ddp.channel import Nonfinite, Trigger
from compressors.ddp.choosing.hook import ChoosingHook
from compressors.ddp.hook import CompressionHook, HookSettings
from compressors.ddp.reducer import Reducer
from compressors.layer import layers_of

# DDP closes its first bucket at this size unless it is given one for all (bucket_cap_mb).
FIRST_BUCKET_BYTES = 1 << 20


def attach(
    ddp: DistributedDataParallel,
    compressor: Compressor | str,
    collective: Collective | str,
    *,
    seed: int = 0,
    momentum: float | None = None,
    nesterov: bool = False,
    trigger: Trigger = "async",
    nonfinite: Nonfinite = "skip",
    timeout_s: float = 300.0,
) -> CompressionHook:
    """Let `ddp` exchange its gradients through this pair from the next `backward` on; every rank must call.

    Args:
        ddp: the wrapped model; has no communication hook yet. With `gradient_as_bucket_view=True` gradients on CPUs are
            read where `backward` leaves them, instead of copied first.
        compressor: with its options, or as a text: "group_topk:ratio=0.01".
        collective: how payloads are summed; likewise.
        seed: of the compressor's private random generators, the same on every rank.
        momentum: coefficient for compressors that apply the momentum themselves (`momentum_correction=True`), in
            [0, 1); the optimizer's own must then be 0.
        nesterov: look ahead along the velocity, as the optimizer would.
        trigger: "async" sends each bucket while backward goes on, "sync" when rank 0 saw all ranks finish backward.
        nonfinite: what to do about NaN or infinity: "skip" the step on all ranks, "raise", or "zero" the elements.
        timeout_s: longest wait for any one message.

    Raises:
        ValueError: "topk sends Sparse payloads: native adds ...; use collective allgather"; momentum missing or given
            in vain; several buckets where the compressor wants one; a hook of PyTorch's own; a model that has a hook
            already, holds complex parameters or some that were frozen after it was wrapped; an embedding whose
            gradients are sparse; or DDP with skip_all_reduce_unused_params.
        OptionError: a text that names no component, or a wrong option.
    """
    if isinstance(compressor, str):
        compressor = build("compressors", Compressor, compressor)
    if isinstance(collective, str):
        collective = build("collectives", Collective, collective)
    if reason := compressor.refusal(collective):
        raise ValueError(reason)
    if compressor.engine_hook:
        raise ValueError(
            f"{compressor.component_name} is PyTorch's own hook; "
            "use ddp.register_comm_hook(*compressor.hook(ddp.process_group))"
        )
    if reason := compressor.layers_refusal(layers_of(ddp.module)):
        raise ValueError(reason)
    _check_engine(ddp)
    _check_gradients(ddp)
    _check_one_bucket(ddp, compressor)
    _check_momentum(compressor, momentum, nesterov=nesterov)
    reducer = Reducer(compressor, momentum=momentum or 0.0, nesterov=nesterov)
    settings = HookSettings(seed=seed, trigger=trigger, nonfinite=nonfinite, timeout_s=timeout_s)
    return hook_for(ddp, reducer, collective, settings)


def hook_for(
    ddp: DistributedDataParallel, reducer: Reducer, collective: Collective, settings: HookSettings
) -> CompressionHook:
    """Register the hook that the reducer's compressor takes: one that chooses, or one that does as it is told."""
    make = ChoosingHook if reducer.compressor.chooses else CompressionHook
    return make(ddp, reducer, collective, settings)


def _check_engine(ddp: DistributedDataParallel) -> None:
    if ddp._comm_hooks:
        raise ValueError("this model has a communication hook already, if a closed one; wrap it in DDP anew")
    if ddp.skip_all_reduce_unused_params:
        raise ValueError(
            "with skip_all_reduce_unused_params ranks would not know when a step ends; wrap the model without it"
        )


def _check_gradients(ddp: DistributedDataParallel) -> None:
    for name, parameter in ddp.module.named_parameters():
        if parameter.is_complex():
            raise ValueError(f"{name} is complex, which no compressor knows; hold real and imaginary parts")
    wrapped = {id(parameter) for parameter in ddp._module_parameters}
    for name, parameter in ddp.module.named_parameters():
        if not parameter.requires_grad and id(parameter) in wrapped:
            raise ValueError(f"{name} was frozen after it was wrapped; freeze first, then wrap the model in DDP")
    for name, module in ddp.module.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            what = f"{type(module).__name__} {name}".strip()
            raise ValueError(f"{what} makes sparse gradients, which no bucket holds; give it sparse=False")


def _check_one_bucket(ddp: DistributedDataParallel, compressor: Compressor) -> None:
    if not compressor.one_bucket:
        return
    types = {str(p.dtype) for p in ddp.parameters() if p.requires_grad}
    if len(types) > 1:
        raise ValueError(
            f"{compressor.component_name} wants the whole model as one bucket under these options, and DDP puts "
            f"parameters of {' and '.join(sorted(types))} into buckets of their own; give them one type"
        )
    nbytes = sum(p.numel() * p.element_size() for p in ddp.parameters() if p.requires_grad)
    limit = FIRST_BUCKET_BYTES if ddp.bucket_bytes_cap_default else ddp.bucket_bytes_cap
    if nbytes > limit:
        raise ValueError(
            f"{compressor.component_name} wants the whole model as one bucket under these options; "
            f"wrap it with DistributedDataParallel(..., bucket_cap_mb={-(-nbytes // 2**20)})"
        )


def _check_momentum(compressor: Compressor, momentum: float | None, *, nesterov: bool) -> None:
    name = compressor.component_name
    if compressor.owns_momentum and (momentum is None or not 0 <= momentum < 1):
        raise ValueError(
            f"{name} applies the momentum itself under these options; give attach its coefficient in [0, 1), "
            "momentum=0.9 say, and the optimizer momentum=0"
        )
    if not compressor.owns_momentum and momentum is not None:
        raise ValueError(f"{name} applies no momentum under these options; leave momentum to the optimizer")
    if not compressor.owns_momentum and nesterov:
        raise ValueError(f"{name} applies no momentum under these options; leave nesterov to the optimizer")
