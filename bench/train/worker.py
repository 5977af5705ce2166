"""One rank of a run: `python -m bench.train.worker RUN_FOLDER`, started by torchrun.

Everything it needs stands in the run folder's `config.json`. If it fails, it leaves `errors/rank-N.json` there for
the launcher.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist

from bench.core import spec
from bench.core.config import RunConfig
from bench.core.errors import BenchError
from bench.core.run_folder import RunFolder, write_json
from bench.datasets.base import Dataset, DatasetError
from bench.models.base import Model
from bench.optimizers.base import Optimizer
from bench.train.engine import Engine, build_engine
from bench.train.loop import Diverged, Trainer
from bench.train.record import Recorder, weights_hash
from collectives.base import Collective
from collectives.transport import TransportError
from compressors.base import Compressor
from compressors.exchange import NonFiniteGradient

# Errors whose message is already one sentence for the user; anything else is shown with its type.
USER_ERRORS = (BenchError, DatasetError, Diverged, NonFiniteGradient, TransportError)


def main(path: str) -> int:
    """Train as the folder's configuration says; the exit code is 0 or 1."""
    _die_with_parent()
    folder = RunFolder(Path(path))
    try:
        run(RunConfig.from_json(folder.config), folder)
    except Exception as error:  # noqa: BLE001 - the launcher tells the user what the file says
        _leave_error(folder, error)
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # threads of the backend may wait for ranks that no longer answer
    return 0


def run(config: RunConfig, folder: RunFolder) -> None:
    """Set up this rank, train, and write `status.json` on rank 0."""
    started_at = time.time()
    device = _set_up_device(config)
    with _process_group(config, device):
        _check_same_configuration(config)
        dataset = cast(Dataset, spec.build("datasets", config.filled["dataset"]))
        train, test = dataset.load(
            Path(config.data_dir), seed=config.seed, train_size=config.train_size, test_size=config.test_size
        )
        torch.manual_seed(config.seed)  # every rank draws the same weights
        model = cast(Model, spec.build("models", config.filled["model"])).build(dataset.num_classes).to(device)
        _check_same_weights(model)
        compressor = cast(Compressor, spec.build("compressors", config.filled["compressor"]))
        collective = cast(Collective, spec.build("collectives", config.filled["collective"]))
        engine = build_engine(config, model, compressor, collective, device)
        optimizer = cast(Optimizer, spec.build("optimizers", config.filled["optimizer"]))
        if compressor.owns_momentum:
            handed_over = optimizer.hand_over_momentum()
            compressor.take_over_momentum(handed_over.coefficient, nesterov=handed_over.nesterov)
            optimizer = handed_over.optimizer
        recorder = Recorder(config, folder, engine, started_at)
        with _profiler(config, folder) as profiler:
            trainer = Trainer(
                config=config,
                engine=engine,
                optimizer=optimizer.build(model.parameters(), config.lr),
                dataset=dataset,
                train=train,
                test=test,
                recorder=recorder,
                device=device,
                profiler=profiler,
            )
            trainer.run()
        if dist.get_rank() == 0:
            if config.save_model:
                torch.save(model.state_dict(), folder.model)
            write_json(folder.status, {"status": "ok", "error": "", "run_id": folder.run_id, **_result(recorder)})
        _close(engine)


def _close(engine: Engine) -> None:
    """Ranks leave together: a backend that is torn down while a peer still talks aborts that peer."""
    dist.barrier()
    engine.close()
    dist.barrier()


def _result(recorder: Recorder) -> dict[str, Any]:
    keys = ("epoch", "step", "test_accuracy", "train_time_s", "samples_per_s", "time_to_target_s", "replicas_in_sync")
    return {key: recorder.last_row.get(key) for key in keys}


def _set_up_device(config: RunConfig) -> torch.device:
    torch.set_num_threads(config.threads)
    if config.device == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    # The same seed must give the same numbers.
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True
    return device


@contextlib.contextmanager
def _process_group(config: RunConfig, device: torch.device) -> Iterator[None]:
    """The job's process group; left standing after a failure, when the process is about to end anyway."""
    # NCCL needs a GPU per rank; ranks that share one talk through gloo.
    own_gpu = device.type == "cuda" and torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    dist.init_process_group(
        "nccl" if own_gpu else "gloo",
        timeout=datetime.timedelta(seconds=config.timeout_s),
        device_id=device if own_gpu else None,
    )
    yield
    dist.destroy_process_group()


def _check_same_configuration(config: RunConfig) -> None:
    if dist.get_world_size() != config.world_size:
        raise RuntimeError(f"{config.world_size} ranks were asked for, {dist.get_world_size()} came")
    digests: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(digests, config.digest)
    if len(set(digests)) > 1:
        raise Mismatch("the machines were given different options; give the same command on each, but for --node-rank")


def _check_same_weights(model: torch.nn.Module) -> None:
    hashes: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(hashes, weights_hash(model))
    if len(set(hashes)) > 1:
        raise Mismatch(
            "ranks drew different initial weights from one seed; use the same torch version on every machine"
        )


class Mismatch(BenchError):
    """Ranks that should be alike are not."""

    exit_code = 3


@contextlib.contextmanager
def _profiler(config: RunConfig, folder: RunFolder) -> Iterator[torch.profiler.profile | None]:
    """Record `config.profile` steps after the untimed ones and write the trace when they are over."""
    if not config.profile:
        yield None
        return
    trace = str(folder.trace_of(dist.get_rank()))
    with torch.profiler.profile(
        schedule=torch.profiler.schedule(wait=config.warmup_steps, warmup=1, active=config.profile, repeat=1),
        on_trace_ready=lambda profile: profile.export_chrome_trace(trace),
    ) as profiler:
        yield profiler


def _leave_error(folder: RunFolder, error: BaseException) -> None:
    rank = int(os.environ.get("RANK", "0"))
    is_sentence = isinstance(error, USER_ERRORS)
    with contextlib.suppress(OSError):  # a full disk must not hide the error that the log also holds
        write_json(
            folder.error_of(rank),
            {
                "rank": rank,
                "time": time.time(),
                "message": str(error) if is_sentence else f"{type(error).__name__}: {error}",
                "type": type(error).__name__,
                "lost_a_peer": isinstance(error, TransportError),
                "lost_rank": getattr(error, "lost_rank", None),
                "traceback": traceback.format_exc(),
            },
        )


def _die_with_parent() -> None:
    """Ask Linux to kill this process when torchrun's agent dies, so that no rank outlives the job."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
