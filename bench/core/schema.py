"""Declare the columns of CSV files.

An option of a command becomes a column through its own declaration (`bench.core.config`); this module declares all
other columns of a run's files. The CSV headings, `docs/columns.md`, `bench compare` and regression gates use these
declarations.

metrics.csv has one row per evaluation and one at the end of the run; each row names the whole configuration, machine
and code version, so rows of several runs can be put in one table. layers.csv describes what was sent for each layer,
with one row per layer and evaluation. links.csv, for models spread over devices, has one row per evaluation and pair of
communicating processes.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial

from bench.core import registry
from bench.core.columns import Column, declared_columns, identity, num_bytes, seconds
from bench.core.config.run import RunConfig

# Columns of metrics.csv.

IDENTITY = (
    identity("run_id", str, "the run's folder name", deterministic=False),
    identity("digest", str, "hash of everything that identifies the experiment, with all defaults filled in"),
    identity("config_id", str, "hash like digest, but without the seed; bench compare groups runs by it"),
    *declared_columns(RunConfig),
)

_progress = partial(Column, "progress")

PROGRESS = (
    _progress("status", str, "ok, running, failed, timeout or interrupted", deterministic=False),
    _progress("error", str, "the failure in one sentence (empty: ok)", deterministic=False),
    _progress(
        "error_kind",
        str,
        "exception of the first rank that failed, such as Diverged or NonFiniteGradient (empty: no rank raised one)",
        deterministic=False,
    ),
    _progress("epoch", float, "epochs finished, including the fraction of the current one"),
    _progress("step", int, "optimizer steps done"),
    _progress(
        "resumes",
        int,
        "times that the run was resumed from a checkpoint, or restarted after a lost process, before this row",
        deterministic=False,
        absent=0,
    ),
    _progress("samples", int, "training samples used so far, all ranks together"),
    _progress(
        "label_skew",
        float,
        "how much the class shares on one rank differ from those of all training samples, 0 to 1: total variation "
        "distance, mean over ranks (empty: samples have no class)",
    ),
    _progress(
        "unused_samples",
        int,
        "training samples that belong to no rank, because --partition cuts shards to the size of the smallest",
    ),
    seconds("progress", "train_time_s", "training time, without evaluation and set-up"),
    seconds("progress", "wall_time_s", "time since the workers started, including evaluation and set-up"),
)

_quality = partial(Column, "quality")

QUALITY = (
    _quality("train_loss", float, "mean training loss since the previous row", better="lower"),
    _quality(
        "train_accuracy",
        float,
        "share of 1000 fixed training samples (or of all, if there are fewer) that are classified correctly, without "
        "augmentation; measuring it is not counted in train_time_s (empty: within an epoch, except in the last row)",
        better="higher",
    ),
    _quality("test_loss", float, "mean loss over the test set", better="lower"),
    _quality(
        "test_accuracy",
        float,
        "share of the test set predicted correctly, 0 to 1; for a text, share of its bytes",
        better="higher",
    ),
    _quality(
        "test_bits_per_byte",
        float,
        "mean bits per byte of the held-out text, test_loss / ln 2 (empty: not a text)",
        better="lower",
    ),
    *(
        _quality(
            f"{name}_bits_per_byte",
            float,
            f"bits per byte of the whole held-out text compressed by {name}, for comparison (empty: not a text)",
            better="lower",
        )
        for name in ("gzip", "bz2", "xz")
    ),
    seconds(
        "quality",
        "time_to_target_s",
        "train_time_s of the first evaluation that reached the target (empty: not reached)",
    ),
)

_step_seconds = partial(seconds, "speed")

SPEED = (
    Column(
        "speed",
        "samples_per_s",
        float,
        "training samples per second in timed steps: each rank's rate, summed over ranks",
        unit="samples/s",
        better="higher",
        deterministic=False,
    ),
    _step_seconds(
        "step_time_s",
        "median time of a step (with --strategy local: step times are first averaged between two exchanges of the same "
        "parameter)",
    ),
    _step_seconds(
        "step_time_p95_s",
        "95th percentile of the time of a step (with --strategy local: of step times averaged as in step_time_s)",
    ),
    _step_seconds(
        "forward_backward_s",
        "time per step for preparing the batch, forward and backward, without waiting for the network; this column and "
        "the next three are (the part's share of the time of all timed steps) x step_time_s",
    ),
    _step_seconds("encode_s", "time per step to compress and decompress (overlaps with backward)"),
    _step_seconds("exchange_s", "busy time of the exchange per step, including encoding (overlaps with backward)"),
    _step_seconds(
        "exposed_s",
        "time per step spent waiting for the exchange after backward's own work ended (empty: the measured wait is "
        "longer than the step)",
    ),
    _step_seconds(
        "cpu_s_per_step",
        "CPU time of a rank per timed step, including its exchange thread, mean over ranks; other programs on the "
        "machine affect it less than wall-clock time",
    ),
    Column(
        "speed",
        "other_cpu_share",
        float,
        "share of the usable cores' time that other programs used during training; above 0.1, the run's times are "
        "longer than on an idle machine (empty: unknown)",
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
    _wire_bytes(
        "payload_bytes_max_per_step",
        "gradient bytes sent per step since the previous row by the rank that sent most",
    ),
    _wire(
        "payload_bytes_source",
        str,
        "counted: bytes of the messages sent; formula: computed, because the backend does not report what it sends",
    ),
    _wire_bytes(
        "control_bytes_per_step", "bytes of flags, sizes and commands sent per rank and step", deterministic=False
    ),
    _wire_bytes(
        "state_bytes_per_step",
        "bytes of optimizer state sent per rank and step (factors of kfac, matrices of muon:shard=true), and of the "
        "model's buffers (--strategy local)",
        absent=0.0,
    ),
    _wire_bytes(
        "activation_bytes_per_step",
        "bytes of activations and their gradients sent between devices, per replica and step",
        absent=0.0,
    ),
    _wire("dense_bytes_per_step", float, "bytes of one uncompressed fp32 gradient", unit="bytes"),
    _wire(
        "compression_ratio",
        float,
        "bytes that a ring all-reduce of the uncompressed fp32 gradient would send / payload bytes sent",
        better="higher",
    ),
    _wire(
        "chosen",
        str,
        "pairs of compressor and collective that auto now uses, with each pair's share of the elements if there are "
        "several (empty: not chosen by auto); layers.csv lists the pair of each layer, with the reason",
    ),
    _wire_bytes(
        "wire_bytes_per_step",
        "bytes sent per rank and step, with all headers, counted by the network interface (virtual hosts only)",
        deterministic=False,
    ),
    _wire_bytes(
        "wire_bytes_received_per_step",
        "bytes received per rank and step, with all headers, counted by the network interface (virtual hosts only)",
        deterministic=False,
    ),
    _wire(
        "wire_headers",
        str,
        "exact: the kernel counted real frames; estimated: segmentation offload was on, so headers are computed",
        deterministic=False,
    ),
    _wire("messages_per_step", float, "messages sent per rank and step", better="lower"),
    _wire("effective_density", float, "entries sent / entries of the gradient"),
    _wire(
        "support_overlap",
        float,
        "share of a rank's sent entries that another rank sent, too, 0 to 1: mean over all pairs of ranks in the last "
        "step before the row, estimated from up to 2^19 positions",
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
        "links whose measured rate, delay or loss differs from the requested value (a rate: by more than 10 %)",
        deterministic=False,
    ),
    _wire(
        "measured_rtt_s",
        float,
        "round-trip time between two hosts measured before training",
        unit="s",
        deterministic=False,
    ),
    _wire(
        "measured_loss_ratio",
        float,
        "share of datagrams between hosts that were lost, measured before training (only if links lose frames on "
        "purpose)",
        deterministic=False,
    ),
    _wire(
        "forwarder_cpu_share",
        float,
        "share of one core that the forwarder between virtual hosts used during the steps (empty: no forwarder)",
        better="lower",
        deterministic=False,
    ),
)

_health = partial(Column, "health")

HEALTH = (
    _health("replicas_in_sync", bool, "whether the parameters are equal bit for bit on all ranks"),
    _health(
        "skipped_steps",
        int,
        "steps skipped because of a non-finite gradient, on the rank that skipped most",
        better="lower",
    ),
    _health(
        "factor_fallbacks",
        int,
        "Kronecker factors, counted over the run so far, that were sent in another form than requested, or decomposed "
        "with more damping "
        "(empty: no kfac)",
        better="lower",
    ),
    _health(
        "factor_updates_skipped",
        int,
        "updates of Kronecker factors skipped so far because a factor was not finite (empty: no kfac)",
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
    _health(
        "held_bytes",
        int,
        "memory that compressor and collective hold between two steps, on the rank that holds most: residuals (also "
        "those of an optimizer that sends parts of its momentum), momentum, buffers (empty: not known)",
        unit="bytes",
        better="lower",
        deterministic=False,
    ),
)

_origin = partial(Column, "origin")

ORIGIN = (
    _origin("host", str, "machine name", deterministic=False),
    _origin("cpu", str, "processor model, widest vector instructions and number of usable cores", deterministic=False),
    _origin("torch_version", str, "version of torch"),
    _origin(
        "kernels",
        str,
        "implementation of the loops over elements: native (C), triton (GPUs) or reference (torch and numpy); all give "
        "the same results",
        absent="reference",
    ),
    _origin("git_sha", str, "commit of this project's checkout (empty: not run from a checkout)"),
    _origin("git_dirty", bool, "whether this project's checkout had uncommitted changes"),
    _origin("started_at", str, "start of the run, UTC", deterministic=False),
)

_GROUPS = (IDENTITY, PROGRESS, QUALITY, SPEED, WIRE, HEALTH, ORIGIN)


def with_added(groups: Sequence[tuple[Column, ...]], added: Iterable[object]) -> tuple[Column, ...]:
    """Return all columns, with those that packages add at the end of their groups; warn of columns that are left out.

    Args:
        groups: the columns of this module, by group.
        added: the columns of packages. A package names a tuple of them in the entry-point group `bench.columns`.
    """
    by_group = {group[0].group: list(group) for group in groups}
    names = {column.name for group in groups for column in group}
    for column in added:
        if isinstance(column, Column) and column.group in by_group and column.name not in names:
            by_group[column.group].append(column)
            names.add(column.name)
        else:
            registry.warn_once(
                f"left out: the column {getattr(column, 'name', column)} of the group bench.columns; declare a Column "
                f"with a new name, in one of the groups {', '.join(by_group)}"
            )
    return tuple(column for group in by_group.values() for column in group)


METRICS = with_added(_GROUPS, (column for columns in registry.load_plugins("columns", tuple) for column in columns))

METRICS_BY_NAME: Mapping[str, Column] = {column.name: column for column in METRICS}

# Columns of the other files.

_layer = partial(Column, "layer")

LAYERS: tuple[Column, ...] = (
    identity("run_id", str, "the run's folder name", deterministic=False),
    identity("epoch", float, "epochs finished at this evaluation"),
    identity("step", int, "optimizer steps done at this evaluation"),
    identity("layer", str, "the parameter's name"),
    _layer("kind", str, "kind of layer: conv, linear, attention, embedding, norm, bias or other"),
    _layer("numel", int, "number of elements"),
    _layer("payload", str, "kind of payload in which the layer is sent; several kinds per step are joined by +"),
    _layer("payload_bytes", float, "encoded bytes per step, mean since the previous row", unit="bytes"),
    _layer("density_min", float, "smallest share of entries sent in one message, since the previous row"),
    _layer("density_mean", float, "mean share of entries sent in one message, since the previous row"),
    _layer("density_max", float, "largest share of entries sent in one message, since the previous row"),
    _layer(
        "density_wanted",
        float,
        "mean share of entries that the compressor was configured to send (empty: it has no such target)",
    ),
    _layer(
        "density_of_wanted_min",
        float,
        "smallest (share sent / share wanted) of all steps on rank 0; above 1 if the wanted share is less than one "
        "entry, because at least one is sent; 0 if all entries are zero",
    ),
    _layer("density_of_wanted_max", float, "largest (share sent / share wanted) of all steps on rank 0"),
    _layer("residual_norm", float, "L2 norm of the error-feedback residual on rank 0 (empty: no residual is kept)"),
    seconds("layer", "encode_s", "time to encode the layer, mean per step (a bucket's time is split by layer size)"),
    _layer("chosen", str, "compressor and collective that auto now uses for the layer (empty: not chosen by auto)"),
    _layer("chosen_because", str, "the measurements by which auto chose this pair of compressor and collective"),
)

LINKS: tuple[Column, ...] = (
    identity("run_id", str, "the run's folder name", deterministic=False),
    identity("epoch", float, "epochs finished at this evaluation"),
    identity("step", int, "optimizer steps done at this evaluation"),
    identity("source", str, "sender: the host or a device"),
    identity("to", str, "receiver: the host or a device"),
    num_bytes(
        "wire",
        "activation_bytes",
        "bytes of mini-batches, activations and their gradients per step, mean since the previous row",
    ),
)

PARTITION: tuple[Column, ...] = (
    identity("run_id", str, "the run's folder name", deterministic=False),
    identity("rank", int, "the rank (with --strategy placed: the replica)"),
    identity("class", int, "the class, from 0; a class without samples on the rank has no row"),
    Column("partition", "samples", int, "training samples of the class on the rank"),
)
