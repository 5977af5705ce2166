"""The schema: every column that a run writes, declared once; what was asked for is declared by its option.

Headings, `results/README.md`, `bench compare` and regression gates read their columns from here.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from bench.core.collectives_config import CollectivesConfig
from bench.core.compressors_config import CompressorsConfig
from bench.core.config import RunConfig
from bench.core.configuration import Configuration

# Whole numbers up to here are exact as floats, as other tools read them; of squares of the others a mean can be taken.
_LARGEST = {int: 2**53, float: 1e100}

Direction = Literal["", "higher", "lower"]


@dataclasses.dataclass(frozen=True, eq=False)
class Column:
    """One column of a CSV file; each is declared once, so that it equals only itself.

    Attributes:
        name: the column's heading; the same word is the JSON key and the dataclass field.
        group: heading under which the documentation lists it.
        type: Python type of a filled cell; an empty cell means "not measured" or "does not apply".
        unit: unit of a number, empty for texts and plain counts.
        better: which direction a user wants, where there is one.
        deterministic: equal in two runs of one configuration and seed on one machine.
        meaning: one line.
        absent: what a row means whose file lacks the column.
    """

    name: str
    group: str
    type: type
    unit: str
    better: Direction
    deterministic: bool
    meaning: str
    absent: Any = None


def _column(
    group: str,
    name: str,
    type_: type,
    meaning: str,
    *,
    unit: str = "",
    better: Direction = "",
    fixed: bool = True,
    absent: Any = None,
) -> Column:
    return Column(name, group, type_, unit, better, fixed, meaning, absent)


def _identity(name: str, type_: type, meaning: str, **more: Any) -> Column:
    return _column("identity", name, type_, meaning, **more)


def _speed(name: str, meaning: str, **more: Any) -> Column:
    return _column("speed", name, float, meaning, **{"unit": "s", "better": "lower", "fixed": False, **more})


def _wire(name: str, meaning: str, **more: Any) -> Column:
    return _column("wire", name, float, meaning, **{"unit": "bytes", "better": "lower", **more})


def declared_columns(configuration: type[Configuration]) -> Iterator[Column]:
    """The columns that say what was asked for."""
    for option in configuration.options():
        if option.recorded.column:
            yield _identity(
                option.name, option.cell_type, option.meaning, unit=option.recorded.unit, absent=option.recorded.absent
            )


METRICS: tuple[Column, ...] = (
    _identity("run_id", str, "the run's folder name", fixed=False),
    _identity("digest", str, "hash of everything that identifies the experiment, defaults filled in"),
    _identity("config_id", str, "the digest without the seed: what compare groups by"),
    *declared_columns(RunConfig),
    _column("progress", "status", str, "ok, running, failed, timeout or interrupted", fixed=False),
    _column("progress", "error", str, "the failure in one sentence, empty when ok", fixed=False),
    _column("progress", "epoch", float, "epochs finished, with the fraction of the current one"),
    _column("progress", "step", int, "optimizer steps done"),
    _column(
        "progress",
        "resumes",
        int,
        "times that the run had gone on from a checkpoint, or begun again after a loss, before this row",
        fixed=False,
        absent=0,
    ),
    _column("progress", "samples", int, "training samples used so far, all ranks together"),
    _column(
        "progress",
        "train_time_s",
        float,
        "training time; evaluation and set-up are not counted",
        unit="s",
        better="lower",
        fixed=False,
    ),
    _column(
        "progress",
        "wall_time_s",
        float,
        "time since the workers started, everything counted",
        unit="s",
        better="lower",
        fixed=False,
    ),
    _column("quality", "train_loss", float, "mean training loss since the previous row", better="lower"),
    _column(
        "quality",
        "train_accuracy",
        float,
        "share of 1000 of the training samples (of all, where there are fewer) classified right as the test set is: "
        "the same ones at every evaluation, without augmentation, not on the training clock",
        better="higher",
    ),
    _column("quality", "test_loss", float, "mean loss over the test set", better="lower"),
    _column("quality", "test_accuracy", float, "share of the test set classified right, 0 to 1", better="higher"),
    _column(
        "quality",
        "time_to_target_s",
        float,
        "train_time_s of the first evaluation at or above the target; empty: missed",
        unit="s",
        better="lower",
        fixed=False,
    ),
    _speed(
        "samples_per_s",
        "sum over ranks of each one's samples over its own step time, timed steps",
        unit="samples/s",
        better="higher",
    ),
    _speed("step_time_s", "median time of a step"),
    _speed("step_time_p95_s", "95th percentile of the time of a step"),
    _speed("forward_backward_s", "forward and backward without the wait for the network, mean per step"),
    _speed("encode_s", "compressing and decompressing, mean per step (overlaps with backward)"),
    _speed("exchange_s", "the exchange's busy time, encoding included, mean per step (overlaps with backward)"),
    _speed("exposed_s", "what a step waited for after backward's own work had ended, mean per step"),
    _speed(
        "cpu_s_per_step",
        "CPU time of a rank per timed step, its exchange thread included, mean over ranks; other work on the machine "
        "changes it less than the wall clock",
    ),
    _wire("payload_bytes_per_step", "gradient bytes sent per rank and step, mean over ranks"),
    _wire("payload_bytes_max_per_step", "the same for the busiest rank"),
    _column("wire", "payload_bytes_source", str, "counted, or formula where the backend hides the wire"),
    _wire("control_bytes_per_step", "bytes of flags, sizes and commands sent per rank and step", fixed=False),
    _wire("state_bytes_per_step", "bytes of an optimizer's state sent per rank and step: factors of kfac", absent=0.0),
    _wire(
        "activation_bytes_per_step",
        "bytes of activations and their gradients sent from device to device, per replica and step",
        absent=0.0,
    ),
    _wire("dense_bytes_per_step", "bytes of one dense fp32 gradient", better=""),
    _wire(
        "compression_ratio",
        "bytes that a dense fp32 ring all-reduce would send / payload bytes sent",
        unit="",
        better="higher",
    ),
    _column(
        "wire",
        "chosen",
        str,
        "pairs that auto sends gradients through now, with shares of the elements where there are several (empty: the "
        "run names its pair); layers.csv says which layer and why",
    ),
    _wire(
        "wire_bytes_per_step", "bytes sent per rank and step by the interface's counters (virtual hosts)", fixed=False
    ),
    _wire("wire_bytes_received_per_step", "bytes received, likewise", fixed=False),
    _column(
        "wire",
        "wire_headers",
        str,
        "exact: counters saw real frames; estimated: segmentation offload was on",
        fixed=False,
    ),
    _wire("messages_per_step", "messages sent per rank and step", unit=""),
    _wire("effective_density", "entries sent / entries of the gradient", unit="", better=""),
    _wire(
        "support_overlap",
        "share of entries that two ranks both sent in the row's last step, mean over pairs; at up to 2^19 positions",
        unit="",
        better="",
    ),
    _wire(
        "measured_bandwidth_bps",
        "rate between two hosts measured before training",
        unit="bit/s",
        better="",
        fixed=False,
    ),
    _column(
        "wire",
        "link_warnings",
        str,
        "where a measured link is more than 10 % off, or otherwise not what was asked",
        fixed=False,
    ),
    _wire(
        "measured_rtt_s", "round trip time between two hosts measured before training", unit="s", better="", fixed=False
    ),
    _wire(
        "measured_loss_ratio",
        "share of datagrams between hosts that were lost before training (where links lose frames on purpose)",
        unit="",
        better="",
        fixed=False,
    ),
    _wire(
        "forwarder_cpu_share",
        "share of one core that the forwarder between virtual hosts took during the steps (empty: none was needed)",
        unit="",
        fixed=False,
    ),
    _column("health", "replicas_in_sync", bool, "parameters are equal bit for bit on all ranks"),
    _column(
        "health",
        "skipped_steps",
        int,
        "steps dropped because of a non-finite gradient, on the rank that dropped most",
        better="lower",
    ),
    _column(
        "health",
        "staleness_mean",
        float,
        "versions of the server's parameters that a gradient was behind when it was applied, mean over ranks and steps "
        "(empty: nothing is stale)",
        fixed=False,
    ),
    _column("health", "staleness_max", float, "the same, maximum", fixed=False),
    _column(
        "health",
        "factor_fallbacks",
        int,
        "factors that were sent in another form than asked for, or factored with more damping, so far (empty: no kfac)",
        better="lower",
    ),
    _column(
        "health",
        "factor_updates_skipped",
        int,
        "updates of the factors that were left out because one was not finite, so far (empty: no kfac)",
        better="lower",
    ),
    _column(
        "health",
        "peak_rss_bytes",
        int,
        "largest resident memory of any rank",
        unit="bytes",
        better="lower",
        fixed=False,
    ),
    _column("origin", "host", str, "machine name", fixed=False),
    _column("origin", "cpu", str, "processor model and number of usable cores", fixed=False),
    _column("origin", "torch_version", str, "version of torch"),
    _column(
        "origin",
        "kernels",
        str,
        "loops over elements: native, in C; triton, on GPUs; reference, in torch and numpy; all with the same results",
        absent="reference",
    ),
    _column("origin", "git_sha", str, "commit of the tool's checkout, where there is one"),
    _column("origin", "git_dirty", bool, "that checkout had uncommitted changes"),
    _column("origin", "started_at", str, "start of the run, UTC", fixed=False),
)

LAYERS: tuple[Column, ...] = (
    _identity("run_id", str, "the run's folder name", fixed=False),
    _identity("epoch", float, "epochs finished at this evaluation"),
    _identity("step", int, "optimizer steps done at this evaluation"),
    _identity("layer", str, "the parameter's name"),
    _column("layer", "kind", str, "conv, linear, norm, bias or other"),
    _column("layer", "numel", int, "number of elements"),
    _column("layer", "payload", str, "kind of payload that carried it; of several messages in a step, joined by +"),
    _column("layer", "payload_bytes", float, "encoded bytes per step, mean since the previous row", unit="bytes"),
    _column("layer", "density_min", float, "smallest share of entries sent in a message, since the previous row"),
    _column("layer", "density_mean", float, "mean share of entries sent"),
    _column("layer", "density_max", float, "largest share of entries sent"),
    _column(
        "layer",
        "density_wanted",
        float,
        "mean share of entries that the compressor meant to send (empty: it sets none for the layer)",
    ),
    _column(
        "layer",
        "density_of_wanted_min",
        float,
        "smallest share sent / share wanted at one step on rank 0; a whole entry at least is sent, however little is "
        "wanted, and of zeros nothing",
    ),
    _column("layer", "density_of_wanted_max", float, "largest share sent / share wanted at one step, likewise"),
    _column("layer", "residual_norm", float, "L2 norm of the error-feedback residual on rank 0 (empty: none kept)"),
    _column(
        "layer",
        "encode_s",
        float,
        "time to encode it, mean per step (a bucket's time is shared by size)",
        unit="s",
        better="lower",
        fixed=False,
    ),
    _column("layer", "chosen", str, "pair that auto sends it through now (empty: the run names its pair)"),
    _column("layer", "chosen_because", str, "why this pair: what was measured when it was chosen"),
)

LINKS: tuple[Column, ...] = (
    _identity("run_id", str, "the run's folder name", fixed=False),
    _identity("epoch", float, "epochs finished at this evaluation"),
    _identity("step", int, "optimizer steps done at this evaluation"),
    _identity("source", str, "who sent: the host or a device"),
    _identity("to", str, "to whom"),
    _column(
        "wire",
        "activation_bytes",
        float,
        "bytes of mini-batches, activations and their gradients per step, mean since the previous row",
        unit="bytes",
        better="lower",
    ),
)

COLLECTIVES: tuple[Column, ...] = (
    _identity("collective", str, "collective"),
    _identity("payload", str, "compressor that made the payload; none: the tensor as it is"),
    _identity("size_bytes", int, "bytes of the tensor that is summed, before compression", unit="bytes"),
    _identity("count", int, "its elements"),
    *declared_columns(CollectivesConfig),
    _column(
        "network",
        "measured_bandwidth_bps",
        float,
        "slowest rate between two hosts, measured before the first sum",
        unit="bit/s",
        fixed=False,
    ),
    _column(
        "network",
        "measured_rtt_s",
        float,
        "round trip time between two hosts, likewise: median over hosts",
        unit="s",
        fixed=False,
    ),
    _column(
        "network",
        "measured_loss_ratio",
        float,
        "share of datagrams that were lost, likewise (where links lose frames on purpose)",
        fixed=False,
    ),
    _column(
        "network",
        "forwarder_cpu_share",
        float,
        "share of one core that the forwarder between virtual hosts took during the sums (empty: none was needed)",
        better="lower",
        fixed=False,
    ),
    _column("network", "wire_headers", str, "exact: the kernel counted real frames; estimated: offload was on"),
    _column(
        "network",
        "link_warnings",
        str,
        "where a measured link is more than 10 % off, or otherwise not what was asked",
        fixed=False,
    ),
    _column(
        "speed",
        "time_p50_s",
        float,
        "time of one sum on the slowest rank, until it lies in a dense tensor: median of a round, median over rounds",
        unit="s",
        better="lower",
        fixed=False,
    ),
    _column("speed", "time_p95_s", float, "95th percentile likewise", unit="s", better="lower", fixed=False),
    _column("speed", "algbw_Bps", float, "size_bytes / time_p50_s", unit="bytes/s", better="higher", fixed=False),
    _column(
        "speed",
        "busbw_Bps",
        float,
        "algbw_Bps x 2(n-1)/n for n ranks: for dense payloads, comparable with the rate of a link",
        unit="bytes/s",
        better="higher",
        fixed=False,
    ),
    _column(
        "health",
        "num_wrong",
        int,
        "elements that are not what a serial sum in the documented order gives (native: not within its error bound), "
        "all ranks and rounds together",
        better="lower",
    ),
    _column("wire", "messages", float, "messages sent per sum, mean over ranks (empty: the backend hides them)"),
    _column(
        "wire",
        "bytes_sent",
        float,
        "bytes sent per sum, mean over ranks (native: by the formula 2(n-1)/n)",
        unit="bytes",
        better="lower",
    ),
    _column(
        "wire",
        "wire_bytes_sent",
        float,
        "bytes of whole frames sent per sum and host, mean over hosts, counted by the kernel (virtual hosts only): "
        "headers and acknowledgements are in it, the barrier between sums is not",
        unit="bytes",
        better="lower",
        fixed=False,
    ),
    _column(
        "speed",
        "of_limit",
        float,
        "time in which the busiest link could have carried its frames / time_p50_s (virtual hosts with a rate only)",
        better="higher",
        fixed=False,
    ),
)

COMPRESSORS: tuple[Column, ...] = (
    _identity("compressor", str, "compressor"),
    _identity("numel", int, "elements of the gradient"),
    _identity("dense_bytes", int, "bytes of the gradient in fp32", unit="bytes"),
    *declared_columns(CompressorsConfig),
    _column(
        "size",
        "packed_bytes",
        float,
        "packed payload with headers, all buckets, mean over turns",
        unit="bytes",
        better="lower",
    ),
    _column("size", "compression_ratio", float, "dense_bytes / packed_bytes", better="higher"),
    _column("size", "bits_per_element", float, "8 x packed_bytes / numel", unit="bits", better="lower"),
    _column("size", "effective_density", float, "entries sent / entries of the gradient"),
    _column(
        "loss",
        "relative_error",
        float,
        "norm(x - C(x)) / norm(x), mean over turns; x: the gradient plus what earlier turns kept, C(x): what arrives",
        better="lower",
    ),
    _column("loss", "cosine", float, "cosine of the angle between x and C(x), mean over turns", better="higher"),
    _column(
        "loss",
        "contraction_seen",
        float,
        "norm(x - C(x))^2 / norm(x)^2, mean over turns, of the layer or bucket where it is largest",
        better="lower",
    ),
    _column(
        "loss",
        "contraction_proved",
        float,
        "the largest it can be for any x, in expectation for methods that draw at random (1: nothing of x may arrive; "
        "empty: there is no such bound, or none is proved)",
    ),
    _column(
        "speed",
        "encode_s",
        float,
        "time until the payload is packed, residual added and kept; of several rounds all, median over turns",
        unit="s",
        better="lower",
        fixed=False,
    ),
    _column("speed", "encode_Bps", float, "dense_bytes / encode_s", unit="bytes/s", better="higher", fixed=False),
    _column(
        "speed",
        "decode_s",
        float,
        "time from one packed payload to the update, median over turns",
        unit="s",
        better="lower",
        fixed=False,
    ),
    _column("speed", "decode_Bps", float, "dense_bytes / decode_s", unit="bytes/s", better="higher", fixed=False),
    *(column for column in METRICS if column.group == "origin"),
)

METRICS_BY_NAME: Mapping[str, Column] = {column.name: column for column in METRICS}


def to_cells(values: Mapping[str, Any], columns: tuple[Column, ...] = METRICS) -> dict[str, str]:
    """One row as CSV cells; None and NaN become empty cells, flags ``true`` and ``false``.

    Raises:
        KeyError: a value whose column the schema does not declare (a programming error).
    """
    unknown = set(values) - {column.name for column in columns}
    if unknown:
        raise KeyError(f"columns not in the schema: {sorted(unknown)}")
    return {column.name: _cell(values.get(column.name)) for column in columns}


def from_cell(cell: str, type_: type) -> Any:
    """The value of a cell of this type, None where it is empty.

    Raises:
        ValueError: the cell does not hold the type.
    """
    if cell == "":
        return None
    if type_ is bool:
        if cell.lower() not in ("true", "false"):
            raise ValueError(f"'{cell}' is neither true nor false")
        return cell.lower() == "true"
    if type_ is str:
        return cell
    number = float(cell)
    if type_ is float and not math.isfinite(number):
        return None  # what overflowed is no measured value
    if not abs(number) <= _LARGEST[type_]:
        raise ValueError(f"'{cell}' is no number, or larger than anything that can be measured")
    return type_(number)


def _cell(value: Any) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    return repr(value) if isinstance(value, float) else str(value)
