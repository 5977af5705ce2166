"""What a traced network must be for its operations to be spread over devices."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from bench.core.errors import UsageError
from bench.datasets.base import IMAGE_SIZE
from bench.strategies.placement.tracing import IN_PLACE


def check_values(traced: fx.GraphModule, image_size: int = IMAGE_SIZE) -> None:
    """Run the network on tensors without contents, and look at what each operation makes.

    Args:
        traced: a network whose tensors lie on the meta device.
        image_size: side of the square images that it takes.

    Raises:
        UsageError: an operation makes something else than one tensor, or changes what others hold too.
    """
    _Looking(traced).run(torch.empty(2, 3, image_size, image_size, device="meta"))


class _Looking(fx.Interpreter):
    def run_node(self, n: fx.Node) -> Any:
        if self._is_seen_elsewhere(n):
            raise UsageError(
                f"the model's operation {n.name} changes in place what its other layers or its state hold too, so its "
                "layers cannot be placed by type; use --strategy ddp, or an operation that makes a new tensor"
            )
        value = super().run_node(n)
        if n.op != "output" and not isinstance(value, torch.Tensor):
            raise UsageError(
                f"the model's operation {n.name} makes a {type(value).__name__} instead of one tensor, so its layers "
                "cannot be placed by type; use --strategy ddp"
            )
        return value

    def _is_seen_elsewhere(self, n: fx.Node) -> bool:
        """Whether a change in place reaches more than later uses of the same value, which have the new one."""
        if n.op == "call_function" and getattr(n.target, "__name__", "").endswith("_"):
            return True
        changed = n.meta.get(IN_PLACE)
        if changed is None or changed.op == "get_attr":
            return changed is not None
        memory = self.env[changed].untyped_storage()._cdata
        sharing = [node for node, value in self.env.items() if value.untyped_storage()._cdata == memory]
        return any(user is not n and user not in self.env for node in sharing for user in node.users)
