"""Optimizers for your own script; some exchange moments, factors or single bits instead of gradients.

`Dion`, `DeMo`, `OneBitAdam`, `ZeroOneAdam` and `MaxAdaBelief` take each rank's own gradient, so the model is not in
DistributedDataParallel:

    optimizer = Dion(model, lr=0.02)
    for x, y in batches:
        loss_of(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.close()

`Muon`, `KFAC` and `AdaBelief` take gradients that are already averaged, by DistributedDataParallel with or without
`gradwire.attach`. Without a process group, every optimizer trains on one rank alone.

`examples/train_dion.py` is a complete script. Each name is imported when it is first used.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gradwire.optim.adabelief import AdaBelief, MaxAdaBelief
    from gradwire.optim.demo import DeMo
    from gradwire.optim.dion import Dion
    from gradwire.optim.kfac import KFAC
    from gradwire.optim.muon import Muon
    from gradwire.optim.onebit import OneBitAdam
    from gradwire.optim.zero_one import ZeroOneAdam
else:
    from gradwire.hidden_packages import on_first_use

    __getattr__ = on_first_use(
        __name__,
        {
            "AdaBelief": "gradwire.optim.adabelief",
            "DeMo": "gradwire.optim.demo",
            "Dion": "gradwire.optim.dion",
            "KFAC": "gradwire.optim.kfac",
            "MaxAdaBelief": "gradwire.optim.adabelief",
            "Muon": "gradwire.optim.muon",
            "OneBitAdam": "gradwire.optim.onebit",
            "ZeroOneAdam": "gradwire.optim.zero_one",
        },
    )


__all__ = ["KFAC", "AdaBelief", "DeMo", "Dion", "MaxAdaBelief", "Muon", "OneBitAdam", "ZeroOneAdam"]
