"""Train with compressed gradients in your own script.

`attach` is for a model in DistributedDataParallel, `attach_fsdp` and `attach_reduce_scatter` are for a model in FSDP2,
and `attach_local` trains with local steps. `gradwire.optim` has optimizers that send less than whole gradients, and
`gradwire.trainers` has adapters for Lightning, Accelerate and Transformers.

Each name is imported only when it is first used, so `import gradwire` itself is fast.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gradwire.ddp.attach import attach
    from gradwire.fsdp.attach import attach_fsdp
    from gradwire.fsdp.reduce_scatter import attach_reduce_scatter
    from gradwire.local.attach import attach_local
else:
    from gradwire.hidden_packages import on_first_use

    __getattr__ = on_first_use(
        __name__,
        {
            "attach": "gradwire.ddp.attach",
            "attach_fsdp": "gradwire.fsdp.attach",
            "attach_local": "gradwire.local.attach",
            "attach_reduce_scatter": "gradwire.fsdp.reduce_scatter",
        },
    )


__all__ = ["attach", "attach_fsdp", "attach_local", "attach_reduce_scatter"]
