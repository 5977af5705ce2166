"""Models and data sets that are functions in a user's file."""

import hashlib
from pathlib import Path

import pytest
import torch
from torch import nn

from bench.core import functions, spec
from bench.core.errors import UsageError
from bench.models.base import try_forward

NET = """
from typing import Literal

import torch
from torch import nn


def build(num_classes, width: int = 8, kind: Literal["relu", "tanh"] = "relu", scale=1, activation=nn.ReLU):
    layers = [nn.Flatten(), nn.Linear(6, width), activation(), nn.Linear(width, num_classes)]
    return nn.Sequential(*layers)


class Net(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.layer = nn.Linear(6, width)

    def forward(self, x):
        return self.layer(x)


def reads(num_classes):
    class Reads(nn.Linear):
        def forward(self, x):
            return super().forward(x) if float(x.sum()) > 0 else x

    return Reads(6, num_classes)


def fails():
    raise ValueError("boom")


def nothing():
    return None


def pair():
    return nn.Linear(6, 2), 1


def weights():
    return {"weight": torch.zeros(2)}


def only_class():
    return Net


def layers():
    return [nn.Linear(6, 2), nn.ReLU()]


def needs(module: nn.Module):
    return module


def taken(build: str = ""):
    return nn.Linear(1, 1)


def reads_while_built(num_classes, rate: "float" = None, limit: int = None, other: "Unknown" = 3):
    rates = [value.item() for value in torch.linspace(0, 1, 3)]
    return nn.Linear(6, num_classes)
"""

DATA = """
import torch
from torch.utils.data import Dataset, TensorDataset


def pairs(n: int = 8):
    return (torch.randn(n, 2, 3, dtype=torch.float64), torch.arange(n) % 3), (torch.ones(3, 2, 3), torch.arange(3))


class Items(Dataset):
    read = []

    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        Items.read.append(index)
        return torch.full((2,), index), index % 2


class WithTargets(Items):
    @property
    def targets(self):
        return [index % 2 for index in range(self.n)]


def items():
    return WithTargets(10), TensorDataset(torch.zeros(4, 2, dtype=torch.int64), torch.zeros(4, dtype=torch.int64))


def without_targets():
    return Items(6), Items(2)


def pixels():
    return [(torch.full((4, 3, 8, 8), 255, dtype=torch.uint8), torch.arange(4))] * 2


def one():
    return torch.zeros(3)


def three():
    return 1, 2, 3


def lengths():
    return [(torch.zeros(3, 2), torch.arange(4))] * 2


def floats():
    return [(torch.zeros(3, 2), torch.zeros(3))] * 2


def shapes():
    return (torch.zeros(3, 2), torch.arange(3)), (torch.zeros(3, 4), torch.arange(3))


def words():
    return ["abc", "def"]


def lists():
    return [[1, 2], [0, 1]], [[1, 2], [0, 1]]


def split():
    train, test = torch.utils.data.random_split(WithTargets(10), [6, 4])
    return train, test


def fails_later():
    class Broken(WithTargets):
        def __getitem__(self, index):
            if index == 3:
                raise ValueError("item 3 is broken")
            return super().__getitem__(index)

    return Broken(10), Broken(10)
"""


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "net.py").write_text(NET)
    (tmp_path / "data.py").write_text(DATA)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def hash_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:12]


def test_parameters_of_the_function_are_options_and_the_hash_is_part_of_the_text(files: Path) -> None:
    model = spec.build("models", f"{files}/net.py:build:width=5,kind=tanh")
    assert str(model) == f"{files}/net.py:build:hash={hash_of(files / 'net.py')},kind=tanh,width=5"
    assert spec.full_text(model).endswith(",kind=tanh,scale=1,width=5")
    network = model.build(3)
    assert network(torch.zeros(2, 2, 3)).shape == (2, 3)
    assert network[1].out_features == 5


def test_text_with_the_hash_builds_the_same_component_and_another_hash_is_refused(files: Path) -> None:
    text = spec.full_text(spec.build("models", "net.py:build"))
    assert spec.full_text(spec.build("models", text)) == text
    with pytest.raises(UsageError, match=r"net.py has the hash \w+ instead of 123, so it has changed"):
        spec.build("models", "net.py:build:hash=123")


def test_a_class_of_modules_and_a_module_that_python_finds_are_models(files: Path) -> None:
    assert spec.build("models", "net.py:Net:width=4").build(10)(torch.zeros(1, 6)).shape == (1, 4)
    assert isinstance(spec.build("models", "torch.nn:Identity").build(10), nn.Identity)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("net.py:build:width=wide", "net.py:build: width=wide is not possible"),
        ("net.py:build:depth=3", "net.py:build has no option 'depth'"),
        ("net.py:biuld", r"net.py has no function 'biuld' \(did you mean 'build'\?\)"),
        ("net.py", "net.py names no function; write net.py:FUNCTION"),
        ("other.py:build", "there is no file other.py in"),
        ("no.such.module:build", "there is no module no.such.module"),
        ("net.py:Net", "net.py:Net needs a value for width; write net.py:Net:width=VALUE"),
        ("net.py:needs", "net.py:needs has a parameter 'module' that cannot be given on the command line"),
        ("net.py:taken", "net.py:taken has a parameter 'build', which has another meaning here; rename it"),
        ("broken.py:build", "broken.py:build cannot be used: line 2: ZeroDivisionError: division by zero"),
        ("syntax.py:build", "syntax.py:build cannot be used: line 1: SyntaxError"),
    ],
)
def test_a_wrong_function_is_refused_in_one_sentence(files: Path, text: str, message: str) -> None:
    (files / "broken.py").write_text("\n1 / 0\n")
    (files / "syntax.py").write_text("def f(:\n")
    with pytest.raises(UsageError, match=f"^{message}"):
        spec.build("models", text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("net.py:fails", "net.py:fails cannot be used: line 31: ValueError: boom"),
        ("net.py:nothing", "net.py:nothing must return a torch.nn.Module, and returned NoneType"),
        ("net.py:pair", r"net.py:pair must return a torch.nn.Module, and returned tuple of 2 \(Linear, int\)"),
        ("net.py:weights", "net.py:weights must return a torch.nn.Module, and returned dict with the keys 'weight'"),
        ("net.py:only_class", "net.py:only_class must return a torch.nn.Module, and returned the class Net"),
        ("net.py:layers", r"net.py:layers must return a torch.nn.Module, and returned list of 2 \(Linear, ReLU\)"),
    ],
)
def test_a_function_that_builds_no_network_is_refused(files: Path, text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        spec.build("models", text).build(10)


def test_a_network_that_reads_values_while_it_is_built_is_built_on_the_cpu_first(files: Path) -> None:
    model = spec.build("models", "net.py:reads_while_built:limit=3")
    assert spec.full_text(model).endswith(",limit=3,rate=none")
    with torch.device("meta"):
        assert next(model.build(4).parameters()).device.type == "meta"


def test_the_hash_is_that_of_the_code_that_was_imported(files: Path) -> None:
    before = spec.full_text(spec.build("models", "net.py:build"))
    (files / "net.py").write_text(NET + "\n")
    assert spec.full_text(spec.build("models", "net.py:build")) == before  # this process keeps its code


def test_a_module_beside_the_file_is_found_before_installed_ones(files: Path) -> None:
    (files / "tabnanny.py").write_text("WIDTH = 3\n")
    (files / "own.py").write_text(
        "import tabnanny\nfrom torch import nn\n\n\ndef build():\n    return nn.Linear(tabnanny.WIDTH, 1)\n"
    )
    assert spec.build("models", f"{files}/own.py:build").build(2).in_features == 3


ONCE = """
import dataclasses
import inspect
import pickle
import sys

import torch
from torch import nn

torch.library.define("executed_once::{name}", "(Tensor x) -> Tensor")


@dataclasses.dataclass
class Settings:
    width: int = 3


def build():
    return nn.Linear(pickle.loads(pickle.dumps(Settings())).width, len(inspect.getsource(Settings).splitlines()))


def load():
    return [(torch.zeros(4, 3), torch.zeros(4, dtype=torch.int64))] * 2
"""


@pytest.mark.parametrize(
    ("name", "model", "data"),
    [
        ("one_file", "one_file.py:build", "./one_file.py:load"),
        ("by_path.then", "by_path/then.py:build", "by_path.then:load"),
        ("by_module.first", "by_module.first:build", "by_module/first.py:load"),
        ("before", "before.py:build", "imports.py:load"),
        ("after", "imports.py:build", "after.py:load"),
    ],
)
def test_a_process_executes_a_file_once(name: str, model: str, data: str, files: Path) -> None:
    path = files / f"{name.replace('.', '/')}.py"
    path.parent.mkdir(exist_ok=True)
    path.write_text(ONCE.replace("{name}", path.stem))
    (files / "imports.py").write_text(f"from {name} import build, load\n")
    assert spec.build("models", model).build(2).weight.shape == (3, 3)
    assert spec.build("datasets", data).sizes() == (4, 4)


def test_a_file_of_a_package_imports_its_neighbours(files: Path) -> None:
    (files / "package_of_mine/inner").mkdir(parents=True)
    for folder in ("package_of_mine", "package_of_mine/inner"):
        (files / folder / "__init__.py").touch()
    (files / "package_of_mine/widths.py").write_text("WIDTH = 3\n")
    (files / "package_of_mine/inner/net.py").write_text(
        "import sibling\nfrom torch import nn\n\nfrom ..widths import WIDTH\n\n\n"
        "def build():\n    return nn.Linear(WIDTH, sibling.OUT)\n"
    )
    (files / "package_of_mine/inner/sibling.py").write_text("OUT = 4\n")
    assert spec.build("models", "package_of_mine/inner/net.py:build").build(2).weight.shape == (4, 3)


def test_what_a_file_draws_while_it_is_imported_is_the_same_in_every_process(files: Path) -> None:
    values = []
    for name in ("first", "second"):
        (files / f"{name}_drawn.py").write_text(
            "import random\n\nimport numpy as np\n\nVALUES = random.random(), np.random.rand()\n\n\n"
            "def values():\n    return VALUES\n"
        )
        values.append(functions.find(f"{name}_drawn.py:values").call())
    assert values[0] == values[1]


def test_only_models_and_data_sets_can_be_functions(files: Path) -> None:
    with pytest.raises(UsageError, match="only models and datasets can be functions"):
        spec.build("compressors", "net.py:build")


def test_a_network_is_tried_with_the_shape_of_the_data(files: Path) -> None:
    inputs = spec.build("datasets", "data.py:pairs").dummy_batch(2, "cpu")
    assert inputs.shape == (2, 2, 3)
    fits, unfit, reads = (spec.build("models", f"net.py:{name}").build(3) for name in ("build", "Net:width=3", "reads"))
    outputs = try_forward(fits, "fits", inputs)
    assert isinstance(outputs, torch.Tensor)
    assert (tuple(outputs.shape), outputs.requires_grad) == ((2, 3), True)
    with pytest.raises(ValueError, match=r"unfit cannot take inputs of 2x3 \("):
        try_forward(unfit, "unfit", inputs)
    outputs = try_forward(reads, "reads", torch.zeros(2, 6))  # a network may look at the values
    assert isinstance(outputs, torch.Tensor)
    assert outputs.shape == (2, 6)


def test_the_task_says_what_is_wrong_with_outputs() -> None:
    task = spec.build("datasets", "digits").task
    assert task.output_error(torch.zeros(2, 3), 2, 3) == ""
    assert task.output_error(torch.zeros(2, 3), 2, 4) == "returns 2x3 for 2 samples instead of 2x4 logits"
    assert task.output_error({"logits": 1}, 2, 3) == "returns dict instead of a tensor of logits"


def test_tensor_pairs_are_samples_of_any_shape(files: Path) -> None:
    dataset = spec.build("datasets", "data.py:pairs:n=20")
    assert (dataset.num_classes, dataset.sizes()) == (3, (20, 3))
    train, _ = dataset.load(files, seed=1)
    assert train.inputs.shape == (20, 2, 3)
    assert dataset.normalise(train.inputs).dtype == torch.float32
    part = dataset.load(files, seed=1, train_size=9)[0]
    assert part.targets.bincount().tolist() == [3, 3, 3]


def test_items_of_a_data_set_are_read_when_they_are_used(files: Path) -> None:
    dataset = spec.build("datasets", "data.py:items")
    train, test = dataset.load(files, seed=1, train_size=6)
    items = train.inputs._dataset
    items.read.clear()
    assert train.targets.bincount().tolist() == [3, 3]
    chosen = train.inputs[torch.tensor([0, 5])]
    numbers = chosen[:, 0].tolist()
    assert items.read == numbers
    assert [number % 2 for number in numbers] == train.targets[[0, 5]].tolist()
    assert torch.equal(train.inputs[4:6], train.inputs[torch.tensor([4, 5])])
    assert dataset.normalise(chosen).dtype == torch.int64  # for embeddings
    assert isinstance(test.inputs, torch.Tensor)


def test_labels_without_an_attribute_are_read_from_the_items(files: Path) -> None:
    train, test = spec.build("datasets", "data.py:without_targets").load(files, seed=1)
    assert (train.targets.tolist(), test.targets.tolist()) == ([0, 1, 0, 1, 0, 1], [0, 1])


def test_a_random_split_is_the_same_in_every_process_and_keeps_its_labels(files: Path) -> None:
    dataset = spec.build("datasets", "data.py:split")
    state = torch.get_rng_state()
    train, _ = dataset.load(files, seed=1)
    assert torch.equal(torch.get_rng_state(), state)
    numbers = train.inputs[0:6][:, 0]
    assert torch.equal(numbers % 2, train.targets)
    expected = torch.randperm(10, generator=torch.Generator().manual_seed(0))[:6]
    assert numbers.tolist() == expected.tolist()


def test_an_item_that_cannot_be_read_is_named(files: Path) -> None:
    dataset = spec.build("datasets", "data.py:fails_later")
    with pytest.raises(UsageError, match=r"data.py:fails_later cannot be used: line \d+: ValueError: item 3 is broken"):
        dataset.load(files, seed=1)


def test_pixels_are_scaled_and_changed_only_on_request(files: Path) -> None:
    plain, changed = (spec.build("datasets", f"data.py:pixels{text}") for text in ("", ":crop_and_flip=true"))
    inputs = plain.load(files, seed=1)[0].inputs
    assert plain.normalise(inputs).unique().tolist() == [1.0]
    generator = torch.Generator().manual_seed(1)
    assert plain.augment(inputs, generator) is inputs
    assert changed.augment(inputs, generator).unique().tolist() == [0, 255]  # zeros around the image


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("one", r"data.py:one must return \(training set, test set\), and returned Tensor"),
        ("three", "and returned tuple of 3"),
        ("lengths", "the training set has 3 inputs and 4 labels"),
        ("floats", "the training set needs labels that are whole numbers from 0"),
        ("shapes", r"training inputs have the shape \(2,\) and test inputs \(4,\)"),
        ("words", "data.py:words: the training set must be a torch Dataset or a pair of tensors, and is str"),
        ("lists", "the training set must be a torch Dataset or a pair of tensors, and is list of 2"),
        ("pairs:crop_and_flip=true", r"crop_and_flip=true needs images \[3, height, width\], and inputs are \(2, 3\)"),
    ],
)
def test_data_of_a_wrong_form_are_refused_in_one_sentence(files: Path, text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        spec.build("datasets", f"data.py:{text}").sizes()
