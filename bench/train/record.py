"""The recorder: it gathers what the ranks have measured since the previous row and writes rows on rank 0."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

import torch.distributed as dist

from bench.core import environment
from bench.core.config.run import RunConfig
from bench.core.counters import ForwarderUse, OtherWork, interface_bytes, launcher_of_rank
from bench.core.processes import peak_rss_bytes
from bench.core.rows import RowWriter
from bench.core.run_folder import RunFolder
from bench.core.schema.layers import LAYERS
from bench.core.schema.links import LINKS
from bench.core.schema.metrics import METRICS
from bench.models.base import weights_hash
from bench.strategies.base import BoundStrategy
from bench.train.checkpoint import resumes_of
from bench.train.clock import StepTimes, link_columns, mean, sample_index_sets, sampled_overlap
from bench.train.rank import gather_json
from bench.train.trackers import open_tracker
from collectives.transport.base import Purpose, Traffic
from compressors.choice import Choice, read_choices
from compressors.ddp.choosing.hook import ChoosingHook
from compressors.ddp.report import StepReport, add_counts
from compressors.layer import Layer


@dataclasses.dataclass(kw_only=True)
class Running:
    """Statistics of the numbers added so far.

    Attributes:
        count: how many numbers were added.
        total: their sum.
        least, largest: the smallest and the largest; None if there are no numbers.
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
        """Return the mean; None if there are no numbers."""
        return self.total / self.count if self.count else None


PROGRESS_EVERY_S = 0.25

# The Recorder's attributes that a checkpoint saves as they are.
_COUNTS = (
    "_steps", "_entries", "_staleness", "_wire_sent", "_wire_received", "_time_to_target_s", "_factor_fallbacks",
    "_factor_updates_skipped", "last_row",
)  # fmt: skip
_BESIDE_GRADIENTS: tuple[Purpose, ...] = ("control", "state", "activation")


@dataclasses.dataclass(kw_only=True)
class Snapshot:
    """The results of one evaluation on this rank.

    Attributes:
        epoch: finished epochs, including the fraction of the current one.
        step: optimizer steps done.
        is_last: no step follows.
        samples: samples that this rank has used so far.
        skipped_steps: steps that this rank has skipped so far.
        train_loss: this rank's mean loss since the previous row; None if it has made no step since.
        train_accuracy: accuracy on a fixed sample of the training set.
        test_loss, test_accuracy: loss and accuracy on the whole test set.
        train_time_s: time spent training so far.
        times: times of the steps since the previous row.
    """

    epoch: float
    step: int
    is_last: bool
    samples: int
    skipped_steps: int
    train_loss: float | None
    train_accuracy: float
    test_loss: float
    test_accuracy: float
    train_time_s: float
    times: StepTimes


@dataclasses.dataclass(kw_only=True)
class _LayerCount:
    """Sums over the steps since the previous row, for one layer."""

    payload: str = ""
    nbytes: float = 0.0
    seconds: float = 0.0
    density: Running = dataclasses.field(default_factory=Running)
    wanted: Running = dataclasses.field(default_factory=Running)
    of_wanted: Running = dataclasses.field(default_factory=Running)

    @classmethod
    def from_dict(cls, kept: dict[str, Any]) -> Self:
        """Return the counts of which `dataclasses.asdict` made this dict."""
        fields: dict[str, Any] = {n: Running(**v) if isinstance(v, dict) else v for n, v in kept.items()}
        return cls(**fields)


class Recorder:
    """Collect measurements on every rank and write them as rows on rank 0.

    Args:
        config: the run's configuration.
        folder: the run's folder.
        strategy: the strategy whose traffic and residuals are recorded.
        started_at: start time of the process, in seconds of `time.time`.
        after: the step from which training resumes; 0 in a new run.
    """

    def __init__(
        self, config: RunConfig, folder: RunFolder, strategy: BoundStrategy, started_at: float, after: int = 0
    ) -> None:
        self.config = config
        self.strategy = strategy
        self._folder = folder
        self.is_writer = dist.get_rank() == 0
        self._started = started_at
        on_one_machine = config.world_size // config.nnodes
        self._is_first_here = dist.get_rank() % on_one_machine == 0
        self._fixed = {
            **config.columns(),
            "run_id": folder.run_id,
            **environment.origin_columns(config.device),
            "started_at": datetime.datetime.fromtimestamp(started_at, datetime.UTC).isoformat(timespec="seconds"),
            "resumes": resumes_of(folder),
            **link_columns(folder),
        }
        self._metrics = RowWriter(folder.metrics, METRICS) if self.is_writer else None
        self._layers = RowWriter(folder.layers, LAYERS) if self.is_writer else None
        self._tracker = open_tracker(config, folder, after) if self.is_writer else None
        self._progress = folder.progress.open("a", encoding="utf-8") if self.is_writer else None
        self._progress_written = self._last_told = 0.0
        self._last_progress: dict[str, Any] = {}
        self._progress_samples = 0
        self._progress_step = 0
        self._numel = sum(layer.numel for layer in strategy.layers)
        self._time_to_target_s: float | None = None
        self._factor_fallbacks: int | None = None
        self._factor_updates_skipped: int | None = None
        self._recent_exposed: list[float] = []
        self._choice: Choice | None = None
        self.last_row: dict[str, Any] = {}
        self._reset()

    def state_dict(self) -> dict[str, Any]:
        """Return the counts since the previous row, and what the next row needs of earlier ones."""
        return {
            "counts": {name: getattr(self, name) for name in _COUNTS},
            "layers": {layer_id: dataclasses.asdict(count) for layer_id, count in self._layer_counts.items()},
            "traffic": {purpose: dataclasses.asdict(sent) for purpose, sent in self._sent().items()},
            "wall_time_s": time.time() - self._started,
            "started_at": self._fixed["started_at"],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from another process's `state_dict`; what that process sent counts as sent by this one."""
        for name, value in state["counts"].items():
            setattr(self, name, value)
        self._layer_counts |= {layer_id: _LayerCount.from_dict(count) for layer_id, count in state["layers"].items()}
        saved = {purpose: Traffic(**sent) for purpose, sent in state["traffic"].items()}
        now = self.strategy.exchange.traffic
        self._traffic_before = {purpose: entry.since(saved.get(purpose, Traffic())) for purpose, entry in now.items()}
        self._replay_choices()
        self._started = time.time() - state["wall_time_s"]
        self._fixed["started_at"] = state["started_at"]

    def _replay_choices(self) -> None:
        """Repeat the choices that the stopped process made after the checkpoint, at the same steps."""
        exchange = self.strategy.exchange
        if isinstance(exchange, ChoosingHook):
            kept = read_choices(self._folder.choices) if self._folder.choices.exists() and self.is_writer else []
            choices = [Choice.from_dict(values) for values in gather_json([choice.to_dict() for choice in kept])[0]]
            if self.is_writer:  # the last line of the file may be incomplete
                self._folder.choices.write_text("".join(map(_line, choices)), encoding="utf-8")
            exchange.follow(choices)
            self._choice = choices[-1] if choices else None

    @contextlib.contextmanager
    def measuring(self) -> Iterator[None]:
        """Count other programs' CPU use and the virtual host's traffic inside the block; every rank must call.

        On virtual hosts, barriers make all ranks enter and leave the block together, because a backend may return
        before the kernel has sent everything.
        """
        if self._is_first_here:
            self._other_work.start()
        if self.config.cluster is None:
            yield
        else:
            dist.barrier()
            before = interface_bytes()
            self._forwarder_use.start()
            yield
            dist.barrier()
            now = interface_bytes()
            self._forwarder_use.stop()
            self._wire_sent += now.sent - before.sent
            self._wire_received += now.received - before.received
        if self._is_first_here:
            self._other_work.stop()

    def count(self, outcome: StepReport) -> None:
        """Add one step's report to the counts."""
        self._steps += 1
        if outcome.choice is not None and outcome.choice is not self._choice:
            self._note(outcome.choice)
        if outcome.exposed_s is not None and self.is_writer:
            self._recent_exposed.append(outcome.exposed_s)
        self._factor_fallbacks = add_counts(self._factor_fallbacks, outcome.factor_fallbacks)
        self._factor_updates_skipped = add_counts(self._factor_updates_skipped, outcome.factor_updates_skipped)
        if outcome.staleness is not None:
            self._staleness.append(outcome.staleness)
        kinds: dict[int, dict[str, None]] = {}
        for encoded in outcome.encoded:
            count = self._layer_counts.setdefault(encoded.layer.id, _LayerCount())
            kinds.setdefault(encoded.layer.id, {})[encoded.payload] = None
            count.payload = "+".join(kinds[encoded.layer.id])
            count.nbytes += encoded.nbytes
            count.seconds += encoded.seconds
            density = encoded.num_entries / max(1, encoded.layer.numel)
            count.density.add(density)
            if encoded.density_wanted is not None:
                count.wanted.add(encoded.density_wanted)
                count.of_wanted.add(density / encoded.density_wanted)
            self._entries += encoded.num_entries

    def _note(self, choice: Choice) -> None:
        """Write a new choice to the file at once, so that a resumed run can repeat it."""
        is_new = self._choice is None or choice.step > self._choice.step
        self._choice = choice
        if self.is_writer and is_new:
            with self._folder.choices.open("a", encoding="utf-8") as file:
                file.write(_line(choice))

    def progress(
        self, *, step: int, total_steps: int, epoch: float, samples: int, loss: Callable[[], float | None]
    ) -> None:
        """Write a line of progress for the launcher, at most a few times per second (rank 0).

        Args:
            step: optimizer steps done.
            total_steps: optimizer steps of the whole run.
            epoch: finished epochs, including the fraction of the current one.
            samples: samples that all ranks together have used so far.
            loss: returns this rank's latest loss; slow on a GPU, which it waits for.
        """
        now = time.monotonic()
        if self._progress is None or (now - self._progress_written < PROGRESS_EVERY_S and step < total_steps):
            return
        elapsed = now - self._progress_written if self._progress_written else None
        speed = (samples - self._progress_samples) / elapsed if elapsed else None
        steps = max(1, step - self._progress_step)
        line = {
            "step": step,
            "total_steps": total_steps,
            "epoch": round(epoch, 3),
            "loss": loss(),
            "accuracy": self.last_row.get("test_accuracy"),
            "samples_per_s": speed,
            "waiting_share": self._waiting_share(steps, elapsed),
            "eta_s": (total_steps - step) * elapsed / steps if elapsed else None,
        }
        self._write_progress(line)
        self._last_progress = line
        self._progress_written, self._progress_samples, self._progress_step = now, samples, step
        self._recent_exposed = []

    def _waiting_share(self, steps: int, elapsed_s: float | None) -> float | None:
        """Return the share of `elapsed_s` that rank 0 waited; None if unknown, or above 1 from too few readings."""
        if not elapsed_s or not self._recent_exposed:
            return None
        share = steps * statistics.fmean(self._recent_exposed) / elapsed_s
        return share if share <= 1.0 else None

    def still_here(self) -> None:
        """Repeat the last line of progress, so that the launcher sees a sign of life during an evaluation (rank 0)."""
        if self._last_progress and time.monotonic() - self._last_told >= PROGRESS_EVERY_S:
            self._write_progress(self._last_progress)

    def evaluation(self, snapshot: Snapshot) -> None:
        """Gather measurements from all ranks and append rows to the run's files; every rank must call."""
        everyone = self.strategy.members(gather_json(self._own_figures(snapshot), self.strategy.loop))
        target = self.config.target_accuracy
        if target is not None and self._time_to_target_s is None and snapshot.test_accuracy >= target:
            self._time_to_target_s = snapshot.train_time_s
        if self._metrics is not None and self._layers is not None:
            row = self._fixed | self._progress_columns(snapshot) | self._joint_columns(everyone, snapshot)
            self._metrics.append(row)
            self._layers.extend(self._layer_rows(snapshot))
            self._write_links(snapshot)
            if self._tracker is not None:
                self._tracker.row(row)
                if snapshot.is_last:
                    self._tracker.close()
            self.last_row = row
            if self._last_progress:
                self._last_progress |= {"epoch": row["epoch"], "step": row["step"]}
            self._write_progress({"evaluated": {k: row[k] for k in ("epoch", "step", "train_loss", "test_accuracy")}})
        self._reset()

    def _reset(self) -> None:
        self._steps = 0
        self._entries = 0
        self._staleness: list[int] = []
        self._layer_counts: dict[int, _LayerCount] = {}
        self._traffic_before = {p: dataclasses.replace(t) for p, t in self.strategy.exchange.traffic.items()}
        self._wire_sent = self._wire_received = 0.0
        self._forwarder_use = ForwarderUse()
        # On virtual hosts, process 1 is the first process of the host's own process namespace.
        self._other_work = OtherWork(1 if self.config.cluster else launcher_of_rank())

    def _sent(self) -> dict[Purpose, Traffic]:
        """Return what this rank has sent since the previous row."""
        return {p: t.since(self._traffic_before[p]) for p, t in self.strategy.exchange.traffic.items()}

    def _own_figures(self, snapshot: Snapshot) -> dict[str, Any]:
        sent = self._sent()
        return {
            "steps": self._steps,
            "samples": snapshot.samples,
            "skipped_steps": snapshot.skipped_steps,
            "steps_per_s": snapshot.times.steps_per_s(),
            "cpu_s_per_step": snapshot.times.cpu_s_per_step(),
            "other_cpu_share": self._other_work.share if self._is_first_here else None,
            "train_loss": snapshot.train_loss,
            "traffic": {purpose: dataclasses.asdict(entry) for purpose, entry in sent.items()},
            "entries": self._entries,
            "staleness": self._staleness,
            "index_sets": sample_index_sets(self.strategy.exchange.last_encoded, self._numel),
            "wire": (self._wire_sent, self._wire_received),
            "peak_rss_bytes": peak_rss_bytes(),
            "weights": weights_hash(self.strategy.model.parameters()),
        }

    def _progress_columns(self, snapshot: Snapshot) -> dict[str, Any]:
        return {
            "status": "ok" if snapshot.is_last else "running",
            "epoch": snapshot.epoch,
            "step": snapshot.step,
            "train_time_s": snapshot.train_time_s,
            "wall_time_s": time.time() - self._started,
            "train_accuracy": snapshot.train_accuracy,
            "test_loss": snapshot.test_loss,
            "test_accuracy": snapshot.test_accuracy,
            "time_to_target_s": self._time_to_target_s,
        }

    def _joint_columns(self, everyone: list[dict[str, Any]], snapshot: Snapshot) -> dict[str, Any]:
        steps = max(1, sum(figures["steps"] for figures in everyone))  # sum over ranks
        speeds = [figures["steps_per_s"] for figures in everyone if figures["steps_per_s"] is not None]
        other_work = [share for figures in everyone if (share := figures["other_cpu_share"]) is not None]
        staleness = [versions for figures in everyone for versions in figures["staleness"]]
        return {
            "samples": sum(figures["samples"] for figures in everyone),
            "train_loss": mean_loss(everyone),
            **snapshot.times.columns(),
            "samples_per_s": sum(speeds) * self.config.samples_per_step if speeds else None,
            "cpu_s_per_step": mean([figures["cpu_s_per_step"] for figures in everyone]),
            "other_cpu_share": max(other_work, default=None),
            **self._wire_columns(everyone, steps),
            "effective_density": sum(figures["entries"] for figures in everyone) / steps / self._numel,
            "support_overlap": sampled_overlap([figures["index_sets"] for figures in everyone]),
            "replicas_in_sync": len({figures["weights"] for figures in everyone}) == 1,
            "skipped_steps": max(figures["skipped_steps"] for figures in everyone),
            "staleness_mean": mean([float(versions) for versions in staleness]),
            "staleness_max": max(staleness, default=None),
            "factor_fallbacks": self._factor_fallbacks,  # equal on all ranks
            "factor_updates_skipped": self._factor_updates_skipped,
            "peak_rss_bytes": max(figures["peak_rss_bytes"] for figures in everyone),
        }

    def _wire_columns(self, everyone: list[dict[str, Any]], steps: int) -> dict[str, Any]:
        """Return the columns of what was sent; `steps` is the sum of all ranks' steps."""
        world_size = len(everyone)
        gradient = [figures["traffic"]["gradient"] for figures in everyone]
        mean_bytes = sum(sent["nbytes"] for sent in gradient) / steps
        from_formula = gradient[0]["from_formula"]
        dense_ring_bytes = 2 * (world_size - 1) / world_size * 4 * self._numel
        columns = {
            "payload_bytes_per_step": mean_bytes,
            "payload_bytes_max_per_step": max(
                sent["nbytes"] / max(1, figures["steps"]) for sent, figures in zip(gradient, everyone, strict=True)
            ),
            "payload_bytes_source": "formula" if from_formula else "counted",
            **{f"{purpose}_bytes_per_step": _sent_bytes(everyone, purpose) / steps for purpose in _BESIDE_GRADIENTS},
            "dense_bytes_per_step": 4.0 * self._numel,
            "chosen": self._choice and self._choice.summary(self.strategy.layers),
            "compression_ratio": dense_ring_bytes / mean_bytes if mean_bytes else None,
            "messages_per_step": None if from_formula else sum(sent["messages"] for sent in gradient) / steps,
        }
        if self.config.cluster is not None:
            sent, received = zip(*(figures["wire"] for figures in everyone), strict=True)
            # Ranks of one host share its interface, and each reads the whole counter.
            columns["wire_bytes_per_step"] = sum(sent) / self.config.ranks_per_host / steps
            columns["wire_bytes_received_per_step"] = sum(received) / self.config.ranks_per_host / steps
            columns["forwarder_cpu_share"] = self._forwarder_use.share
        return columns

    def _layer_rows(self, snapshot: Snapshot) -> list[dict[str, Any]]:
        norms = self.strategy.exchange.residual_norms()
        return [self._layer_row(snapshot, layer, norms.get(layer.id)) for layer in self.strategy.layers]

    def _layer_row(self, snapshot: Snapshot, layer: Layer, norm: float | None) -> dict[str, Any]:
        count = self._layer_counts.get(layer.id, _LayerCount())
        part = self._choice and self._choice.of_layer(layer.id)
        return {
            "run_id": self._fixed["run_id"],
            "epoch": snapshot.epoch,
            "step": snapshot.step,
            "layer": layer.name,
            "kind": layer.kind,
            "numel": layer.numel,
            "payload": count.payload,
            "payload_bytes": count.nbytes / max(1, self._steps),
            "density_min": count.density.least,
            "density_mean": count.density.mean,
            "density_max": count.density.largest,
            "density_wanted": count.wanted.mean,
            "density_of_wanted_min": count.of_wanted.least,
            "density_of_wanted_max": count.of_wanted.largest,
            "residual_norm": norm,
            "encode_s": count.seconds / max(1, self._steps),
            "chosen": part and str(part.pair),
            "chosen_because": part and part.why,
        }

    def _write_links(self, snapshot: Snapshot) -> None:
        """Write a row for every pair of processes between which activations were sent."""
        rows = [
            {
                "run_id": self._fixed["run_id"],
                "epoch": snapshot.epoch,
                "step": snapshot.step,
                "source": link.source,
                "to": link.to,
                "activation_bytes": link.nbytes / max(1, self._steps),
            }
            for link in self.strategy.link_bytes()
        ]
        if rows:
            RowWriter(self._folder.links, LINKS).extend(rows)

    def _write_progress(self, line: dict[str, Any]) -> None:
        if self._progress is not None:
            self._progress.write(json.dumps(line) + "\n")
            self._progress.flush()
            self._last_told = time.monotonic()


def _line(choice: Choice) -> str:
    return json.dumps(choice.to_dict()) + "\n"


def _sent_bytes(everyone: list[dict[str, Any]], purpose: Purpose) -> int:
    """Return the bytes that all ranks together have sent for one purpose."""
    return sum(figures["traffic"].get(purpose, {}).get("nbytes", 0) for figures in everyone)


def mean_loss(everyone: Sequence[dict[str, Any]]) -> float | None:
    """Return the mean loss over all ranks' batches, each rank weighted by its steps; None if no rank has a loss."""
    losses: list[tuple[float, int]] = [
        (each["train_loss"], max(1, each["steps"])) for each in everyone if each["train_loss"] is not None
    ]
    most = max((steps for _, steps in losses), default=1)
    weights = [steps / most for _, steps in losses]  # exactly 1 if all ranks made equally many steps
    if not losses:
        return None
    return sum(loss * weight for (loss, _), weight in zip(losses, weights, strict=True)) / sum(weights)
