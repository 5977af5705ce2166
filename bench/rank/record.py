"""The recorder, which gathers what all ranks have measured since the previous row and writes a new row on rank 0."""

import contextlib
import dataclasses
import datetime
import json
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pydantic
import torch.distributed as dist

from bench.core import environment
from bench.core.config.run import RunConfig
from bench.core.counters import ForwarderUse, OtherWork, interface_bytes, launcher_of_rank
from bench.core.processes import own_rank, peak_rss_bytes
from bench.core.rows import RowWriter
from bench.core.run_folder import RunFolder, append_json_line, read_json
from bench.core.schema import LAYERS, LINKS
from bench.rank.overlap import sample_index_sets, sampled_overlap
from bench.rank.process import device_time, link_columns
from bench.rank.progress import ProgressFile, open_tracker
from bench.strategies.base import BoundStrategy, RepeatsDecisions
from collectives.transport.base import Purpose, Traffic
from collectives.transport.process_group import gather_json
from gradwire.exchange.packed_state import bits_hash
from gradwire.exchange.report import StepReport

_BESIDE_GRADIENTS: tuple[Purpose, ...] = ("control", "state", "activation")


@dataclasses.dataclass(kw_only=True)
class RunningStats:
    """Statistics of the numbers added so far.

    Attributes:
        count: how many numbers were added.
        total: sum of the numbers.
        least, largest: the smallest and the largest number; None if no number was added.
    """

    count: int = 0
    total: float = 0.0
    least: float | None = None
    largest: float | None = None

    def add(self, value: float) -> None:
        """Add a number."""
        self.count += 1
        self.total += value
        self.least = value if self.least is None else min(self.least, value)
        self.largest = value if self.largest is None else max(self.largest, value)

    @property
    def mean(self) -> float | None:
        """Return the mean of the numbers; None if no number was added."""
        return self.total / self.count if self.count else None


@dataclasses.dataclass(kw_only=True)
class LayerCounts:
    """Statistics of one layer over the steps since the previous row.

    Attributes:
        payload: class names of the last step's payloads, joined by +.
        nbytes: encoded bytes, summed over the steps.
        seconds: encoding time in seconds, summed over the steps.
        density: fraction of the layer's elements that a message sends, 0 to 1.
        wanted: fraction of elements that the compressor was configured to send, 0 to 1.
        of_wanted: the fraction sent divided by the fraction configured.
    """

    payload: str = ""
    nbytes: float = 0.0
    seconds: float = 0.0
    density: RunningStats = dataclasses.field(default_factory=RunningStats)
    wanted: RunningStats = dataclasses.field(default_factory=RunningStats)
    of_wanted: RunningStats = dataclasses.field(default_factory=RunningStats)


@dataclasses.dataclass(kw_only=True)
class StepSums:
    """Sums over this rank's steps since the previous row.

    Attributes:
        steps: number of steps.
        entries: number of gradient elements transmitted.
        figures: by name, the values that the steps' reports have in `figures`, one per step.
        wire_sent, wire_received: bytes sent and received by the virtual host's network interface, including headers.
    """

    steps: int = 0
    entries: int = 0
    figures: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    wire_sent: float = 0.0
    wire_received: float = 0.0


class Recorder:
    """Collects measurements on every rank and writes them as rows on rank 0.

    Args:
        config: the run's configuration.
        folder: the run's folder.
        strategy: trains the model; its traffic and the norms of its residuals are recorded.
        started_at: start time of the process, in seconds of `time.time`.
        after: the optimizer step from which training resumes; 0 in a new run.

    Attributes:
        train_time_s: seconds inside `measuring` blocks, including those before the run was resumed.
        progress: reports progress to the launcher, on rank 0.
        last_row: the newest row of `metrics.csv`, on rank 0; empty before the first row.
    """

    def __init__(
        self, config: RunConfig, folder: RunFolder, strategy: BoundStrategy, started_at: float, after: int = 0
    ) -> None:
        self.config = config
        self.strategy = strategy
        self._folder = folder
        self.is_writer = own_rank() == 0
        self._started = started_at
        self._is_first_here = own_rank() % (config.world_size // config.nnodes) == 0
        self._fixed = {
            **config.columns(),
            "run_id": folder.run_id,
            **environment.origin_columns(config.device),
            "started_at": datetime.datetime.fromtimestamp(started_at, datetime.UTC).isoformat(timespec="seconds"),
            "resumes": (read_json(folder.resume) or {}).get("resumes", 0),
            **link_columns(folder),
        }
        if self.is_writer:
            self._metrics = RowWriter(folder.metrics)
            self._layers = RowWriter(folder.layers, LAYERS)
        self._tracker = open_tracker(config, folder, after) if self.is_writer else None
        self.progress = ProgressFile(folder.progress if self.is_writer else None)
        self.train_time_s = 0.0
        self._device = next(strategy.model.parameters()).device
        self._numel = sum(layer.numel for layer in strategy.layers)
        self._decision: Any = None
        self._decided_until = -1
        # Columns that depend on the whole run so far.
        self._so_far: dict[str, Any] = {"time_to_target_s": None}
        self.last_row: dict[str, Any] = {}
        self._reset()

    def _reset(self) -> None:
        self._sums = StepSums()
        self._layer_counts: dict[int, LayerCounts] = {}
        self._traffic_before = {p: dataclasses.replace(t) for p, t in self.strategy.traffic.items()}
        self._forwarder_use = ForwarderUse()
        self._other_work = OtherWork(launcher_of_rank())

    def state_dict(self) -> dict[str, Any]:
        """Return the sums since the previous row, and the values of earlier rows that the next row depends on."""
        return {
            "counts": dataclasses.asdict(self._sums),
            "so_far": self._so_far,
            "last_row": self.last_row,
            "layers": {layer_id: dataclasses.asdict(count) for layer_id, count in self._layer_counts.items()},
            "traffic": self._sent(),
            "wall_time_s": time.time() - self._started,
            "started_at": self._fixed["started_at"],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the `state_dict` of a stopped process; bytes that it sent count as sent by this process."""
        self._sums = StepSums(**state["counts"])
        self._so_far = state["so_far"]
        self.last_row = state["last_row"]
        self.progress.last_row = self.last_row
        self._layer_counts = pydantic.TypeAdapter(dict[int, LayerCounts]).validate_python(state["layers"])
        saved = {purpose: Traffic(**sent) for purpose, sent in state["traffic"].items()}
        now = self.strategy.traffic
        self._traffic_before = {purpose: entry.since(saved.get(purpose, Traffic())) for purpose, entry in now.items()}
        self._started = time.time() - state["wall_time_s"]
        self._fixed["started_at"] = state["started_at"]
        # Decisions that the stopped process made after the checkpoint are repeated at the same steps.
        for exchange in (each for each in self.strategy.exchanges if isinstance(each, RepeatsDecisions)):
            text = ""
            if self.is_writer:
                self._folder.choices.touch()
                text = self._folder.choices.read_text(encoding="utf-8")
                text = text[: text.rfind("\n") + 1]  # the last line may be incomplete
                self._folder.choices.write_text(text, encoding="utf-8")
            decisions = [json.loads(line) for line in gather_json(text)[0].splitlines()]
            exchange.replay(decisions)
            self._decided_until = max((decision["step"] for decision in decisions), default=-1)

    @contextlib.contextmanager
    def measuring(self) -> Iterator[None]:
        """Measure training time, other programs' CPU use and the virtual host's traffic while the block runs.

        Every rank must run the same blocks. Evaluation and set-up are outside of the blocks, so they do not count as
        training time. On virtual hosts, barriers make all ranks enter and leave a block together, because a backend may
        return before the kernel has sent all data.
        """
        if self._is_first_here:
            self._other_work.start()
        if self.config.cluster is not None:
            dist.barrier()
            before = interface_bytes()
            self._forwarder_use.start()
        started = device_time(self._device)
        yield
        self.train_time_s += device_time(self._device) - started
        if self.config.cluster is not None:
            dist.barrier()
            now = interface_bytes()
            self._forwarder_use.stop()
            self._sums.wire_sent += now.sent - before.sent
            self._sums.wire_received += now.received - before.received
        if self._is_first_here:
            self._other_work.stop()

    def count(self, report: StepReport) -> None:
        """Add one step's report to the sums since the previous row."""
        self._sums.steps += 1
        self._sums.entries += sum(part.num_entries for part in report.encoded)
        for name, value in report.figures.items():
            self._sums.figures.setdefault(name, []).append(value)
        for name, number in report.counts.items():
            self._so_far[name] = self._so_far.get(name, 0) + number
        kinds: dict[int, dict[str, None]] = {}
        for part in report.encoded:
            layer_id, density = part.layer.id, part.num_entries / max(1, part.layer.numel)
            count = self._layer_counts.setdefault(layer_id, LayerCounts())
            kinds.setdefault(layer_id, {})[part.payload] = None
            count.payload = "+".join(kinds[layer_id])
            count.nbytes += part.nbytes
            count.seconds += part.seconds
            count.density.add(density)
            if part.density_wanted is not None:
                count.wanted.add(part.density_wanted)
                count.of_wanted.add(density / part.density_wanted)
        self.progress.count_wait(report.exposed_s)
        if report.decision is not None and report.decision is not self._decision:
            self._decision = report.decision
            if self._decision.step > self._decided_until:
                self._decided_until = self._decision.step
                if self.is_writer:  # write at once, so that a resumed run can repeat the decision
                    append_json_line(self._folder.choices, self._decision.to_dict())

    def record_evaluation(self, *, columns: dict[str, Any], figures: dict[str, Any]) -> None:
        """Gather measurements from all ranks and append rows to the run's files; every rank must call this method.

        A rank that does not evaluate calls `hand_over` instead.

        Args:
            columns: values of columns of `metrics.csv`, by column name; values of rank 0 are recorded.
            figures: this rank's values for columns that combine all ranks. Since the start of the run:
                `samples` (used) and `skipped_steps`. Since the previous row: `train_loss` (mean), `steps_per_s` and
                `cpu_s_per_step`; each of these three is None if no step was measured.
        """
        everyone = self._gathered(figures)
        reached = self.config.reaches_target(columns["test_accuracy"], columns["test_bits_per_byte"])
        if reached and self._so_far["time_to_target_s"] is None:
            self._so_far["time_to_target_s"] = columns["train_time_s"]
        if self.is_writer:
            row = self._fixed | self._so_far | columns | self._joint_columns(everyone) | self.strategy.columns()
            self._metrics.append(row)
            at = {name: row[name] for name in ("run_id", "epoch", "step")}
            self._layers.extend(at | each for each in self._layer_rows())
            if links := self.strategy.link_rows(self._sums.steps):
                RowWriter(self._folder.links, LINKS).extend(at | each for each in links)
            if self._tracker is not None:
                self._tracker.row(row)
                if row["status"] == "ok":
                    self._tracker.close()
            self.last_row = row
            self.progress.report_evaluation(row)
        self._reset()

    def hand_over(self, figures: dict[str, Any]) -> None:
        """Send this rank's measurements to the rank that evaluates; `figures` is as in `record_evaluation`."""
        self._gathered(figures)
        self._reset()

    def _gathered(self, figures: dict[str, Any]) -> list[dict[str, Any]]:
        own = {
            **dataclasses.asdict(self._sums),
            **figures,
            "other_cpu_share": self._other_work.share if self._is_first_here else None,
            "traffic": self._sent(),
            "index_sets": sample_index_sets(self.strategy.last_encoded, self._numel),
            "peak_rss_bytes": peak_rss_bytes(),
            "held_bytes": self.strategy.held_bytes,
            "weights": bits_hash(self.strategy.model.parameters()),
        }
        of_ranks = gather_json(self.strategy.replica_figures(own), self.strategy.loop)
        return [each for of_rank in of_ranks for each in of_rank]

    def _sent(self) -> dict[str, dict[str, Any]]:
        traffic = self.strategy.traffic.items()
        return {purpose: dataclasses.asdict(entry.since(self._traffic_before[purpose])) for purpose, entry in traffic}

    def _layer_rows(self) -> Iterator[dict[str, Any]]:
        """Yield one row of `layers.csv` per layer, without the columns that identify the evaluation."""
        steps, residual_norms = max(1, self._sums.steps), self.strategy.residual_norms()
        for layer in self.strategy.layers:
            count = self._layer_counts.get(layer.id, LayerCounts())
            row = {
                "layer": layer.name,
                "kind": layer.kind,
                "numel": layer.numel,
                "payload": count.payload,
                "payload_bytes": count.nbytes / steps,
                "density_min": count.density.least,
                "density_mean": count.density.mean,
                "density_max": count.density.largest,
                "density_wanted": count.wanted.mean,
                "density_of_wanted_min": count.of_wanted.least,
                "density_of_wanted_max": count.of_wanted.largest,
                "residual_norm": residual_norms.get(layer.id),
                "encode_s": count.seconds / steps,
            }
            yield row | (self._decision.layer_columns(layer) if self._decision is not None else {})

    def _joint_columns(self, everyone: list[dict[str, Any]]) -> dict[str, Any]:
        world_size = len(everyone)
        of_all = {name: [figures[name] for figures in everyone] for name in everyone[0]}
        known = {name: [value for value in values if value is not None] for name, values in of_all.items()}
        steps = max(1, sum(of_all["steps"]))
        gradient = [sent["gradient"] for sent in of_all["traffic"]]
        mean_bytes = sum(sent["nbytes"] for sent in gradient) / steps
        from_formula = gradient[0]["from_formula"]
        dense_ring_bytes = 2 * (world_size - 1) / world_size * 4 * self._numel
        columns = {
            "wall_time_s": time.time() - self._started,
            "samples": sum(of_all["samples"]),
            "train_loss": mean_loss(everyone),
            "samples_per_s": sum(known["steps_per_s"]) * self.config.samples_per_step if known["steps_per_s"] else None,
            "cpu_s_per_step": mean(of_all["cpu_s_per_step"]),
            "other_cpu_share": max(known["other_cpu_share"], default=None),
            "payload_bytes_per_step": mean_bytes,
            "payload_bytes_max_per_step": max(
                sent["nbytes"] / max(1, own) for sent, own in zip(gradient, of_all["steps"], strict=True)
            ),
            "payload_bytes_source": "formula" if from_formula else "counted",
            "dense_bytes_per_step": 4.0 * self._numel,
            "compression_ratio": dense_ring_bytes / mean_bytes if mean_bytes else None,
            "messages_per_step": None if from_formula else sum(sent["messages"] for sent in gradient) / steps,
            "effective_density": sum(of_all["entries"]) / steps / self._numel,
            "support_overlap": sampled_overlap(of_all["index_sets"]),
            "replicas_in_sync": len(set(of_all["weights"])) == 1,
            "skipped_steps": max(of_all["skipped_steps"]),
            "peak_rss_bytes": max(of_all["peak_rss_bytes"]),
            "held_bytes": max(known["held_bytes"], default=None),
        }
        for name in {name: None for figures in of_all["figures"] for name in figures}:
            values = [value for figures in of_all["figures"] for value in figures.get(name, ())]
            columns |= {f"{name}_mean": mean(values), f"{name}_max": max(values)}
        for purpose in _BESIDE_GRADIENTS:
            sent = sum(traffic.get(purpose, {}).get("nbytes", 0) for traffic in of_all["traffic"])
            columns[f"{purpose}_bytes_per_step"] = sent / steps
        if self.config.cluster is not None:
            # Ranks of one host share its interface, and each reads the whole counter.
            columns["wire_bytes_per_step"] = sum(of_all["wire_sent"]) / self.config.ranks_per_host / steps
            columns["wire_bytes_received_per_step"] = sum(of_all["wire_received"]) / self.config.ranks_per_host / steps
            columns["forwarder_cpu_share"] = self._forwarder_use.share
        return columns | (self._decision.columns(self.strategy.layers) if self._decision is not None else {})


def mean_loss(everyone: Sequence[dict[str, Any]]) -> float | None:
    """Return the mean training loss over all ranks, weighted by their numbers of steps; None if no rank has a loss.

    Args:
        everyone: for each rank, a dict with `train_loss` (or None) and `steps`.
    """
    known = [(each["train_loss"], max(1, each["steps"])) for each in everyone if each["train_loss"] is not None]
    most = max((steps for _, steps in known), default=1)
    weights = [steps / most for _, steps in known]  # exactly 1 if all ranks made equally many steps
    weighted = sum(loss * weight for (loss, _), weight in zip(known, weights, strict=True))
    return float(weighted / sum(weights)) if known else None


def mean(values: list[float] | list[float | None]) -> float | None:
    """Return the mean of the values that are not None; None if there are no such values."""
    present = [value for value in values if value is not None]
    return sum(present) / len(present) if present else None
