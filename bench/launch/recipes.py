"""Recipes: options of `bench run` from a publication, with the result that the publication reports.

Each recipe is a TOML file in `bench/recipes/`. Options that the user gives override the recipe's options. A recipe
states the samples per step of all ranks together, so that the learning rate fits any number of ranks.
"""

import dataclasses
import functools
import importlib.resources
import tomllib
from collections.abc import Mapping
from typing import Any

from bench.core import spec
from bench.core.config.run import DEFAULT_BATCH_SIZE, RunConfig
from bench.core.errors import UsageError
from collectives.options import did_you_mean

_FILES = importlib.resources.files("bench") / "recipes"
# Pairs of options that replace each other: if the user gives one, the recipe's value of the other is left out.
_ALTERNATIVES = ({"epochs", "steps"}, {"target_accuracy", "target_bits_per_byte"})
# Options that change the result. If a recipe does not state one of these options, the recipe means the default.
_CHANGE_THE_RESULT = (
    "steps", "schedule", "warmup_epochs", "augment", "amp", "label_smoothing", "clip_norm", "holdout_size", "partition",
)  # fmt: skip
_RESULTS = {"test_accuracy": "test accuracy {:.2%}", "test_bits_per_byte": "{:.3f} bits per byte"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """Options and result of a published training.

    Attributes:
        name: name of the recipe, and of its file.
        title: what is trained, in one line.
        source: where the options and the result were published.
        samples_per_step: training samples in an optimizer step, all ranks together.
        options: values of options of `bench run`, by name.
        published: the published result, {name of a column: value}; empty if no result was published.
        measured: the result that this project measured with the recipe, {name of a column: value}; empty if not
            measured.
    """

    name: str
    title: str
    source: str
    samples_per_step: int
    options: dict[str, Any]
    published: dict[str, float] = dataclasses.field(default_factory=dict)
    measured: dict[str, float] = dataclasses.field(default_factory=dict)

    @property
    def result(self) -> str:
        """The published or measured result, such as "test accuracy 91.25% (published, not measured)"."""
        published, measured = (
            ", ".join(text.format(values[name]) for name, text in _RESULTS.items() if name in values)
            for values in (self.published, self.measured)
        )
        if published:
            return f"{published} (published, {f'{measured} measured' if measured else 'not measured'})"
        return f"{measured} (measured)" if measured else "no published result, not measured"

    def note(self, config: RunConfig) -> str:
        """Return a sentence with the published result, and with the options in which a run differs from the recipe."""
        expected = {name: _normalised(name, value) for name, value in self.options.items()}
        defaults = {option.name: option.default for option in RunConfig.options() if option.name in _CHANGE_THE_RESULT}
        differing = [name for name, value in (defaults | expected).items() if getattr(config, name) != value]
        sizes = dict(zip(("train_size", "test_size"), spec.build("datasets", config.dataset).sizes(), strict=True))
        differing += [name for name, size in sizes.items() if name not in expected and getattr(config, name) != size]
        if config.samples_per_step * config.replicas != self.samples_per_step:
            differing.append("samples per step")
        change = f"; this run has other {', '.join(differing)}" if differing else ""
        return f"recipe {self.name}: {self.result}; source: {self.source}{change}"


def _normalised(name: str, value: Any) -> Any:
    """Return an option's value in the form of a complete configuration; a component's spec gets its normal form."""
    kind = next((each.flag.kind for each in RunConfig.options() if each.name == name and each.flag), "")
    return str(spec.build(kind, value)) if kind else value


def names() -> list[str]:
    """Return the names of all recipes, sorted."""
    return sorted(file.name.removesuffix(".toml") for file in _FILES.iterdir() if file.name.endswith(".toml"))


@functools.cache
def recipe(name: str) -> Recipe:
    """Return the recipe of this name.

    Raises:
        UsageError: there is no such recipe; the message names the most similar recipe.
    """
    if name not in (known := names()):
        raise UsageError(f"there is no recipe '{name}'{did_you_mean(name, known)}; `bench list recipes` shows them all")
    return Recipe(name=name, **tomllib.loads((_FILES / f"{name}.toml").read_text(encoding="utf-8")))


def with_recipe(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the user's options by name, completed with the recipe's values of options that the user did not give.

    An option that is None counts as not given.

    Raises:
        UsageError: there is no such recipe.
    """
    if given.get("recipe") is None:
        return dict(given)
    kept = {name for name, value in given.items() if value is not None}
    kept |= {name for alternatives in _ALTERNATIVES if alternatives & kept for name in alternatives}
    if "steps" in kept:  # with --steps, eval_every counts steps
        kept.add("eval_every")
    options = recipe(str(given["recipe"])).options
    return dict(given) | {name: value for name, value in options.items() if name not in kept}


def with_batch_size(config: RunConfig) -> RunConfig:
    """Return the configuration with a batch size per rank: the recipe's samples per step, shared by all ranks.

    Args:
        config: a configuration whose number of replicas is filled in.

    Raises:
        UsageError: the ranks cannot share the recipe's samples equally.
    """
    if config.batch_size or config.recipe is None:
        return config.choose(batch_size=DEFAULT_BATCH_SIZE)
    total, parts = recipe(config.recipe).samples_per_step, config.replicas * config.accumulate
    if total % parts:
        times = f" x --accumulate {config.accumulate}" if config.accumulate > 1 else ""
        raise UsageError(
            f"--recipe {config.recipe} has {total} samples per step, which {config.replicas} ranks{times} cannot share "
            f"equally; choose numbers that divide {total}, or give --batch-size"
        )
    return config.changed(batch_size=total // parts)
