"""Recipes: complete and possible, beneath the options that the user gives, and alike on any number of ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.core import registry, spec
from bench.core.config.run import RunConfig
from bench.core.errors import UsageError
from bench.launch.jobs.fork_server import TRAIN, ForkServer
from bench.launch.plan import check, plan
from bench.launch.recipes import Recipe, names, recipe, with_recipe
from bench.launch.sweep_file import plan_runs, read_sweep
from tests.testing.invoke import invoke


def named(**given: Any) -> RunConfig:
    return RunConfig(**with_recipe(given))


@pytest.mark.parametrize("name", names())
def test_every_recipe_is_possible_on_any_number_of_ranks_that_divides_its_samples(name: str) -> None:
    options = recipe(name).options
    for kind in ("model", "dataset", "optimizer"):
        if spec.parse(options[kind]).name not in registry.entries(f"{kind}s"):
            pytest.skip(f"there is no {kind} {options[kind]}")
    for world_size in (1, 2, 4):
        config = plan(named(recipe=name, world_size=world_size))
        assert config.batch_size * world_size == recipe(name).samples_per_step
        assert not [note for note in config.notes if "this run has other" in note]
        assert config.recipe == name


@pytest.mark.parametrize("name", names())
def test_every_recipe_says_what_it_is(name: str) -> None:
    flags = {option.name for option in RunConfig.options() if option.flag}
    assert recipe(name).options.keys() <= flags - {"batch_size", "recipe"}
    assert recipe(name).options["lr_scaling"] == "none"  # else a compressor's default would scale it with the ranks
    assert recipe(name).title
    assert recipe(name).source
    assert "measured" in recipe(name).result


def test_what_the_user_gives_wins_also_if_it_is_the_default() -> None:
    config = named(recipe="resnet20-cifar10", schedule=RunConfig.schedule, batch_size=32, epochs=2)
    assert (config.schedule, config.batch_size, config.epochs) == ("cosine", 32, 2)
    assert (config.model, config.lr) == ("resnet20", 0.1)


def test_a_clip_norm_of_0_takes_the_recipes_limit_away() -> None:
    with pytest.raises(UsageError, match="use --clip-norm 0 or optimizer sgd"):
        plan(named(recipe="gpt-stdlib", optimizer="dion"))
    assert plan(named(recipe="gpt-stdlib", optimizer="dion", clip_norm=0.0)).clip_norm is None


def test_none_counts_as_not_given() -> None:
    assert named(recipe="resnet20-cifar10", lr=None, steps=None) == named(recipe="resnet20-cifar10")


def test_an_option_replaces_its_alternative() -> None:
    assert named(recipe="resnet20-cifar10", steps=7).epochs is None
    given = named(recipe="gpt-stdlib", target_accuracy=0.5)
    assert (given.target_accuracy, given.target_bits_per_byte) == (0.5, None)


def test_options_with_their_recipe_beneath_stay_as_they_are() -> None:
    once = with_recipe({"recipe": "resnet20-cifar10", "steps": 7, "batch_size": 8})
    assert with_recipe(once) == once
    flags = RunConfig(**once).flag_values()
    assert with_recipe(flags) == flags


def test_a_recipe_is_the_options_that_it_stands_for() -> None:
    found = check(named(recipe="resnet20-cifar10"))
    written = check(RunConfig(**recipe("resnet20-cifar10").options, batch_size=64))
    assert found.digest == written.digest
    assert (found.columns()["recipe"], written.columns()["recipe"]) == ("resnet20-cifar10", None)


def test_accumulated_batches_share_the_samples_of_a_step() -> None:
    config = check(named(recipe="resnet20-cifar10", world_size=2, accumulate=4))
    assert config.batch_size == 16


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"world_size": 3}, "has 128 samples per step, which 3 ranks cannot share equally; choose numbers that"),
        ({"world_size": 2, "accumulate": 3}, "which 2 ranks x --accumulate 3 cannot share"),
        ({"world_size": 256}, "which 256 ranks cannot share"),
        ({"recipe": "resnet20-cifar"}, "there is no recipe 'resnet20-cifar' (did you mean 'resnet20-cifar10'?);"),
    ],
)
def test_refusal(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError) as refusal:
        check(named(**{"recipe": "resnet20-cifar10"} | given))
    assert sentence in str(refusal.value)
    assert check(named(recipe="resnet20-cifar10", world_size=3, batch_size=40)).batch_size == 40


def test_a_note_tells_the_published_result_and_what_differs() -> None:
    (same,) = plan(named(recipe="resnet20-cifar10")).notes
    assert same.startswith("recipe resnet20-cifar10: test accuracy 91.25% (published, not measured); source: He, ")
    assert "other" not in same
    (written,) = plan(named(recipe="resnet20-cifar10", optimizer="sgd:weight_decay=1e-4,momentum=0.9")).notes
    assert written == same
    (changed,) = plan(named(recipe="resnet20-cifar10", epochs=2, batch_size=32, augment=False, train_size=640)).notes
    assert changed.endswith("; this run has other augment, epochs, train_size, samples per step")


def test_steps_replace_the_evaluations_of_a_recipe_too() -> None:
    assert "eval_every" not in with_recipe({"recipe": "gpt-stdlib", "steps": 100})
    assert with_recipe({"recipe": "gpt-stdlib", "eval_every": 0.25})["eval_every"] == 0.25


def test_a_measured_result_is_called_so() -> None:
    parts: dict[str, Any] = {"name": "x", "title": "x", "source": "x", "samples_per_step": 1, "options": {}}
    both = Recipe(**parts, published={"test_accuracy": 0.5}, measured={"test_accuracy": 0.25})
    assert both.result == "test accuracy 50.00% (published, test accuracy 25.00% measured)"
    assert Recipe(**parts, measured={"test_bits_per_byte": 1.5}).result == "1.500 bits per byte (measured)"
    assert Recipe(**parts).result == "no published result, not measured"


@pytest.mark.usefixtures("planned_here")
def test_a_sweep_takes_recipes_in_its_base_and_its_matrix(tmp_path: Path) -> None:
    file = tmp_path / "sweep.toml"
    file.write_text(
        '[base]\nrecipe = "resnet20-cifar10"\nepochs = 3\n[matrix]\ncompressor = ["none", "topk"]\n'
        "world_size = [1, 4]\n",
        encoding="utf-8",
    )
    configs = [run.config for run in plan_runs(read_sweep(file), ForkServer(TRAIN))]
    assert {(each.world_size, each.batch_size) for each in configs} == {(1, 128), (4, 32)}
    assert {(each.model, each.epochs, each.schedule) for each in configs} == {("resnet20", 3, "step")}
    file.write_text('[matrix]\nrecipe = ["resnet20-cifar10", "resnet18-cifar10"]\n', encoding="utf-8")
    assert {run.config.model for run in plan_runs(read_sweep(file), ForkServer(TRAIN))} == {"resnet18", "resnet20"}


@pytest.mark.usefixtures("planned_here")
def test_the_command_line_wins_too() -> None:
    arguments = ("--recipe", "resnet20-cifar10", "--schedule", "cosine", "--steps", "5", "--dry-run", "--json")
    answer = invoke("run", *arguments)
    (config,) = json.loads(answer.out)["configs"]
    assert (config["model"], config["schedule"], config["steps"], config["epochs"]) == ("resnet20", "cosine", 5, None)
    assert (config["recipe"], config["batch_size"]) == ("resnet20-cifar10", 64)
    assert "recipe resnet20-cifar10: test accuracy 91.25% (published, not measured)" in answer.error


@pytest.mark.usefixtures("planned_here")
def test_several_compressors_share_a_recipe() -> None:
    answer = invoke("run", "--recipe", "resnet18-cifar10", "--compressor", "none,topk", "--dry-run", "--json")
    configs = [config for plan in json.loads(answer.out) for config in plan["configs"]]
    assert {(each["model"], each["batch_size"], each["epochs"]) for each in configs} == {("resnet18", 64, 200)}


def test_the_list_shows_every_recipe_with_its_result() -> None:
    text = invoke("list", "recipes", "--long").out
    for name in names():
        for said in (name, recipe(name).title, recipe(name).result, f"--model {recipe(name).options['model']}"):
            assert said in text
    assert [each["name"] for each in json.loads(invoke("list", "recipes", "--json").out)["recipes"]] == names()
