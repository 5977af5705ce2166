"""Run a training script unchanged in one rank, and record when the parts of its steps begin and end.

`bench profile` starts this file with torchrun: `torchrun ... recorder.py FOLDER WARMUP STEPS SCRIPT [ARGUMENTS...]`.
The times come from hooks on DDP, on backward and on the optimizers. When enough steps are recorded, every rank writes
`rank-R.safetensors` into the folder and the script is ended. Until then, this file imports nothing but torch, so that a
module of the script cannot be confused with a module of this project that has the same name.
"""

import functools
import os
import runpy
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

# Wall-clock seconds, and CPU seconds of the thread that computes; CPU seconds of gloo's threads do not count.
Moment = tuple[float, float]


class Finished(BaseException):
    """Raised to end the script, because enough steps are recorded or because the script cannot be profiled."""


def now() -> Moment:
    """Return the current moment: wall-clock seconds, and CPU seconds of this thread."""
    return time.perf_counter(), time.thread_time()


class ScriptProfiler:
    """Record the steps of the only DDP model of this process.

    A step lasts from the end of one update to the end of the next update.

    Args:
        warmup: number of steps at the beginning that are not recorded.
        steps: number of steps to record after the warm-up.

    Attributes:
        refusal: a sentence that says why the script cannot be profiled; empty if it can.
        done: the recorded steps; each has, by name, the moments at which batch, forward, backward and the wait for DDP
            ended, the moments at which each bucket was ready, and the number of backward passes.
    """

    def __init__(self, warmup: int, steps: int) -> None:
        self._most = warmup + steps
        self._warmup = warmup
        self.refusal = ""
        self.done: list[dict[str, Any]] = []
        self._ddp: DistributedDataParallel | None = None
        self._has_hook = False
        self._open: dict[str, Any] = {}
        self._updated: Moment | None = None
        self._samples = 0
        self._optimizer = ""
        self._buckets: list[list[int]] = []
        self._gradients: list[list[torch.Tensor]] = []

    def install(self) -> None:
        """Patch DDP and backward, so that every DDP model that is made from now on is recorded."""
        made, registered, backward = (
            DistributedDataParallel.__init__,
            DistributedDataParallel.register_comm_hook,
            torch.autograd.backward,
        )

        @functools.wraps(made)
        def make(ddp: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
            if self._ddp is not None:
                self._refuse("wraps two models in DistributedDataParallel; profile a script that trains one")
            made(ddp, *args, **kwargs)
            self._ddp = ddp
            ddp.register_forward_pre_hook(self._before_forward, with_kwargs=True)

        @functools.wraps(registered)
        def register(ddp: DistributedDataParallel, state: object, hook: Any) -> None:
            self._has_hook = True

            @functools.wraps(hook)  # DDP checks the hook's signature
            def timed(given: object, bucket: Any) -> Any:
                self._take(bucket)
                return hook(given, bucket)

            registered(ddp, state, timed)

        @functools.wraps(backward)
        def timed_backward(*args: Any, **kwargs: Any) -> None:
            begun, ready = now(), len(self._open.get("ready", ()))
            backward(*args, **kwargs)
            if self._open:
                self._open["micro_steps"] += 1
            if self._open and len(self._open["ready"]) > ready:  # not inside no_sync
                if ready:
                    self._refuse(
                        "exchanges gradients several times before an update; put all but the last backward inside "
                        "no_sync()"
                    )
                self._open |= {"backward": begun, "exchanged": now()}

        setattr(DistributedDataParallel, "__init__", make)  # noqa: B010 - mypy refuses to assign a method
        setattr(DistributedDataParallel, "register_comm_hook", register)  # noqa: B010
        setattr(torch.autograd, "backward", timed_backward)  # noqa: B010
        register_optimizer_step_post_hook(self._after_update)

    def finish(self, folder: Path) -> None:
        """Write what was recorded to `rank-R.safetensors`; every rank must call this method.

        If the script cannot be profiled, the file says why instead.
        """
        self._close()
        if not self.refusal and self._ddp is None:
            self.refusal = "does not use DistributedDataParallel, whose buckets are profiled; wrap the model in it"
        elif not self.refusal and len(self.done) < self._most:
            self.refusal = (
                f"ended after {len(self.done)} steps, but {self._most} are needed; let the script train longer, or "
                "give fewer --steps"
            )
        content: dict[str, Any] = {"refusal": self.refusal}
        if not self.refusal and self._ddp is not None:
            from compressors.layer import layers_of

            layers = layers_of(self._ddp.module)
            place = {id(layer.weight): layer.id for layer in layers}
            content |= {
                "steps": self.done[self._warmup :],
                "layers": [{name: getattr(layer, name) for name in _FIELDS} for layer in layers],
                "buckets": [[place[parameter] for parameter in bucket] for bucket in self._buckets],
                "gradients": self._gradients,
                "samples": self._samples,
                "optimizer": self._optimizer,
                "threads": torch.get_num_threads(),
                "bucket_mb": self._ddp.bucket_bytes_cap / 2**20,
            }
        from gradwire.exchange.packed_state import PackedState  # not earlier: the script may have a module of that name

        PackedState(content).save(folder / f"rank-{os.environ['RANK']}.safetensors")

    def _refuse(self, sentence: str) -> None:
        self.refusal = sentence
        raise Finished

    def _before_forward(self, ddp: Any, inputs: tuple[Any, ...], named_inputs: dict[str, Any]) -> None:
        if not torch.is_grad_enabled():  # an evaluation
            return
        self._close()
        if len(self.done) == self._most:
            dist.barrier(ddp.process_group)
            raise Finished
        if not self._has_hook:
            self._check(ddp)
            ddp.register_comm_hook(ddp.process_group, _as_ddp_does)
        if not self._open:
            self._open = {"updated_before": self._updated, "forward": now(), "ready": [], "micro_steps": 0}
            self._buckets, self._gradients, self._samples = [], [], 0
        tensors = (value for value in (*inputs, *named_inputs.values()) if isinstance(value, torch.Tensor))
        first = next((tensor for tensor in tensors if tensor.dim()), None)
        self._samples += 0 if first is None else len(first)

    def _check(self, ddp: DistributedDataParallel) -> None:
        for parameter in ddp.module.parameters():
            if not parameter.is_cpu:
                self._refuse("trains on a GPU, whose steps cannot be predicted; profile a training on CPUs")
            if parameter.requires_grad and parameter.dtype != torch.float32:
                self._refuse(f"trains parameters in {parameter.dtype}; only torch.float32 can be predicted")

    def _take(self, bucket: Any) -> None:
        """Record that a bucket is ready, before it is exchanged."""
        if not self._open:
            return
        self._open["ready"].append(now())
        self._buckets.append([id(parameter) for parameter in bucket.parameters()])
        if len(self.done) + 1 == self._most:
            self._gradients.append([gradient.detach().flatten().clone() for gradient in bucket.gradients()])

    def _after_update(self, optimizer: Optimizer, *_: Any) -> None:
        self._updated = now()
        self._optimizer = type(optimizer).__name__.lower()
        if "exchanged" in self._open:
            self._open["updated"] = self._updated

    def _close(self) -> None:
        """Record the current step if its update has ended; the first step does not count, as its start is unknown."""
        if "updated" in self._open:
            if self._open["updated_before"] is not None and len(self.done) < self._most:
                self.done.append(self._open)
            self._open = {}


_FIELDS = ("id", "name", "shape", "kind", "numel", "filter_axis", "position")


def _as_ddp_does(
    group: dist.ProcessGroup,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket exactly as DDP does without a hook: multiply by 1 / ranks, then sum."""
    work = dist.all_reduce(bucket.buffer().mul_(1.0 / group.size()), group=group, async_op=True)
    averaged: torch.futures.Future[torch.Tensor] = work.get_future().then(lambda future: future.value()[0])
    return averaged


def main(folder: Path, warmup: int, steps: int, script: Path, arguments: list[str]) -> None:
    """Run the script as `python SCRIPT ARGUMENTS` would, until enough steps are recorded."""
    recorder = ScriptProfiler(warmup, steps)
    recorder.install()
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.resolve().parent))
    try:
        runpy.run_path(str(script), run_name="__main__")
    except Finished:
        pass
    except SystemExit as ended:
        if ended.code:
            raise
    recorder.finish(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]), sys.argv[5:])
