"""Tables of refusals: which options exclude each other, why, and which changes make a run possible.

A component contributes a table, which is a function that returns a list of `Refusal`. `refuse` goes through a table and
raises the first refusal that applies. A test goes through all tables and checks that each refusal applies to some
options, that its sentence names one of these options, and that every change that it advises makes the run possible.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec

from collectives.options import Incompatible, value_text

P = ParamSpec("P")
_KINDS = ("collective", "compressor", "dataset", "model", "optimizer", "strategy")


@dataclasses.dataclass(frozen=True)
class Refusal:
    """A combination of options that is not possible.

    Attributes:
        applies: True if the user chose this combination.
        reason: names the options, and says why they exclude each other.
        advice: changes, each of which alone makes the run possible. A change maps names to values: the name of an
            option of the run, as in ``{"batch_size": 8}``, or of a component, as in ``{"compressor.importance":
            "l2"}``. The value None means: leave out the option.
    """

    applies: bool
    reason: str
    advice: Sequence[Mapping[str, Any]]

    @property
    def sentence(self) -> str:
        """Return the reason and the advice: "--epochs and --steps both set the length; leave out --steps"."""
        first, *others = map(_advice_text, self.advice)
        for verb in ("use ", "leave out "):  # written only once if all changes begin with it
            if first.startswith(verb) and all(text.startswith(verb) for text in others):
                return f"{self.reason}; {' or '.join([first, *(text.removeprefix(verb) for text in others)])}"
        return f"{self.reason}; {', or '.join([first, *others])}"


class Refused(Incompatible):
    """The error that `refuse` raises when a refusal applies.

    Attributes:
        refusal: the refusal.
        table: qualified name of the function that returned the table with this refusal.
        number: index of the refusal in the table, from 0.
        size: number of refusals in the table.
    """

    def __init__(self, refusal: Refusal, table: str, number: int, size: int) -> None:
        super().__init__(refusal.sentence)
        self.refusal, self.table, self.number, self.size = refusal, table, number, size


def refuse(table: Callable[P, Sequence[Refusal]], *args: P.args, **kwargs: P.kwargs) -> None:
    """Call `table` with these arguments, and raise the first refusal in it that applies, if there is one.

    Raises:
        Refused: the message is one sentence for the user.
    """
    refusals = table(*args, **kwargs)
    for number, each in enumerate(refusals):
        if each.applies:
            raise Refused(each, table.__qualname__, number, len(refusals))


def _advice_text(changes: Mapping[str, Any]) -> str:
    left_out = [_written(name, None) for name, value in changes.items() if value is None]
    used = [_written(name, value) for name, value in changes.items() if value is not None]
    parts = [f"{verb} {' and '.join(names)}" for verb, names in (("leave out", left_out), ("use", used)) if names]
    return " and ".join(parts)


def _written(name: str, value: Any) -> str:
    text = "" if value is None else value_text(value)
    component, _, option = name.rpartition(".")
    if component:
        return f"{option}={text}" if text else option
    if name in _KINDS:
        return f"{name} {text}" if text else f"--{name}"
    return f"--{name.replace('_', '-')} {text}".rstrip()
