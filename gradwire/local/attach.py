"""`attach_local`: train with local steps in your own script, whose model is not in DistributedDataParallel.

local = attach_local(model, optimizer, "group_topk:ratio=0.01", "allgather", preset="sparseloco")
for x, y in batches:
    loss_of(model(x), y).backward()
    optimizer.step()  # every 30 steps, ranks also exchange how far their parameters have moved
    optimizer.zero_grad()
with local.outer():
    evaluate(model)  # with parameters that are equal on all ranks
local.close()
"""

import contextlib
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, get_args

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from collectives.base import Collective
from collectives.options import raise_first
from collectives.refusals import refuse
from compressors.base import Compressor
from compressors.layer import layers_of, sparse_gradients
from gradwire.components import build_components, check_types
from gradwire.exchange.communicator import OPEN, close_earlier_hooks, copy_from_first_rank_, own_transport
from gradwire.local.exchange import FixedMembers, LocalSteps, Members
from gradwire.local.fragments import OuterOptimizer
from gradwire.local.options import LocalOptions
from gradwire.step_guard import (
    Nonfinite,
    changed_parameter,
    checked_optimizers,
    closure_of,
    kind_of,
    parameters_of,
    unknown_parameter,
)


def attach_local(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    compressor: Compressor | str = "none",
    collective: Collective | str | None = None,
    *,
    seed: int = 0,
    nonfinite: Nonfinite = "skip",
    timeout_s: float = 300.0,
    outer_optimizer: OuterOptimizer | None = None,
    **options: Any,
) -> "LocalHook":
    """Let every rank train `model` alone, and exchange the changes of its parameters every `steps` optimizer steps.

    Every rank must call this function. The parameters and buffers of rank 0 are copied to all ranks. A hook that an
    earlier call returned for this model is closed.

    Args:
        model: the network, not in DDP or FSDP.
        optimizer: the (inner) optimizer, or all optimizers, of the model; the training loop calls `step` of each once
            per training step. Optimizer state is not exchanged.
        compressor: an instance, or a spec such as "group_topk:ratio=0.01"; encodes the changes of parameters.
        collective: an instance, or a spec such as "ring"; sums the payloads. None: the compressor's default.
        seed: seed of the compressor's own random numbers, the same on every rank.
        nonfinite: what this rank does about NaN or infinity in its gradients or in the change of its parameters: "skip"
            its update or its change, "raise" an error, or "zero" the elements.
        timeout_s: longest wait for any one message, in seconds.
        outer_optimizer: a function that makes the optimizer of the outer copy (the parameters that are equal on all
            ranks), which moves the copy by the ranks' mean change. Its argument is a list of parameters of the model's
            shapes in fp32, for example `lambda parameters: torch.optim.Adam(parameters, lr=0.01)`. The function is
            called once per fragment, replaces outer_lr, outer_momentum and nesterov, and must do the same on every
            rank.
        options: options of local steps, such as steps=30, outer_lr=0.7 or preset="diloco".

    Raises:
        ValueError: `nonfinite` is not one of these words; the compressor or collective does not work with local steps;
            the model is wrapped, or has complex or fp64 parameters, sparse gradients or nothing to train; an optimizer
            itself exchanges data, belongs to another model, or only wraps another optimizer; `outer_optimizer` does not
            return an optimizer of all parameters that it is given, or is combined with outer_lr, outer_momentum or
            nesterov.
        OptionError: an option is unknown or impossible, or a spec names an unknown component.
    """
    compressor, collective = build_components(compressor, collective)
    chosen = LocalOptions.from_text(options)
    of_default = [*(name for name in ("outer_lr", "outer_momentum", "nesterov") if name in options), None]
    raise_first(
        ValueError,
        (
            nonfinite not in get_args(Nonfinite),
            f'nonfinite="{nonfinite}" is not possible; use {", ".join(get_args(Nonfinite))}',
        ),
        (
            chosen.steps == "auto",
            "attach_local cannot end the loop of your script at an exchange; give steps a number",
        ),
        (
            of_default[0] and outer_optimizer is not None,
            f"{of_default[0]} belongs to the default outer optimizer, which outer_optimizer replaces; leave out one "
            "of the two",
        ),
    )
    optimizers = checked_optimizers(optimizer)
    refuse(chosen.pair_refusals, compressor, collective)
    layers = layers_of(model)
    compressor.check_compatible(collective, layers)
    check_types(layers, compressor)
    _check(model, optimizers)
    close_earlier_hooks(layers)
    copy_from_first_rank_([*model.parameters(), *model.buffers()])
    transport = own_transport(next(model.parameters()).device, timeout_s)
    return LocalHook(
        model,
        optimizers,
        chosen,
        compressor,
        FixedMembers(collective, transport),
        seed=seed,
        nonfinite=nonfinite,
        outer_optimizer=outer_optimizer,
    )


def _check(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    names = {cls.__name__ for cls in type(model).__mro__ if cls.__module__.startswith("torch.distributed.fsdp")}
    trainable = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    of_optimizers = [set(map(id, parameters_of(each))) for each in optimizers]
    wide = [name for name, weight in model.named_parameters() if weight.dtype == torch.float64]
    of_zero = [each for each in optimizers if type(each).__name__ == "ZeroRedundancyOptimizer"]
    sparse = sparse_gradients(model)
    raise_first(
        ValueError,
        (
            isinstance(model, DistributedDataParallel) or names,
            "attach_local needs the network itself, because DDP and FSDP exchange something in every step; leave out "
            "the wrapper",
        ),
        (not trainable, "the model has no trainable parameters, so nothing can be exchanged; unfreeze some"),
        (not optimizers, "attach_local needs the model's optimizer, whose steps it counts; give it one or several"),
        (of_zero, "ZeroRedundancyOptimizer sends parameters in every step; use the optimizer inside it"),
        (wide, f"{next(iter(wide), '')} is fp64 and differences are taken in fp32; convert the model to fp32"),
        (
            not all(trainable & own for own in of_optimizers),
            "an optimizer has none of the model's trainable parameters; give attach_local the optimizers of this model",
        ),
        (sparse, sparse or ""),
    )


class LocalHook(LocalSteps):
    """Counts the steps of a model's optimizers, and exchanges the model's changes when due; see `attach_local`."""

    @override
    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        options: LocalOptions,
        compressor: Compressor,
        members: Members,
        *,
        seed: int,
        nonfinite: Nonfinite,
        outer_optimizer: OuterOptimizer | None,
    ) -> None:
        super().__init__(model, options, compressor, members, nonfinite=nonfinite, outer_optimizer=outer_optimizer)
        self._seed = seed
        self._updates = True  # False if this rank skips the current step
        self._kinds = {id(layer.weight): kind_of(layer.weight) for layer in self.layers if layer.weight is not None}
        self._attached = self.guard.attach(model, self._why_not_exchanged, compressor, members.transport.rank)
        self._attached.watch(optimizers, self._before_update, self._after_update)
        self._shows_outer = self._is_updating = False
        self._versions: list[int] = []  # of the weights after the last step; empty if another optimizer may change them
        self._waiting_for = self._ids = {id(each) for each in optimizers}  # optimizers that have yet to make this step
        self._of_others = _watch_other_optimizers(self)
        OPEN.add(self)

    @contextlib.contextmanager
    def outer(self) -> Iterator[None]:
        """Set the model to the outer copy, which is equal on all ranks, inside a `with` block, to evaluate or save it.

        Raises:
            RuntimeError: the model or its optimizers have changed, a parameter was changed in the block, or the hook is
                closed.
        """
        if self.guard.closed:
            raise RuntimeError(
                "local steps are closed, and the model has the same parameters on all ranks since; leave out outer()"
            )
        if self._shows_outer:  # a surrounding `outer` block restores the weights
            yield
            return
        self.guard.check_unchanged()
        self.check_buffers()
        self.show_outer()
        self._shows_outer = True
        try:
            yield
            if name := self._changed_in_outer():
                raise RuntimeError(
                    f"{name} was changed inside outer(), which restores this rank's own weights at its end; change it "
                    "outside of the block"
                )
        finally:
            self._shows_outer = False
            if not self.guard.closed:
                self.show_inner()
                self._versions = self._versions_now()

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return the state that this rank needs to resume bit for bit, besides the states of its model and optimizer.

        Every rank must save its own state, between two steps.
        """
        with contextlib.nullcontext() if self.guard.closed else self.outer():
            return super().state_dict() | {"options": self._options_now()}

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replace the whole state with one that `state_dict` returned; load the model and the optimizer first.

        Raises:
            ValueError: the state was saved with other options.
            RuntimeError: the call is inside an `outer` block.
        """
        now = self._options_now()
        if others := [f"{name}={value}" for name, value in state["options"].items() if now.get(name) != value]:
            raise ValueError(f"this state was saved with {', '.join(others)}; give attach_local the same options")
        if self._shows_outer:
            raise RuntimeError("inside outer() a state cannot be loaded; load it outside of the block")
        super().load_state_dict(state)
        self.show_inner()
        self._versions = self._versions_now()

    @override
    def close(self) -> None:
        """Release the thread and the connections, and set the model to the outer copy, which is equal on all ranks.

        Every rank must call this method. Later calls do nothing.

        Changes that were made to the weights after the last optimizer step are lost, and this method warns about them.

        Raises:
            RuntimeError: a parameter has another shape than its outer copy; the model then stays as it is.
        """
        if self.guard.closed:
            return
        is_changed = not self._shows_outer and self._versions not in ([], self._versions_now())
        self._attached.close()
        self._of_others.remove()
        OPEN.discard(self)
        self.guard.closed = True
        try:
            for layer in self.layers:
                if layer.weight is not None and layer.weight.shape != layer.shape:
                    raise RuntimeError(
                        f"{layer.name} has another shape than its outer copy, so the model keeps what this rank has "
                        "trained; call close() before such a change"
                    )
            self.show_outer()
        finally:
            super().close()
        if is_changed and self.guard.index > self.options.start_after:
            warnings.warn(
                "the model's weights were changed after the last step that attach_local counted, and close() put the "
                "exchanged weights back; call close() before such a change",
                stacklevel=2,
            )

    def _versions_now(self) -> list[int]:
        return [layer.weight._version for layer in self.layers if layer.weight is not None]

    def _options_now(self) -> dict[str, str]:
        return self.options.option_texts() | {"outer_optimizer": type(self._fragments[0].optimizer).__name__}

    def _why_not_exchanged(self) -> str | None:
        """Return a message about a parameter that is trained but not exchanged; None if there is none."""
        model, advice = self._model, "call close() before, and attach_local after such a change"
        since = "attach_local was called"
        if reason := changed_parameter(model, self._kinds, since=since, advice=advice, may_freeze=True):
            return reason
        exchanged = {
            id(layer.weight) for hook in OPEN for layer in hook.layers
        }  # an optimizer may serve several models
        unknown = unknown_parameter(self._attached.optimizers, exchanged)
        if unknown is None:
            return None
        return (
            f"an optimizer updates a parameter of shape {list(unknown.shape)} that is not in the model, so it would "
            "not be exchanged; put it into the model before attach_local, or into an optimizer of its own"
        )

    def _changed_in_outer(self) -> str | None:
        """Return the name of a parameter that was changed inside an `outer` block; None if no parameter was changed."""
        if self._inner is None:  # nothing has been exchanged yet
            return None
        for fragment in self._fragments:
            for layer, outer in zip(fragment.layers, fragment.split(fragment.outer), strict=True):
                assert layer.weight is not None
                own = layer.weight.detach().flatten()
                if bool((own.isfinite() & (own != outer.to(own.dtype))).any()):
                    return layer.name
        return None

    def _check_other(self, optimizer: torch.optim.Optimizer) -> None:
        """Check that an optimizer that was not given to `attach_local` may make a step now.

        Raises:
            RuntimeError: the optimizer updates parameters of an optimizer that was given to `attach_local`, or makes a
                step inside an `outer` block.
        """
        if id(optimizer) in self._ids or self._is_updating:  # an optimizer may consist of other optimizers
            return
        updated = set(map(id, parameters_of(optimizer)))
        counted = {id(parameter) for each in self._attached.optimizers for parameter in parameters_of(each)}
        if updated & counted:
            raise RuntimeError(
                f"attach_local does not know this {type(optimizer).__name__}, so its steps would not be counted and "
                "nothing would be exchanged; call close(), then attach_local with all optimizers of the model"
            )
        if not updated.isdisjoint(map(id, self._model.parameters())):
            self._check_not_outer()
            self.guard.check_unchanged()
            self._versions = []

    def _check_not_outer(self) -> None:
        if self._shows_outer:
            raise RuntimeError("inside outer() an optimizer's step would be lost; train outside of the block")

    def _before_update(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        self._is_updating = False  # an exception may have ended the last update
        if id(optimizer) not in self._waiting_for:
            raise RuntimeError("an optimizer made two steps while another made none; call step() of each once per step")
        self._check_not_outer()
        if self._waiting_for == self._ids:  # the first of this step
            self.guard.check()
            self.start_step(self.step_of(self.guard.index, self.guard.epoch, self._seed))
            self._updates = True
        changed = None
        if (closure := closure_of(args, kwargs)) is not None:
            with torch.enable_grad():  # computes the gradients
                given = _once(closure())
            changed = (optimizer, given, *args[2:]), {key: kwargs[key] for key in kwargs if key != "closure"}
        parameters = parameters_of(optimizer)
        ids = {id(parameter) for parameter in parameters}
        is_ready = self.prepare_gradients_([layer for layer in self.layers if id(layer.weight) in ids])
        if not is_ready:
            self.guard.skip(f"a gradient is not finite in step {self.guard.index + 1}")
        self._updates = self._updates and is_ready
        if not self._updates:
            for parameter in parameters:
                parameter.grad = None
        self._is_updating = True
        return changed

    def _after_update(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._is_updating = False
        self._waiting_for = self._waiting_for - {id(optimizer)}
        if not self._waiting_for:
            self._waiting_for = self._ids
            self.after_update()
            self._versions = self._versions_now()


def _once(loss: Any) -> Callable[[], Any]:
    """Return a closure for an optimizer's step that only returns `loss`, because the gradients exist already."""
    left = [loss]

    def closure() -> Any:
        if not left:
            raise RuntimeError(
                "this optimizer computes several gradients per step, and local steps check one; use another optimizer"
            )
        return left.pop()

    return closure


def _watch_other_optimizers(hook: LocalHook) -> RemovableHandle:
    """Call the hook before each step of any optimizer, without keeping the hook alive."""
    held = weakref.ref(hook)

    def before_update(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if (hook := held()) is not None:
            hook._check_other(optimizer)

    handle = register_optimizer_step_pre_hook(before_update)
    weakref.finalize(hook, handle.remove)
    return handle
