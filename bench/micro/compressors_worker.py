"""The process that measures for `bench compressors`: `python -m bench.micro.compressors_worker FOLDER`.

What to measure stands in the folder's `config.json`; what it found goes, line by line, to `progress.jsonl`.
"""

from __future__ import annotations

import datetime
import sys
from typing import cast

import torch

from bench.core import spec
from bench.core.config.measurements import CompressorsConfig
from bench.core.environment import origin_columns
from bench.core.errors import BenchError
from bench.core.run_folder import RunFolder, append_json_line
from bench.datasets.base import Dataset
from bench.micro.encoding import WARMUP_TURNS, Encoding
from bench.micro.gradients import recorded, synthetic
from bench.micro.turns import in_turns
from bench.models.base import Model
from bench.train.rank import end_process, rank_main, set_up_device
from compressors.layer import layers_of

NUM_GRADIENTS = 5  # gone through again and again; residuals differ all the same


def run(config: CompressorsConfig, folder: RunFolder) -> None:
    """All compressors in turns, then a row for each."""
    started_at = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    origin = origin_columns(config.device) | {"started_at": started_at}
    device = set_up_device(config.device, config.threads)
    torch.manual_seed(config.seed)
    dataset = cast(Dataset, spec.build("datasets", config.dataset))
    model = cast(Model, spec.build("models", config.model)).build(dataset.num_classes).to(device)
    layers = layers_of(model)
    count = min(NUM_GRADIENTS, config.repeats)
    if config.gradients == "recorded":
        gradients = recorded(config, model, layers, count)
    else:
        gradients = [gradient.to(device) for gradient in synthetic(layers, count, config.seed)]

    encodings = [Encoding(config, compressor, layers) for compressor in config.compressor_specs]
    for repeat, encoding in in_turns(encodings, WARMUP_TURNS + config.repeats):
        encoding.take_turn(gradients[repeat % count])
        if repeat >= WARMUP_TURNS:
            append_json_line(folder.progress, {"turn": encoding.name})
    for encoding in encodings:
        append_json_line(folder.progress, {"row": config.columns() | encoding.row() | origin})


main = rank_main(CompressorsConfig, run, (BenchError,))

if __name__ == "__main__":
    end_process(main(sys.argv[1]))
