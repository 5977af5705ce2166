"""metrics.csv: one row per evaluation of a run, and one at its end; each says by itself what was run, and on what."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from bench.core.config.run import RunConfig
from bench.core.schema.column import Column, declared_columns, identity, num_bytes, seconds

IDENTITY = (
    identity("run_id", str, "the run's folder name", deterministic=False),
    identity("digest", str, "hash of everything that identifies the experiment, defaults filled in"),
    identity("config_id", str, "the digest without the seed: what compare groups by"),
    *declared_columns(RunConfig),
)

_progress = partial(Column, "progress")

PROGRESS = (
    _progress("status", str, "ok, running, failed, timeout or interrupted", deterministic=False),
    _progress("error", str, "the failure in one sentence, empty when ok", deterministic=False),
    _progress("epoch", float, "epochs finished, with the fraction of the current one"),
    _progress("step", int, "optimizer steps done"),
    _progress(
        "resumes",
        int,
        "times that the run had gone on from a checkpoint, or begun again after a loss, before this row",
        deterministic=False,
        absent=0,
    ),
    _progress("samples", int, "training samples used so far, all ranks together"),
    seconds("progress", "train_time_s", "training time; evaluation and set-up are not counted"),
    seconds("progress", "wall_time_s", "time since the workers started, everything counted"),
)

_quality = partial(Column, "quality")

QUALITY = (
    _quality("train_loss", float, "mean training loss since the previous row", better="lower"),
    _quality(
        "train_accuracy",
        float,
        "share of 1000 of the training samples (of all, where there are fewer) classified right as the test set is: "
        "the same ones at every evaluation, without augmentation, not on the training clock",
        better="higher",
    ),
    _quality("test_loss", float, "mean loss over the test set", better="lower"),
    _quality("test_accuracy", float, "share of the test set classified right, 0 to 1", better="higher"),
    seconds(
        "quality", "time_to_target_s", "train_time_s of the first evaluation at or above the target; empty: missed"
    ),
)

_step_seconds = partial(seconds, "speed")

SPEED = (
    Column(
        "speed",
        "samples_per_s",
        float,
        "sum over ranks of each one's samples over its own step time, timed steps",
        unit="samples/s",
        better="higher",
        deterministic=False,
    ),
    _step_seconds("step_time_s", "median time of a step"),
    _step_seconds("step_time_p95_s", "95th percentile of the time of a step"),
    _step_seconds(
        "forward_backward_s",
        "forward and backward, and the batch made ready for them, without the wait for the network: their share of all "
        "timed steps x the median step, as the three that follow",
    ),
    _step_seconds("encode_s", "compressing and decompressing (overlaps with backward)"),
    _step_seconds("exchange_s", "the exchange's busy time, encoding included (overlaps with backward)"),
    _step_seconds(
        "exposed_s",
        "what a step waited for after backward's own work had ended; empty where its clock says more than the step's",
    ),
    _step_seconds(
        "cpu_s_per_step",
        "CPU time of a rank per timed step, its exchange thread included, mean over ranks; other work on the machine "
        "changes it less than the wall clock",
    ),
    Column(
        "speed",
        "other_cpu_share",
        float,
        "share of the usable cores' time that programs other than the run took while it trained; above 0.1 its times "
        "are longer than on an idle machine (empty: not known)",
        better="lower",
        deterministic=False,
    ),
)

_wire = partial(Column, "wire")
_wire_bytes = partial(num_bytes, "wire")

WIRE = (
    _wire_bytes(
        "payload_bytes_per_step", "gradient bytes sent per rank and step since the previous row, mean over ranks"
    ),
    _wire_bytes("payload_bytes_max_per_step", "the same for the busiest rank"),
    _wire("payload_bytes_source", str, "counted, or formula where the backend hides the wire"),
    _wire_bytes(
        "control_bytes_per_step", "bytes of flags, sizes and commands sent per rank and step", deterministic=False
    ),
    _wire_bytes(
        "state_bytes_per_step", "bytes of an optimizer's state sent per rank and step: factors of kfac", absent=0.0
    ),
    _wire_bytes(
        "activation_bytes_per_step",
        "bytes of activations and their gradients sent from device to device, per replica and step",
        absent=0.0,
    ),
    _wire("dense_bytes_per_step", float, "bytes of one dense fp32 gradient", unit="bytes"),
    _wire(
        "compression_ratio",
        float,
        "bytes that a dense fp32 ring all-reduce would send / payload bytes sent",
        better="higher",
    ),
    _wire(
        "chosen",
        str,
        "pairs that auto sends gradients through now, with shares of the elements where there are several (empty: the "
        "run names its pair); layers.csv says which layer and why",
    ),
    _wire_bytes(
        "wire_bytes_per_step",
        "bytes sent per rank and step by the interface's counters (virtual hosts)",
        deterministic=False,
    ),
    _wire_bytes("wire_bytes_received_per_step", "bytes received, likewise", deterministic=False),
    _wire(
        "wire_headers",
        str,
        "exact: counters saw real frames; estimated: segmentation offload was on",
        deterministic=False,
    ),
    _wire("messages_per_step", float, "messages sent per rank and step", better="lower"),
    _wire("effective_density", float, "entries sent / entries of the gradient"),
    _wire(
        "support_overlap",
        float,
        "share of entries that two ranks both sent in the row's last step, mean over pairs; at up to 2^19 positions",
    ),
    _wire(
        "measured_bandwidth_bps",
        float,
        "rate between two hosts measured before training",
        unit="bit/s",
        deterministic=False,
    ),
    _wire(
        "link_warnings",
        str,
        "where a measured link is more than 10 % off, or otherwise not what was asked",
        deterministic=False,
    ),
    _wire(
        "measured_rtt_s",
        float,
        "round trip time between two hosts measured before training",
        unit="s",
        deterministic=False,
    ),
    _wire(
        "measured_loss_ratio",
        float,
        "share of datagrams between hosts that were lost before training (where links lose frames on purpose)",
        deterministic=False,
    ),
    _wire(
        "forwarder_cpu_share",
        float,
        "share of one core that the forwarder between virtual hosts took during the steps (empty: none was needed)",
        better="lower",
        deterministic=False,
    ),
)

_health = partial(Column, "health")

HEALTH = (
    _health("replicas_in_sync", bool, "parameters are equal bit for bit on all ranks"),
    _health(
        "skipped_steps",
        int,
        "steps dropped because of a non-finite gradient, on the rank that dropped most",
        better="lower",
    ),
    _health(
        "staleness_mean",
        float,
        "versions of the server's parameters that a gradient was behind when it was applied, mean over ranks and steps "
        "(empty: nothing is stale)",
        deterministic=False,
    ),
    _health("staleness_max", float, "the same, maximum", deterministic=False),
    _health(
        "factor_fallbacks",
        int,
        "factors that were sent in another form than asked for, or factored with more damping, so far (empty: no kfac)",
        better="lower",
    ),
    _health(
        "factor_updates_skipped",
        int,
        "updates of the factors that were left out because one was not finite, so far (empty: no kfac)",
        better="lower",
    ),
    _health(
        "peak_rss_bytes",
        int,
        "largest resident memory of any rank",
        unit="bytes",
        better="lower",
        deterministic=False,
    ),
)

_origin = partial(Column, "origin")

ORIGIN = (
    _origin("host", str, "machine name", deterministic=False),
    _origin("cpu", str, "processor model, its widest vectors and number of usable cores", deterministic=False),
    _origin("torch_version", str, "version of torch"),
    _origin(
        "kernels",
        str,
        "loops over elements: native, in C; triton, on GPUs; reference, in torch and numpy; all with the same results",
        absent="reference",
    ),
    _origin("git_sha", str, "commit of the tool's checkout, where there is one"),
    _origin("git_dirty", bool, "that checkout had uncommitted changes"),
    _origin("started_at", str, "start of the run, UTC", deterministic=False),
)

METRICS: tuple[Column, ...] = (*IDENTITY, *PROGRESS, *QUALITY, *SPEED, *WIRE, *HEALTH, *ORIGIN)

METRICS_BY_NAME: Mapping[str, Column] = {column.name: column for column in METRICS}
