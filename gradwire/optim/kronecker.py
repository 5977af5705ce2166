"""Measure and exchange K-FAC's curvature: two small matrices per layer, whose Kronecker product approximates it.

For a layer with weights W [out, in], A = E[a a^T] is the second moment of the layer's inputs (with a 1 for the bias),
and G = E[g g^T] is the second moment of the gradients of its outputs. A convolution has one a and one g per position,
each divided by the number of positions.

Ranks exchange second moments in one of three forms, so that all ranks get the same Cholesky factor of each mean:

- `triangle`: lower triangles are summed; for each matrix, one rank factors the mean and broadcasts the packed factor.
- `cholesky`: each rank sends the factor of its own damped moment. Receivers restore the matrices and sum these, because
  the sum of factors is not the factor of the sum. Then every rank factors the mean itself.
- `dense`: whole matrices are summed, and every rank factors the mean itself.

Moments are multiplied by a power of two before they are sent, the same on all ranks, so that in fp16 sums do not
overflow and moments of small gradients do not become zero. A Cholesky factor is sent unscaled: its diagonal lies
between the square root of the damping and fp16's largest value, 65504.

Source: Martens, Grosse, "Optimizing neural networks with Kronecker-factored approximate curvature" (2015); Grosse,
Martens, "A Kronecker-factored approximate Fisher matrix for convolution layers" (2016); scaled as in kfac-pytorch
(kfac/layers/modules.py and utils.py, Pauloski et al. 2021), which also sums triangles (`symmetry_aware`); Pauloski et
al., "KAISA" (SC 2021), for the assignment of matrices to ranks.
"""

import collections
import math
from collections.abc import Iterator
from typing import cast

import torch
from torch import nn
from torch.nn import functional

from collectives.base import BoundCollective
from collectives.payloads import Bundle, CholeskyFactor, Payload
from collectives.payloads.symmetric import (
    Fallback,
    MatrixForm,
    encode_symmetric,
    positive_factor,
    relative_damping,
)
from collectives.schedule.rounds import leaves
from gradwire.exchange.communicator import CompressedCommunicator
from gradwire.exchange.report import StepReport

# For each layer A, then G: symmetric, fp32 [d, d].
Moments = list[torch.Tensor]


class KroneckerLayer:
    """A linear or convolution layer of a model, whose curvature K-FAC approximates by the matrices A and G.

    Attributes:
        module: the layer.
        parameters: the layer's weights and, if trainable, its bias; both have the outputs as first dimension.
        sizes: (number of rows of A, number of rows of G).
    """

    def __init__(self, module: nn.Linear | nn.Conv2d) -> None:
        self.module = module
        bias = module.bias
        self.parameters = [module.weight] if bias is None or not bias.requires_grad else [module.weight, bias]
        self.sizes = (sum(parameter[0].numel() for parameter in self.parameters), len(module.weight))

    def input_moment(self, x: torch.Tensor) -> torch.Tensor:
        """Return A, the second moment of one batch of the layer's inputs, fp32 [in, in].

        If the layer has a bias, `in` includes one more input, which is always 1.

        Args:
            x: the layer's inputs, [samples, ..., in], or for a convolution [samples, channels, height, width].
        """
        if isinstance(self.module, nn.Linear):
            rows, positions = x.float().reshape(-1, x.shape[-1]), 1
        else:
            module = self.module
            patches = functional.unfold(
                x.float(), module.kernel_size, module.dilation, cast(tuple[int, int], module.padding), module.stride
            )
            rows, positions = patches.transpose(1, 2).flatten(0, 1), patches.shape[2]
        if len(self.parameters) == 2:
            rows = torch.cat([rows, rows.new_ones(len(rows), 1)], dim=1)
        return second_moment(rows / positions)

    def output_moment(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return G, the second moment of the gradients of one batch of the layer's outputs, fp32 [out, out].

        Args:
            gradient: gradients of the outputs, [samples, ..., out], or for a convolution [samples, out, height, width].
        """
        if isinstance(self.module, nn.Linear):
            return second_moment(gradient.float().reshape(-1, gradient.shape[-1]))
        rows = gradient.float().flatten(2).transpose(1, 2).flatten(0, 1)  # one per position
        return second_moment(rows / gradient[0, 0].numel())

    @property
    def gradient(self) -> torch.Tensor:
        """Return the gradient of weights and bias as one matrix [out, in]; the last column is the bias's gradient."""
        return torch.cat([cast(torch.Tensor, p.grad).reshape(len(p), -1) for p in self.parameters], dim=1)

    def replace_gradient(self, matrix: torch.Tensor) -> None:
        """Overwrite the gradients of weights and bias with a matrix [out, in]; the last column is for the bias."""
        parts = matrix.split([parameter[0].numel() for parameter in self.parameters], dim=1)
        for parameter, part in zip(self.parameters, parts, strict=True):
            cast(torch.Tensor, parameter.grad).copy_(part.reshape(parameter.shape))


def kronecker_layers(model: nn.Module) -> Iterator[KroneckerLayer]:
    """Yield the trainable linear and convolution layers that K-FAC can precondition.

    K-FAC cannot precondition grouped convolutions, convolutions whose padding is not a number of zeros, or layers that
    share weights.
    """
    uses = collections.Counter(id(p) for module in model.modules() for p in module.parameters(recurse=False))
    for module in model.modules():
        if isinstance(module, nn.Conv2d) and (
            module.groups > 1 or module.padding_mode != "zeros" or isinstance(module.padding, str)
        ):
            continue
        is_shared = any(uses[id(parameter)] > 1 for parameter in module.parameters(recurse=False))
        if isinstance(module, nn.Linear | nn.Conv2d) and module.weight.requires_grad and not is_shared:
            yield KroneckerLayer(module)


def second_moment(rows: torch.Tensor) -> torch.Tensor:
    """Return the mean of r r^T over the rows r of a matrix [n, d], as an exactly symmetric matrix [d, d]."""
    moment = rows.T @ (rows / len(rows))
    return (moment + moment.T) / 2


class MomentCapture:
    """Computes K-FAC's matrices A and G of every layer during forward and backward; `moments` returns them afterwards.

    A is the second moment E[a a^T] of a layer's inputs, and G is the second moment of the gradients of its outputs.

    Args:
        model: the network. The network and its layers get hooks, which do almost nothing while `wanted` is False.

    Attributes:
        layers: the layers whose A and G are computed, in the model's order.
        wanted: set this attribute to True before each forward and backward for which A and G must be computed.
    """

    def __init__(self, model: nn.Module) -> None:
        self.layers = list(kronecker_layers(model))
        self.wanted = False
        self._clear()
        # The moments of a skipped step must not count in the next step.
        model.register_forward_pre_hook(lambda *_: self._clear())
        for index, layer in enumerate(self.layers):
            layer.module.register_forward_hook(lambda _, x, y, index=index: self._take(index, x[0], y))

    def moments(self) -> Moments:
        """Return every A and G of the last backward, in one list: A and G of layer 1, then of layer 2, and so on.

        If a layer was called several times, its A and G are means over the calls.
        """
        return [torch.stack(calls).mean(dim=0) if len(calls) > 1 else calls[0] for calls in self._calls]

    def _clear(self) -> None:
        # For each layer A of every call, then G of every call.
        self._calls: list[list[torch.Tensor]] = [[] for _ in range(2 * len(self.layers))]

    def _take(self, index: int, x: torch.Tensor, y: torch.Tensor) -> None:
        """Compute A from a layer's input `x`, and register a hook that computes G from the gradient of its output `y`.

        The hook is registered on the tensor `y`, because a backward hook of the module would forbid in-place
        activations.
        """
        if not (self.wanted and y.requires_grad):
            return
        layer = self.layers[index]
        of_inputs, of_outputs = self._calls[2 * index : 2 * index + 2]
        with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
            of_inputs.append(layer.input_moment(x))
        y.register_hook(lambda gradient: of_outputs.append(layer.output_moment(gradient)))


# The largest element of a sum stays below 2^15: fp16 ends at 65504, and is less exact below 2^-14.
_TOP_EXPONENT = 15
_LARGEST_SCALE = 120  # 2^120 is within fp32's range
_FORMS: dict[Fallback, MatrixForm] = {Fallback.TRIANGLE: "triangle", Fallback.DENSE: "dense"}


class MomentExchange:
    """Averages K-FAC's matrices A and G over ranks, and computes the Cholesky factors of the averages.

    The messages are counted under the purpose "state". `Moments` is a list of matrices A and G.

    Args:
        channel: connects the ranks, and reports times and the number of matrices that were not sent in the form
            `transfer`.
        collective: sums the matrices; must be bound to the channel's transport.
        transfer: the form in which matrices are sent: "triangle", "cholesky" or "dense".
        dtype: dtype of the values of moments and factors in messages.
    """

    def __init__(
        self, channel: CompressedCommunicator, collective: BoundCollective, transfer: MatrixForm, dtype: torch.dtype
    ) -> None:
        self._channel = channel
        self._transport = channel.transport
        self._collective = collective
        self._transfer: MatrixForm = transfer
        self._dtype = dtype

    def mean(self, moments: Moments) -> Moments | None:
        """Return each matrix's mean over ranks, equal bit for bit on all ranks; None if any matrix is not finite.

        Every rank must call this method.

        Raises:
            TransportError: a rank was lost, or did not answer in time.
        """
        with self._channel.exchanging():
            largest = torch.stack([moment.abs().max() for moment in moments]).tolist()
            any_bad, *largest = self._transport.all_reduce_scalars([not all(map(math.isfinite, largest)), *largest])
            self._channel.book(StepReport(counts={"factor_fallbacks": 0, "factor_updates_skipped": int(any_bad)}))
            return None if any_bad else self._scaled_mean(moments, largest)

    def factors(self, matrices: Moments, damping: float) -> list[torch.Tensor]:
        """Return the Cholesky factor L of each matrix + damping I, bit for bit equal on all ranks.

        Every rank must call this method.

        Args:
            matrices: symmetric matrices, equal on all ranks.
            damping: added to the diagonal; larger for a matrix that would not be positive definite otherwise.

        Raises:
            TransportError: a rank was lost, or did not answer in time.
        """
        if self._transfer == "triangle":
            with self._channel.exchanging():
                payloads = self._broadcast(matrices, damping)
        else:  # every rank factors all of them, and nothing is sent
            payloads = [encode_symmetric(matrix, "cholesky", damping=damping).payload for matrix in matrices]
        damping_sent = float(torch.tensor(damping))  # as fp32; more damping also counts as a fallback
        fallbacks = sum(not isinstance(each, CholeskyFactor) or each.damping > damping_sent for each in payloads)
        self._channel.book(StepReport(counts={"factor_fallbacks": fallbacks}))
        return [
            (
                payload.factor
                if isinstance(payload, CholeskyFactor)
                else positive_factor(payload.to_dense().view_as(matrix), floor=damping)  # the matrix was sent instead
            ).to(matrix.device)
            for payload, matrix in zip(payloads, matrices, strict=True)
        ]

    def mean_scalar(self, value: float) -> float:
        """Return the mean of `value` over ranks, bit for bit equal on all ranks; every rank must call this method.

        Raises:
            TransportError: a rank was lost, or did not answer in time.
        """
        with self._channel.exchanging():
            (total,) = self._transport.all_reduce_scalars([value], "sum")
        return total / self._transport.world_size

    def _scaled_mean(self, moments: Moments, largest: list[float]) -> Moments:
        """Return each matrix's mean over ranks; matrices are sent scaled, so that fp16 does not overflow.

        Args:
            moments: this rank's matrices.
            largest: for each matrix, its largest absolute value on any rank.
        """
        world_size = self._transport.world_size
        # Powers of two, because multiplying by these is exact.
        exponents = [_TOP_EXPONENT - math.frexp(world_size * value)[1] for value in largest]
        scales = [math.ldexp(1.0, max(-_LARGEST_SCALE, min(exponent, _LARGEST_SCALE))) for exponent in exponents]
        payloads = self._encoded([moment * scale for moment, scale in zip(moments, scales, strict=True)])
        with self._transport.counted_as("state"):
            total = self._collective.sum(Bundle(payloads), tuple(range(len(moments)))).to_dense()
        parts = zip(total.split([moment.numel() for moment in moments]), moments, strict=True)
        sums = [part.view_as(moment).to(moment.device) for part, moment in parts]
        # Sums of the two halves may have been rounded in different orders.
        return [(matrix + matrix.T) / 2 / (world_size * scale) for matrix, scale in zip(sums, scales, strict=True)]

    def _encoded(self, matrices: Moments) -> list[Payload]:
        """Return one payload per matrix, in a form that is the same on all ranks.

        The form is `transfer` or, if some rank cannot encode the matrix in this form, a form that works on all ranks.
        """
        own = [
            encode_symmetric(matrix, self._transfer, dtype=self._dtype, damping=relative_damping(matrix))
            for matrix in matrices
        ]
        worst = [Fallback(int(level)) for level in self._transport.all_reduce_scalars([e.fallback for e in own])]
        self._channel.book(StepReport(counts={"factor_fallbacks": sum(level > Fallback.NONE for level in worst)}))
        return [
            encode_symmetric(matrix, _FORMS[level], dtype=self._dtype).payload if level in _FORMS else encoded.payload
            for matrix, encoded, level in zip(matrices, own, worst, strict=True)
        ]

    def _broadcast(self, matrices: Moments, damping: float) -> list[Payload]:
        """Compute the Cholesky factors of the matrices that `owned` assigns to this rank, and exchange them.

        Return the packed factors of all matrices. The rank that computed a factor broadcasts it to the others.
        """
        shares = owned([len(matrix) for matrix in matrices], self._transport.world_size)
        mine = [  # before any factor is sent, so that all ranks factor at the same time
            encode_symmetric(matrices[index], "cholesky", dtype=self._dtype, damping=damping).payload
            for index in shares[self._transport.rank]
        ]
        received: dict[int, Payload] = {}
        with self._transport.counted_as("state"):
            for owner, indices in enumerate(shares):
                if indices:
                    own = Bundle(mine) if owner == self._transport.rank else None
                    share = self._collective.broadcast(own, owner, tuple(indices))
                    received.update(zip(indices, leaves(share), strict=True))
        return [received[index] for index in range(len(matrices))]


def owned(sizes: list[int], world_size: int) -> list[list[int]]:
    """Return, for each rank, the indices of the matrices that it factors, so that ranks have about equal work.

    Matrices are assigned from the largest to the smallest, each to the rank that has the least work so far.

    Args:
        sizes: number of rows of each matrix.
        world_size: number of ranks.
    """
    shares: list[list[int]] = [[] for _ in range(world_size)]
    costs = [0] * world_size
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        rank = costs.index(min(costs))
        shares[rank].append(index)
        costs[rank] += sizes[index] ** 3
    return shares
