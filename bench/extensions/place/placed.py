"""Placed: a host and its devices, each a process, exchange tensors through shared memory; layers go to devices by type.

The host loads the model onto the devices, and sends them mini-batches and commands. Activations and their gradients go
directly from device to device, through shared memory. With by=type one replica (copy of the network) is spread
over all devices, each operation on a device whose role suits it; with by=data every device holds a replica; with
by=both every pool (devices of different roles) holds a replica.

Source: a patent on a heterogeneous training system around CXL (2022-11): roles by layer type in paragraphs 39-42, the
host's part in 45-51, triggers in 58-59.
Differs: devices are processes on the CPU, and CXL's pool of memory is this machine's shared memory; CXL itself is not
measured.
`bench place` predicts the times on real links.
"""

import dataclasses
from pathlib import Path
from typing import Annotated, ClassVar, Literal, cast

import torch.distributed as dist
from torch import nn
from typing_extensions import Doc, override

from bench.core import spec
from bench.core.config.run import RunConfig
from bench.core.config.syntax import Straggler
from bench.core.errors import UsageError
from bench.datasets.base import Dataset
from bench.extensions.place.assignment import ActivationPolicy, Plan, Split, check_values
from bench.extensions.place.catalog import SHM, Catalog, folders
from bench.extensions.place.device import DeviceProcess, Stage
from bench.extensions.place.host import HostSum, HostTraining
from bench.extensions.place.messages import HOST_RANK
from bench.extensions.place.shared_memory import SharedMemoryTransport
from bench.extensions.place.topology import Topology
from bench.optimizers.base import Optimizer
from bench.strategies.base import BoundStrategy, CommandedRank, Setup, Strategy
from collectives.allreduce import Native
from collectives.base import Collective
from collectives.options import raise_first
from collectives.pool import Pool
from collectives.refusals import Refusal
from compressors.base import Compressor, DdpHook
from compressors.layer import layers_of
from gradwire.exchange.communicator import CompressedCommunicator, own_transport

# Ring buffer between two processes: large enough for the activations of a usual mini-batch in one piece.
RING_BYTES = 2**22


@dataclasses.dataclass(kw_only=True)
class Placed(Strategy):
    """Train with a host process and device processes of the roles gpu, fpga, asic, dpu and cpu.

    Bytes: an activation is sent once to every device that uses it but did not compute it, and each operation there
        sends back one gradient; the collective sums gradients among the devices that hold the same part of the model.
    """

    default_collectives: ClassVar[tuple[str, ...]] = ("pool",)

    by: Annotated[
        Split, Doc("type: one replica over all devices; data: one on each device; both: one over each pool of roles")
    ] = "type"
    devices: Annotated[str | None, Doc("device file (TOML): host, devices, links")] = None
    activations: Annotated[
        ActivationPolicy,
        Doc("role that runs activations: asic, dpu, turns (both alternately); producer: where the input is made"),
    ] = "asic"
    merge: Annotated[
        Literal["devices", "host"], Doc("who adds the replicas' gradients: the devices by --collective, or the host")
    ] = "devices"

    @override
    def complete(self, options: RunConfig) -> RunConfig:
        if self.devices is None:
            raise UsageError(
                f"{self.component_name} needs a device file; write {self.component_name}:devices=examples/cxl.toml"
            )
        topology = Topology.read(Path(self.devices))
        num_processes = 1 + len(topology.devices)
        raise_first(
            UsageError,
            *(
                (
                    device.torch_device != "cpu",
                    f"{self.devices}: {device.name} asks for the torch device '{device.torch_device}', and "
                    f"{self.component_name} computes on the CPU only; leave torch_device out",
                )
                for device in topology.devices
            ),
            (
                options.world_size not in (None, num_processes),
                f"--world-size {options.world_size} contradicts {self.devices}, which describes {num_processes} "
                "processes including the host; leave out --world-size",
            ),
        )
        Catalog.read(folders()).check(topology, SHM)
        return options.changed(
            world_size=num_processes,
            replicas=len(Plan.of(topology, self.by).ranks),
            strategy_input={"devices": dataclasses.asdict(topology)},
            rank_names=topology.rank_names(),
        )

    @override
    def refusals(
        self, config: RunConfig, compressor: Compressor, collective: Collective, optimizer: Optimizer
    ) -> list[Refusal]:
        name, method = self.component_name, compressor.component_name
        is_alone, straggler = config.replicas == 1, Straggler.parse(config.straggler) if config.straggler else None
        return [
            Refusal(
                config.cluster is not None or config.nnodes > 1,
                f"{name} connects processes by the memory of one machine, and --hosts and --nnodes ask for several",
                [{"hosts": None, "nnodes": None}],
            ),
            Refusal(
                config.device == "cuda", f"{name} computes in processes on the CPU, not on cuda", [{"device": "cpu"}]
            ),
            Refusal(
                config.bucket_mb is not None,
                f"--bucket-mb has no meaning with {name}, which sums a device's part as one message",
                [{"bucket_mb": None}],
            ),
            Refusal(
                config.accumulate > 1,
                f"{name} makes one step per batch, and --accumulate {config.accumulate} makes one of several",
                [{"accumulate": None}, {"strategy": "ddp"}],
            ),
            Refusal(
                config.clip_norm is not None,
                f"with {name} every device updates its own layers and knows no norm of the whole gradient, which "
                "--clip-norm limits",
                [{"clip_norm": 0}, {"strategy": "ddp"}],
            ),
            Refusal(config.amp != "none", f"{name} computes in fp32, and --amp asks for {config.amp}", [{"amp": None}]),
            Refusal(
                config.profile > 0,
                f"{name} computes in device processes, which --profile does not see",
                [{"profile": None}],
            ),
            Refusal(
                straggler is not None and straggler.rank == HOST_RANK,
                f"--straggler names rank {HOST_RANK}, which is the host and computes nothing",
                [{"straggler": straggler and str(dataclasses.replace(straggler, rank=HOST_RANK + 1))}],
            ),
            Refusal(
                is_alone and collective != Pool(),
                f"there is only one replica, so there are no gradients to sum, and --collective is {config.collective}",
                [{"collective": None}],
            ),
            Refusal(
                isinstance(collective, Native),
                f"{name} sums through memory, which no backend's own all-reduce does, and --collective is native",
                [{"collective": "pool"}, {"collective": "ring"}],
            ),
            Refusal(
                self.merge == "host" and collective != Pool(),
                f"{name}:merge=host adds at the host without a collective, and --collective is {config.collective}",
                [{"collective": None}],
            ),
            Refusal(
                self.merge == "host" and is_alone,
                "there is only one replica, so there are no gradients to sum and merge=host has no effect",
                [{"strategy.merge": None}],
            ),
            Refusal(
                self.by == "data" and self.activations != "asic",
                f"by=data runs the whole network on every device, so activations={self.activations} has no effect",
                [{"strategy.activations": None}],
            ),
            Refusal(
                isinstance(compressor, DdpHook),
                f"{method} works through DDP's communication hook, which {name} does not have",
                [{"strategy": "ddp"}, {"compressor": "none"}],
            ),
            Refusal(
                is_alone and method != "none",
                f"there is only one replica, so there are no gradients to sum and {method} would compress nothing",
                [{"strategy.by": "data"}, {"compressor": "none"}],
            ),
            Refusal(
                optimizer.needs_network,
                f"{optimizer.component_name} needs the whole network, which {name} splits up",
                [{"strategy": "ddp"}, {"optimizer": "sgd"}],
            ),
        ]

    def _plan(self, config: RunConfig) -> Plan:
        return Plan.of(Topology.from_dict(config.strategy_input["devices"]), self.by)

    @override
    def examine(self, config: RunConfig, model: nn.Module) -> list[str]:
        assignment, routes = self._plan(config).assign(model, self.activations)
        dataset: Dataset = spec.build("datasets", config.dataset)
        check_values(routes[0].traced, dataset.dummy_batch(2, "meta"))
        return list(assignment.notes)

    @override
    def bind(self, setup: Setup) -> BoundStrategy | CommandedRank:
        config = setup.config
        plan = self._plan(config)
        _, routes = plan.assign(setup.model, self.activations)
        transport = SharedMemoryTransport(own_transport(setup.device, config.timeout_s), ring_bytes=RING_BYTES)
        loop = cast(dist.ProcessGroup, dist.new_group([HOST_RANK]))  # every rank must call
        if dist.get_rank() == HOST_RANK:
            stages = {
                rank: Stage(route, index, transport, setup.device)
                for route in routes
                for index, rank in enumerate(route.ranks)
            }
            return HostTraining(config, setup.model, plan, stages, transport, loop)
        rank = dist.get_rank()
        replica, index = next((r, ranks.index(rank)) for r, ranks in enumerate(plan.ranks) if rank in ranks)
        stage = Stage(routes[replica], index, transport, setup.device)
        layer_of = {id(layer.weight): layer for layer in layers_of(setup.model)}
        reducer, optimizer = setup.make_reducer()
        channel = CompressedCommunicator(
            [layer_of[id(parameter)] for parameter in stage.parameters.values()],
            reducer,
            HostSum(transport) if self.merge == "host" else setup.collective,
            transport.view([ranks[index] for ranks in plan.ranks]),
        )
        return DeviceProcess(config, stage, replica, channel, transport, optimizer)
