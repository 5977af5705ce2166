"""Let `bench list runs` show the files of `bench profile`, and `bench run --again` repeat them."""

import itertools
import shlex
from pathlib import Path
from typing import Any

from bench.core.errors import UsageError
from bench.core.run_folder import read_json
from bench.report.artifacts import Artifact, ArtifactKind

# Keys of a profile's file that become options of the command.
_OPTIONS = ("world_size", "steps", "warmup_steps")


def _read(path: Path) -> Artifact | None:
    content = read_json(path) if path.is_file() else None
    if content is None or not content.keys() >= {*_OPTIONS, "script", "arguments", "encoded"}:
        return None
    return Artifact(path=path, status="ok", command=shlex.join(["bench", *_arguments(path, content)]))


def _again(path: Path) -> list[str]:
    content = read_json(path) or {}
    if not Path(content["script"]).is_file():
        raise UsageError(f"{path} is a profile of {content['script']}, which does not exist here; go to its folder")
    names = (path.with_stem(f"{path.stem}-{number}") for number in itertools.count(2))
    return _arguments(next(each for each in names if not each.exists()), content)


def _arguments(path: Path, content: dict[str, Any]) -> list[str]:
    options = {f"--{name.replace('_', '-')}": content[name] for name in _OPTIONS}
    options |= {"--compressors": ",".join(content["encoded"]), "--out": path}
    given = [str(each) for option in options.items() for each in option]
    return ["profile", *given, content["script"], *content["arguments"]]


KIND = ArtifactKind(name="profile", marker="*.json", read=_read, again=_again)
