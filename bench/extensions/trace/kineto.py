"""Read one rank's trace: a file of `torch.profiler` (Kineto JSON, plain or compressed with gzip) becomes a `Recording`.

Of each event only what is needed is kept, so that a file of 100 MB needs little more memory than its text. Values that
are not finite numbers are left out.

Sources: the writer of these files is libkineto (`output_json.cpp`); the arguments of exchanges come from
`torch/csrc/distributed/c10d/ParamCommsUtils.hpp`.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.core.errors import UsageError
from bench.extensions.trace.call import Call, dtype_of, kind_of, numel_of
from bench.extensions.trace.intervals import EMPTY, Intervals, common, joined, minus, union
from bench.extensions.trace.trace_file import read_events

Span = tuple[float, float]
Lane = tuple[str, str]  # process and thread, or device and stream

_DEVICE = frozenset({"kernel", "concurrent_kernel", "gpu_memcpy", "gpu_memset", "memcpy", "memset", "mtia_ccp_events"})
_LIBRARY = re.compile(r"(?<![a-z])(nccl|rccl|oneccl|hccl|mscclpp|msccl)", re.IGNORECASE)
_LIKE_AN_EXCHANGE = re.compile(
    r"all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|multimem|nvshmem|deep_ep", re.IGNORECASE
)
# Operators of c10d prepare and start an exchange, which is work, except for those that block.
_BLOCKS = re.compile(r"c10d\w*::.*(wait|barrier)")
_IDS = frozenset({"correlation", "External id"})
_STEP = re.compile(r"ProfilerStep#?\s*(\d{1,12})$")
_MARK = "gradwire: "


@dataclasses.dataclass(kw_only=True)
class Recording:
    """The trace of one rank; times are in seconds after the beginning of the first step.

    Attributes:
        path: the file.
        rank: the rank; None if not recorded.
        world_size: number of ranks of the job; None if not recorded.
        backends: names of the libraries that exchange data.
        began_s: when the first step began, seconds since 1970 if the file says so.
        has_clock: whether `began_s` is such a time.
        on_device: True if an accelerator computed, False if CPUs did.
        has_marks: True if the exchange of this project is marked in it.
        steps: begin and end of each step, by its number.
        compute: when the rank computed.
        encoding: when compressors of this project worked, also while the rank computed.
        calls: the exchanges, in the order in which they began.
        notes: what is missing, one sentence each.
    """

    path: Path
    rank: int | None
    world_size: int | None
    backends: tuple[str, ...]
    began_s: float
    has_clock: bool
    on_device: bool
    has_marks: bool
    steps: dict[int, Span]
    compute: Intervals
    encoding: Intervals
    calls: list[Call]
    notes: list[str]


def read(path: Path, limit: int) -> Recording:
    """Read one rank's trace from a file that has at most `limit` bytes after unpacking.

    Raises:
        UsageError: the file cannot be read, or holds no step.
    """
    events = _Events()
    about, is_whole = read_events(path, limit, events.add)
    recording = events.finish(path, about)
    if not is_whole:
        recording.notes.insert(
            0, f"{path.name} ends in the middle, so events at its end are missing and its parts may be too small"
        )
    return recording


def _number(value: object) -> float | None:
    """Return a finite number; None for anything else."""
    if isinstance(value, str):  # some writers quote times
        try:
            value = float(value)
        except ValueError:
            return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


def _count(value: object) -> int | None:
    number = _number(value)
    return int(number) if number is not None and 0 <= number < 1 << 60 else None


@functools.lru_cache(maxsize=100_000)
def _role(name: str, *, is_operator: bool) -> str:
    """Return what an operator or annotation on the host does.

    Returns:
        "computes"; "calls" if it mainly calls others, such as a node of autograd, whose hooks may wait; "blocks" until
        an exchange has ended; "waits" if it is a part of FSDP, which computes, too; or "".
    """
    space, colons, _ = name.partition("::")
    if space == "FSDP":
        return "waits"
    if _BLOCKS.search(name):
        return "blocks"
    if name.startswith("## Call CompiledFxGraph"):
        return "computes"
    if not is_operator:
        return ""
    return "computes" if colons and space not in ("autograd", "torch") else "calls"


class _Events:
    """Collects what is needed of the events of a file; times are in microseconds, as in the file."""

    def __init__(self) -> None:
        self._operators: dict[str, dict[Lane, list[Span]]] = {
            role: defaultdict(list) for role in ("computes", "calls", "blocks", "waits", "")
        }
        self._marks: dict[Lane, list[tuple[str, float, float]]] = defaultdict(list)
        self._gloo: dict[Lane, list[tuple[float, float, str, dict[str, Any]]]] = defaultdict(list)
        self._device: dict[Lane, list[tuple[float, float, Any]]] = defaultdict(list)  # with the correlation
        self._sent: list[tuple[float, float, str, dict[str, Any], Lane]] = []
        self._device_marks: dict[Lane, list[Span]] = defaultdict(list)
        self._steps: dict[int, Span] = {}
        self._device_steps: dict[int, Span] = {}
        self._launched: dict[Any, tuple[float, Any]] = {}  # by correlation: when, and the operator's id
        self._described: dict[Any, dict[str, Any]] = {}  # arguments of exchanges by the operator's id
        self._started: list[str] = []  # exchanges that the host has started on the device
        self._num_guessed = self._num_bad = 0

    def add(self, event: dict[str, Any]) -> None:
        """Keep what is needed of an event."""
        if event.get("ph") != "X":
            return
        name, start, length = str(event.get("name", "")), _number(event.get("ts")), _number(event.get("dur", 0))
        if start is None or length is None or length < 0 or not math.isfinite(start + length):
            self._num_bad += 1
            return
        end, category = start + length, str(event.get("cat", "")).lower()
        lane = (str(event.get("pid")), str(event.get("tid")))
        arguments = event.get("args")
        if not isinstance(arguments, dict):
            arguments = {}
        for key in _IDS & arguments.keys():
            arguments[key] = str(arguments[key])
        if category in _DEVICE:
            if "Collective name" in arguments or _LIBRARY.search(name):
                self._sent.append((start, end, name, arguments, lane))
            elif category.endswith("kernel") and _LIKE_AN_EXCHANGE.search(name):
                self._num_guessed += 1
                self._sent.append((start, end, name, arguments, lane))
            else:
                self._device[lane].append((start, end, arguments.get("correlation")))
        elif category in ("cuda_runtime", "cuda_driver", "runtime", "xpu_runtime", "mtia_runtime"):
            if (correlation := arguments.get("correlation")) is not None:
                self._launched[correlation] = (start, arguments.get("External id"))
        elif category == "gpu_user_annotation":
            if (number := _STEP.match(name)) is not None:
                first, last = self._device_steps.get(int(number[1]), (start, end))
                self._device_steps[int(number[1])] = (min(first, start), max(last, end))
            elif name in (_MARK + "encode", _MARK + "decode"):
                self._device_marks[lane].append((start, end))
        elif name.startswith("gloo:"):
            self._gloo[lane].append((start, end, name, arguments))
        elif category in ("cpu_op", "operator", "user_annotation"):
            self._add_of_host(name, category, start, end, lane, arguments)

    def _add_of_host(
        self, name: str, category: str, start: float, end: float, lane: Lane, arguments: dict[str, Any]
    ) -> None:
        if name.startswith(_MARK):
            self._marks[lane].append((name.removeprefix(_MARK), start, end))
        elif (number := _STEP.match(name)) is not None:
            self._steps[int(number[1])] = (start, end)
        elif name.startswith(("nccl:", "rccl:")):
            self._started.append(name)
        else:
            if "Collective name" in arguments:
                self._described[arguments.get("External id")] = arguments
            self._operators[_role(name, is_operator=category != "user_annotation")][lane].append((start, end))

    def finish(self, path: Path, about: dict[str, Any]) -> Recording:
        """Return the recording.

        Raises:
            UsageError: there are no steps.
        """
        info = about.get("distributedInfo")
        info = info if isinstance(info, dict) else {}
        self._backends = tuple(sorted({str(info["backend"])} if "backend" in info else set()))
        self._groups = dict(_groups_of(info.get("pg_config")))
        notes: list[str] = []
        steps = self._all_steps(path, notes)
        self._zero = min(start for start, _ in steps.values())
        on_device = bool(self._device or self._sent)
        calls = [*self._device_calls(path, notes), *self._gloo_calls(), *self._own_calls()]
        calls.sort(key=lambda call: (call.start_s, call.end_s))
        compute, encoding = self._device_work() if on_device else self._host_work()
        if self._num_guessed:
            notes.append(
                f"{path.name}: {self._num_guessed} kernels are named like exchanges of a library that is not known "
                "here; they count as exchanges"
            )
        if self._num_bad:
            notes.append(f"{path.name}: {self._num_bad} events have no valid time and are left out")
        base = _number(about.get("baseTimeNanoseconds"))
        return Recording(
            path=path,
            rank=_count(info.get("rank")) if "rank" in info else _rank_in(path.name),
            world_size=_count(info.get("world_size")),
            backends=self._backends,
            began_s=(base or 0.0) * 1e-9 + self._zero * 1e-6,
            has_clock=base is not None,
            on_device=on_device,
            has_marks=any(self._marks.values()),
            steps={number: (self._s(start), self._s(end)) for number, (start, end) in sorted(steps.items())},
            compute=compute,
            encoding=encoding,
            calls=calls,
            notes=notes,
        )

    def _s(self, microseconds: float) -> float:
        return (microseconds - self._zero) * 1e-6

    def _set(self, spans: Sequence[Span]) -> Intervals:
        if not spans:
            return EMPTY
        times = (np.array(spans, dtype=np.float64) - self._zero) * 1e-6
        return union(times[:, 0], times[:, 1])

    def _all_steps(self, path: Path, notes: list[str]) -> dict[int, Span]:
        """Return the steps; with an accelerator, a step begins when all work that was launched before it has ended."""
        steps = {number: span for number, span in self._steps.items() if span[1] > span[0]}
        events = [event for lane in self._device.values() for event in lane]
        events += [(start, end, arguments.get("correlation")) for start, end, _, arguments, _ in self._sent]
        if steps:
            known = [(self._launched[each][0], end) for _, end, each in events if each in self._launched]
            moved = _on_device(steps, np.array(known, dtype=np.float64).reshape(-1, 2))
            return {number: span for number, span in moved.items() if span[1] > span[0]} or steps
        if not events or any(self._operators.values()):
            raise UsageError(
                f"{path} marks no steps; call step() of the profiler after each training step, and record at least one"
            )
        notes.append(f"{path.name} was recorded without the host (ProfilerActivity.CPU), so its steps are ")
        steps = {number: span for number, span in sorted(self._device_steps.items()) if span[1] > span[0]}
        if steps:
            starts = [start for start, _ in steps.values()]
            last = max(end for _, end in steps.values())
            notes[-1] += "those that the device saw"
            return dict(zip(steps, zip(starts, [*starts[1:], last], strict=True), strict=True))
        notes[-1] += "not marked; the whole recording counts as one step"
        return {0: (min(start for start, *_ in events), max(end for _, end, _ in events))}

    def _device_calls(self, path: Path, notes: list[str]) -> Iterator[Call]:
        missing = 0
        for start, end, name, own, _ in sorted(self._sent, key=lambda each: each[:2]):
            arguments = own
            if "Collective name" not in own:
                _, operator = self._launched.get(own.get("correlation"), (0.0, own.get("External id")))
                arguments = self._described.get(operator) or self._described.get(own.get("External id")) or own
            missing += "Collective name" not in arguments
            kind = kind_of(str(arguments.get("Collective name", "")))
            yield Call(
                kind=kind if kind != "unknown" else kind_of(name),
                group=self._group(arguments),
                start_s=self._s(start),
                end_s=self._s(end),
                in_numel=_count(arguments.get("In msg nelems")),
                out_numel=_count(arguments.get("Out msg nelems")),
                dtype=dtype_of(arguments.get("dtype", "")),
                sequence=_count(arguments.get("Seq")),
            )
        if missing:
            notes.append(
                f"{path.name}: {missing} exchanges do not say their group, type and size (older PyTorch or another "
                "library); they count as one group, whose bytes are not known"
            )
        if self._started and not self._device and not self._sent:
            notes.append(
                f"{path.name} was recorded without the accelerator (ProfilerActivity.CUDA), so its parts are the host's"
            )
        elif self._started and not self._sent and max(map(len, self._groups.values()), default=2) > 1:
            notes.append(
                f"{path.name}: the host started {len(self._started)} exchanges, but no kernel has a name of a known "
                "library; the exchange counts as compute or idle time"
            )

    def _group(self, arguments: dict[str, Any]) -> tuple[str, str, tuple[int, ...]]:
        name = arguments.get("Process Group Name")
        ranks: tuple[int, ...] = ()
        listed = str(arguments.get("Process Group Ranks", ""))
        if listed and "..." not in listed:  # long lists are cut
            ranks = tuple(sorted(int(number) for number in re.findall(r"\d{1,9}", listed)))
        if not ranks and name is not None:
            ranks = self._groups.get(str(name), ())
        return ("device", "" if name is None else str(name), ranks)

    def _gloo_calls(self) -> Iterator[Call]:
        # The events do not name their group. If all groups have the same ranks, this does not matter.
        alike = {ranks for ranks in self._groups.values() if len(ranks) > 1}
        group = ("gloo", "", alike.pop() if len(alike) == 1 else ())
        for lane, events in self._gloo.items():
            events.sort(key=lambda each: each[:2])
            ends = _with_copies(events, self._operators["computes"][lane])
            for (start, _, name, arguments), end in zip(events, ends, strict=True):
                types = arguments.get("Input type")
                yield Call(
                    kind=kind_of(name.removeprefix("gloo:")),
                    group=group,
                    start_s=self._s(start),
                    end_s=self._s(end),
                    in_numel=numel_of(arguments.get("Input Dims")),
                    dtype=dtype_of(types[0]) if isinstance(types, list) and types else "",
                )

    def _own_calls(self) -> Iterator[Call]:
        """Yield this project's exchanges.

        An exchange lasts from the sending of a message until its sum is decoded, or as long as a mark "exchange".
        """
        group = ("gradwire", "", ())
        for marks in self._marks.values():
            marks.sort(key=lambda mark: mark[1])
            sent = [start for what, start, _ in marks if what == "send"]
            decoded = [start for what, start, _ in marks if what == "decode"]
            spans = [(start, end) for what, start, end in marks if what == "exchange"]
            spans += [(start, end) for start, end in zip(sent, decoded, strict=False) if end >= start]
            for start, end in spans:
                yield Call(kind="gradwire", group=group, start_s=self._s(start), end_s=self._s(end))

    def _device_work(self) -> tuple[Intervals, Intervals]:
        """Return when the device computed, and when it encoded."""
        compute, encoding = [EMPTY], [self._host_marks()]
        for lane, events in self._device.items():
            busy, marked = self._set([event[:2] for event in events]), self._set(self._device_marks.get(lane, []))
            compute.append(minus(busy, marked))
            encoding.append(common(busy, marked))
        return joined(*compute), joined(*encoding)

    def _host_work(self) -> tuple[Intervals, Intervals]:
        """Return when CPUs computed outside of our exchange, and when they encoded."""
        compute = [EMPTY]
        computes, calls, blocks, waits, _ = self._operators.values()
        for lane in {*computes, *calls} - self._gloo.keys():
            exchange = self._set([*blocks[lane], *((start, end) for _, start, end in self._marks[lane])])
            calling = minus(self._set(calls[lane]), self._set(waits[lane]))
            compute.append(minus(joined(self._set(computes[lane]), calling), exchange))
        return joined(*compute), self._host_marks()

    def _host_marks(self) -> Intervals:
        encoding = [EMPTY]
        for marks in self._marks.values():
            encodes = self._set([(start, end) for what, start, end in marks if what in ("encode", "decode")])
            waits = self._set([(start, end) for what, start, end in marks if what in ("exchange", "wait")])
            encoding.append(minus(encodes, waits))
        return joined(*encoding)


def _on_device(steps: dict[int, Span], launches: np.ndarray[Any, Any]) -> dict[int, Span]:
    """Move the borders of steps from the host, which runs ahead, to the device.

    Args:
        steps: begin and end of each step on the host, by number.
        launches: for each event of the device, when the host launched it and when it ended, float64 [events, 2].
    """
    if not len(launches):
        return steps
    launches = launches[np.argsort(launches[:, 0])]
    ended = np.append(-np.inf, np.maximum.accumulate(launches[:, 1]))

    def border(time: float) -> float:
        return max(time, float(ended[np.searchsorted(launches[:, 0], time, side="left")]))

    return {number: (border(start), border(end)) for number, (start, end) in steps.items()}


def _with_copies(events: Sequence[tuple[float, float, str, dict[str, Any]]], copies: Sequence[Span]) -> list[float]:
    """Return the ends of gloo's exchanges on a thread, each after the copies of what has arrived, which it makes next.

    Args:
        events: the exchanges on the thread, in order.
        copies: the operators on the same thread.
    """
    ends = [end for _, end, *_ in events]
    starts = [start for start, *_ in events]
    for start, end in copies:
        index = bisect.bisect_right(starts, start) - 1
        if index >= 0:
            ends[index] = max(ends[index], end)
    return ends


def _groups_of(config: object) -> Iterator[tuple[str, tuple[int, ...]]]:
    for each in config if isinstance(config, list) else []:
        ranks = each.get("ranks") if isinstance(each, dict) else None
        if isinstance(ranks, list) and all(isinstance(rank, int) for rank in ranks):
            yield str(each.get("pg_name", "")), tuple(sorted(ranks))


def _rank_in(name: str) -> int | None:
    found = re.search(r"rank[-_ ]?(\d{1,9})", name, re.IGNORECASE)
    return int(found[1]) if found else None
