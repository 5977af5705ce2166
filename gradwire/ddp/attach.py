"""`attach`: make a compressor and a collective the communication hook of your own DistributedDataParallel model.

    ddp = DistributedDataParallel(model)
    hook = attach(ddp, "group_topk:ratio=0.01", "allgather", optimizer=optimizer)
    for x, y in batches:
        loss_of(ddp(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    hook.close()

Call `hook.set_epoch(epoch)` before each epoch if the compressor sends more entries in its first epochs.

`examples/train_digits.py` is a complete script.
"""

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from collectives.base import Collective
from collectives.options import raise_first
from compressors.base import Compressor, TorchHook
from compressors.layer import Layer, sparse_gradients
from gradwire.components import build_components, check_momentum, check_types
from gradwire.ddp.gradients import change_since_wrapping, reduced_kinds, reduced_layers
from gradwire.ddp.hook import CompressionHook, OwnHook
from gradwire.exchange.communicator import OPEN, HookSettings, Trigger, close_earlier_hooks
from gradwire.exchange.reducer import reducer_for
from gradwire.step_guard import Nonfinite, checked_optimizers

# Size of DDP's first bucket, unless bucket_cap_mb sets one size for all buckets.
FIRST_BUCKET_BYTES = 1 << 20


def attach(
    ddp: DistributedDataParallel,
    compressor: Compressor | str,
    collective: Collective | str | None = None,
    *,
    seed: int = 0,
    momentum: float | None = None,
    nesterov: bool = False,
    trigger: Trigger = "async",
    nonfinite: Nonfinite = "skip",
    timeout_s: float = 300.0,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] = (),
    scaler: torch.amp.GradScaler | None = None,
    clip_norm: float | None = None,
) -> CompressionHook:
    """Exchange the gradients of `ddp` through a compressor and a collective from the next `backward` on.

    Every rank must call this function. A hook that an earlier call returned for the same network is closed.

    Args:
        ddp: the wrapped model, compiled or not, without a communication hook. With `gradient_as_bucket_view=True`
            gradients on CPUs are read where `backward` leaves them, instead of being copied first.
        compressor: an instance, or a spec such as "group_topk:ratio=0.01".
        collective: an instance, or a spec such as "ring"; sums the payloads. None: the compressor's default.
        seed: seed of the compressor's own random numbers, the same on every rank.
        momentum: coefficient in [0, 1), for compressors that apply the momentum themselves
            (`momentum_correction=True`); set the optimizer's own momentum to 0 then.
        nesterov: apply Nesterov momentum, as the optimizer would.
        trigger: "async" sends each bucket during backward, "sync" after all ranks have finished backward.
        nonfinite: what to do about NaN or infinity: "skip" the step on all ranks, "raise", or "zero" the elements.
        timeout_s: longest wait for any one message, in seconds.
        optimizer: the optimizer, or all optimizers, of this model. Their `step` then changes nothing in a skipped step,
            so that the training loop need not call `step_ok`. `hook.watch` adds optimizers later.
        scaler: the gradient scaler of a training loop in fp16. Residuals then do not contain the scale. After an
            overflow on any rank the gradients are infinite on all ranks, so that the scaler skips the step everywhere.
        clip_norm: largest L2 norm of this rank's gradient, which is clipped before it is compressed; sending therefore
            begins only when backward has ended.

    Raises:
        ValueError: the compressor with this collective, the model or an option of DDP is not supported, for example:
            "topk sends Sparse payloads: native adds ...; use collective allgather"; momentum is missing, or given but
            not used; the compressor needs a single bucket and there are several; the compressor is one of PyTorch's own
            hooks; the model is not in DDP (bare, FSDP), already has a hook, was changed after it was wrapped (frozen,
            converted), or trains complex parameters, or fp64 parameters that would be compressed; an embedding has
            sparse gradients.
        OptionError: a spec names an unknown component, or has a wrong option.
    """
    compressor, collective = build_components(compressor, collective)
    if isinstance(compressor, TorchHook):
        raise ValueError(
            f"{compressor.component_name} is PyTorch's own hook; "
            "use ddp.register_comm_hook(*compressor.hook(ddp.process_group))"
        )
    ddp = _engine(ddp)
    layers = reduced_layers(ddp)
    compressor.check_compatible(collective, layers)
    check_types(layers, compressor)
    if compressor.traits.one_bucket:
        _check_one_bucket(ddp, layers, compressor)
    check_momentum(compressor, momentum, nesterov=nesterov)
    if scaler is not None and not scaler.is_enabled():
        scaler = None
    optimizers = checked_optimizers(optimizer)
    raise_first(
        ValueError,
        (
            scaler is not None and nonfinite != "skip",
            f'a scaler skips steps that overflow; leave out nonfinite="{nonfinite}"',
        ),
        (
            clip_norm is not None and nonfinite == "zero",
            'an infinite gradient has no norm to clip; leave out nonfinite="zero" or clip_norm',
        ),
        (
            clip_norm is not None and not clip_norm > 0,
            f"clip_norm={clip_norm} is not possible; give a positive norm, or None",
        ),
        (
            any(getattr(each, "_overlap_with_ddp", False) for each in optimizers),
            "overlap_with_ddp takes the place of DDP's communication hook; create the optimizer without it",
        ),
    )
    settings = HookSettings(
        seed=seed,
        trigger=trigger,
        nonfinite=nonfinite,
        timeout_s=timeout_s,
        scaler=scaler,
        clip_norm=clip_norm,
    )
    close_earlier_hooks(layers)
    if isinstance(compressor, OwnHook):
        hook = compressor.make_hook(ddp, collective, settings)
    else:
        reducer = reducer_for(compressor, momentum=momentum or 0.0, nesterov=nesterov)
        hook = CompressionHook(ddp, reducer, collective, settings)
    OPEN.add(hook)
    hook.watch(*optimizers)
    return hook


def _engine(model: nn.Module) -> DistributedDataParallel:
    """Return the DDP model inside a compiled model, or the DDP model that was given.

    Raises:
        ValueError: there is no DDP model, DDP has an option with which a communication hook gets no buckets, or an
            embedding has sparse gradients.
    """
    ddp = getattr(model, "_orig_mod", model)
    if not isinstance(ddp, DistributedDataParallel):
        # compared by name, because importing FSDP takes half a second
        names = {cls.__name__ for cls in type(ddp).__mro__ if cls.__module__.startswith("torch.distributed.fsdp")}
        if "FSDPModule" in names:
            raise ValueError("attach needs a model in DDP and got one in fully_shard; use gradwire.attach_fsdp")
        got = "one in FSDP, which reduces gradients itself" if names else f"a bare {type(ddp).__name__}"
        raise ValueError(f"attach needs a model in DDP and got {got}; give it DistributedDataParallel(model)")
    if ddp._delay_all_reduce_all_params:  # such a model lacks the attributes below
        raise ValueError(
            "delay_all_reduce_named_params leaves DDP without buckets, which attach needs; wrap the model without it"
        )
    raise_first(
        ValueError,
        (
            ddp._use_python_reducer,
            'under torch._dynamo.config.optimize_ddp = "python_reducer" DDP has no buckets, which attach needs; '
            "set it to True, then wrap the model again",
        ),
        (
            ddp.mixed_precision is not None,
            "mixed_precision takes the place of DDP's communication hook; wrap the model without it and use autocast",
        ),
        (
            ddp._get_ddp_logging_data().get("comm_hook"),
            "this model already has a communication hook (perhaps a closed one); wrap it in DDP again",
        ),
        (
            ddp.skip_all_reduce_unused_params,
            "with skip_all_reduce_unused_params ranks would not know when a step ends; wrap the model without it",
        ),
    )
    if reason := sparse_gradients(ddp.module) or change_since_wrapping(ddp, reduced_kinds(ddp)):
        raise ValueError(reason)
    return ddp


def _check_one_bucket(ddp: DistributedDataParallel, layers: Sequence[Layer], compressor: Compressor) -> None:
    weights = [layer.weight for layer in layers if layer.weight is not None]
    types = {str(weight.dtype) for weight in weights}
    if len(types) > 1:
        raise ValueError(
            f"{compressor.component_name} wants the whole model as one bucket with these options, and DDP puts "
            f"parameters of {' and '.join(sorted(types))} into separate buckets; convert them to one dtype"
        )
    nbytes = sum(weight.nbytes for weight in weights)
    if nbytes > (FIRST_BUCKET_BYTES if ddp.bucket_bytes_cap_default else ddp.bucket_bytes_cap):
        raise ValueError(
            f"{compressor.component_name} wants the whole model as one bucket with these options; "
            f"wrap it with DistributedDataParallel(..., bucket_cap_mb={-(-nbytes // 2**20)})"
        )
