"""Set-ups that several pages share, so that a name means the same on all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from bench.report.store import Run
from benchmarks.published.figures import Which, mean_kilobytes

DENSE: Which = {"compressor": "none"}
BF16: Which = {"compressor": "bf16"}
# Methods that need no server, each on its best collective.
WITHOUT_SERVER: Mapping[str, Which] = {
    "top-k by all-gather": {"compressor": "topk", "collective": "allgather"},
    "PowerSGD": {"compressor": "powersgd", "collective": "native"},
}
LINKS: Mapping[str, Which] = {
    "10 Mbit/s": {"uplink_bps": 1e7},
    "100 Mbit/s": {"uplink_bps": 1e8},
    "1 Gbit/s": {"uplink_bps": 1e9},
}
# All methods that run together on each link (`together.toml`).
METHODS: Mapping[str, Which] = {
    "dense fp32": {"compressor": "none", "optimizer": "sgd"},
    "bf16": {"compressor": "bf16"},
    "top-k": {"compressor": "topk"},
    "DGC": {"compressor": "dgc"},
    "PowerSGD": {"compressor": "powersgd"},
    "Group-TopK, patent": {"compressor": "group_topk:*preset=patent*"},
    "Group-TopK, recommended": {"compressor": "group_topk"},
    "Max-AdaBelief": {"optimizer": "max_adabelief"},
    "ALGC": {"compressor": "algc", "collective": "server:placement=sharded*"},
    "ALGC, sparse answers": {"compressor": "algc", "collective": "server:downlink=union*"},
    "Hylo": {"compressor": "hylo"},
}


def _answering(**options: str) -> Which:
    """Return a server of `answers.toml`, with layers cut as in `together.toml`."""
    texts = {"placement": "sharded", "split_numel": "16384", **options}
    return {"collective": "server:" + ",".join(f"{name}={text}" for name, text in sorted(texts.items()))}


# _KEPT: the server stores what its answers lose and adds it to its next sums.
DENSE_ANSWERS = _answering()
DENSE_ANSWERS_KEPT = _answering(error_feedback="true")
SPARSE_ANSWERS = _answering(downlink="union")
SPARSE_ANSWERS_KEPT = _answering(downlink="union", error_feedback="true")
ENCODED_ANSWERS = _answering(downlink="recode", error_feedback="false")
ENCODED_ANSWERS_KEPT = _answering(downlink="recode")
WHOLE_TRAINING: Mapping[str, Callable[[Run], float | None]] = {"kB per step, whole training": mean_kilobytes}


def links(*names: str) -> Mapping[str, Which]:
    return {name: LINKS[name] for name in names}
