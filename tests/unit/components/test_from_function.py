"""Models and data sets that are functions in a user's file: what they return is used, or one sentence says why not."""

from __future__ import annotations

import copy
import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from bench.core import functions, spec
from bench.core.config.run import RunConfig
from bench.core.errors import UsageError
from bench.launch.resolve import resolve
from bench.models.base import seeded_network, try_forward
from gradwire.exchange.packed_state import bits_hash

NET = """
import random
from typing import Literal

import numpy as np
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


def fails():
    raise ValueError("boom")


def needs(module: nn.Module):
    return module


def taken(build: str = ""):
    return nn.Linear(1, 1)


def reads_while_built(num_classes, rate: "float" = None, limit: int = None, other: "Unknown" = 3):
    rates = [value.item() for value in torch.linspace(0, 1, 3)]
    return nn.Linear(6, num_classes)


def parts(*returned):
    return lambda: returned[0] if len(returned) == 1 else returned


nothing = parts(None)
only_class = parts(Net)
pair = parts(nn.Linear(6, 2), 1)
layers = parts([nn.Linear(6, 2), nn.ReLU()])
weights = parts({"weight": torch.zeros(2)})


def load():
    return [(torch.ones(48, 8), torch.arange(48) % 3)] * 2


class Reads(nn.Module):
    def forward(self, x):
        return x if float(x.sum()) < 1e9 else -x


def lazy(num_classes):
    return nn.Sequential(
        nn.LazyLinear(6), nn.LazyBatchNorm1d(), Reads(), nn.Dropout(0.5), nn.LazyLinear(num_classes, bias=False)
    )


def drawn(num_classes):
    network = nn.Linear(8, num_classes)
    network.register_buffer("shift", torch.tensor(np.random.rand(3)))
    with torch.no_grad():
        network.weight += torch.tensor(np.random.rand(num_classes, 8)) + random.random()
    return network


class Late(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 4), None

    def forward(self, x):
        self.last = self.last or nn.Linear(4, 3)
        return self.last(self.first(x))


class ByHand(nn.Module):
    def __init__(self):
        super().__init__()
        self.only = None

    def forward(self, x):
        self.only = self.only or nn.Linear(8, 3)
        return self.only(x)


class Unused(nn.Linear):
    def __init__(self):
        super().__init__(8, 3)
        self.other = nn.LazyLinear(2)


class Named(nn.Linear):
    def __init__(self):
        super().__init__(8, 3)

    def forward(self, x):
        return {"logits": super().forward(x)}


def frozen():
    return nn.Linear(8, 3).requires_grad_(False)


LAYER = nn.Linear(8, 3)
same = parts(LAYER)
"""

DATA = """
import random

import numpy as np
import pandas as pd
import torch
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset, TensorDataset
from torchvision.datasets import MNIST

X, Y = torch.arange(24.0).view(12, 2), torch.arange(12) % 3
BUFFER = np.zeros(2)


class Zeros(TensorDataset):
    def __getitem__(self, index):
        return super().__getitem__(index)[0] * 0, int(self.tensors[1][index])


class Windows(TensorDataset):
    def __len__(self):
        return len(self.tensors[0]) - 2

    def __getitem__(self, index):
        return self.tensors[0][index : index + 3].flatten(), self.tensors[1][index + 2]


class Odd(Subset):
    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x + 1, 1 - (y % 2)

    def __getitems__(self, indices):
        return [self[index] for index in indices]


class Items(Dataset):
    def __init__(self, make, count=12):
        self.make, self.count = make, count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return self.make(index)


class Transformed(Items):
    targets = Y

    def __init__(self, target_transform):
        super().__init__(lambda i: (X[i], target_transform(int(Y[i]))))


class Digits(MNIST):
    def __init__(self, target_transform=None):
        self.data, self.targets = torch.arange(12 * 16, dtype=torch.uint8).view(12, 4, 4), Y
        self.transform, self.target_transform = lambda image: np.array(image), target_transform


def library(**changes):
    digits = Digits(**changes)
    digits.__class__ = MNIST
    return digits


SETS = {
    "plain": TensorDataset(X, Y),
    "zeros": Zeros(X, Y),
    "windows": Windows(X, Y),
    "odd": Odd(Transformed(lambda y: y), range(1, 12, 2)),
    "subset": Subset(TensorDataset(X, Y), [3, -1, 5]),
    "of_zeros": Subset(Zeros(X, Y), torch.tensor([1, 2])),
    "joined": ConcatDataset([TensorDataset(X, Y), Transformed(lambda y: 2 - y)]),
    "joined_tensors": ConcatDataset([TensorDataset(X, Y), TensorDataset(X, 2 - Y)]),
    "transformed": Transformed(lambda y: 2 - y),
    "changing": Items(lambda i: (X[i], Y[i])),
    "library": library(),
    "library_transformed": library(target_transform=lambda y: 2 - y),
    "inherited": Digits(target_transform=lambda y: 2 - y),
    "numpy": Items(lambda i: (np.full(2, i, np.float64), np.int16(i % 3))),
    "numbers": Items(lambda i: [i, i % 2]),
    "one_buffer": Items(lambda i: (np.copyto(BUFFER, i) or BUFFER, i % 3)),
    "flipped": Items(lambda i: (np.arange(2 * i, 2 * i + 2.0)[::-1], i % 3)),
    "mixed": Items(lambda i: (torch.tensor([i]) if i % 2 else np.ones(1, np.float32), torch.tensor([i % 2]))),
}


def given(name: str):
    return SETS[name], SETS[name]


def drawn():
    values = np.random.rand(8, 2)
    return [(values + random.random(), np.arange(8) % 2)] * 2


def still():
    return [(np.zeros((8, 2)), np.arange(8) % 2)] * 2


class Broken(Items):
    targets = Y

    def __getitem__(self, index):
        if index == 3:
            raise ValueError("item 3 is broken")
        return super().__getitem__(index)


READ = []


class Counted(Items):
    targets = [index % 2 for index in range(10)]

    def __init__(self):
        super().__init__(lambda i: READ.append(i) or (torch.full((2,), i), i % 2), 10)


def pairs(n: int = 8):
    return (torch.randn(n, 2, 3, dtype=torch.float64), torch.arange(n) % 3), (torch.ones(3, 2, 3), torch.arange(3))


def items():
    return Counted(), TensorDataset(torch.zeros(4, 2, dtype=torch.int64), torch.zeros(4, dtype=torch.int64))


def pixels():
    return [(torch.full((4, 3, 8, 8), 255, dtype=torch.uint8), torch.arange(4))] * 2


def split():
    return torch.utils.data.random_split(Counted(), [6, 4])


GOOD = TensorDataset(X, Y)


class Stream(IterableDataset):
    def __len__(self):
        return 3

    def __iter__(self):
        return iter(GOOD)


def parts(*returned):
    return lambda: returned[0] if len(returned) == 1 else returned


nothing = parts(None)
named = parts({"train": GOOD, "test": GOOD})
one_set = parts(GOOD)
one_pair = parts(X, Y)
one_numpy_pair = parts(X.numpy(), Y.numpy())
flat = parts(X, Y, X, Y)
no_test = parts(GOOD, None)
dicts = parts(GOOD, Items(lambda i: {"image": X[i], "label": 1}))
inputs_only = parts(TensorDataset(X), GOOD)
weighted = parts(TensorDataset(X, Y, X), GOOD)
fractions = parts(Items(lambda i: (X[i], 0.5)), GOOD)
one_hot = parts(Items(lambda i: (X[i], torch.eye(3)[0])), GOOD)
words = parts(Items(lambda i: (X[i], "cat")), GOOD)
negative = parts(Items(lambda i: (X[i], -1)), GOOD)
texts = parts(Items(lambda i: ("abc", 1)), GOOD)
ragged = parts(Items(lambda i: (X[i][: 2 - i % 2], 1)), GOOD)
stream = parts(Stream(), GOOD)
loader = parts(torch.utils.data.DataLoader(GOOD), GOOD)
empty = parts(GOOD, Items(None, 0))
strings = parts((np.array([["a"], ["b"]]), np.arange(2)), GOOD)
whole = parts((X.long(), Y), GOOD)
columns = parts((X, Y.view(-1, 1)), GOOD)
lengths = parts(*[(torch.zeros(3, 2), torch.arange(4))] * 2)
shapes = parts((torch.zeros(3, 2), torch.arange(3)), (torch.zeros(3, 4), torch.arange(3)))
without_targets = parts(Items(lambda i: (X[i], i % 2), 6), Items(lambda i: (X[i], i % 2), 2))
fails_later = parts(Broken(lambda i: (X[i], 1)), Broken(lambda i: (X[i], 1)))
frame = parts(*[(pd.DataFrame(X.numpy()), pd.Series(Y.numpy()))] * 2)
"""


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "net.py").write_text(NET, encoding="utf-8")
    (tmp_path / "data.py").write_text(DATA, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def set_of(text: str) -> Any:
    return spec.build("datasets", f"data.py:{text}")


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
        ("net.py:fails", r"net.py:fails cannot be used: line \d+: ValueError: boom"),
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
    fits, unfit, reads = (spec.build("models", f"net.py:{name}").build(3) for name in ("build", "Net:width=3", "Reads"))
    outputs = try_forward(fits, "fits", inputs)
    assert isinstance(outputs, torch.Tensor)
    assert (tuple(outputs.shape), outputs.requires_grad) == ((2, 3), False)
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


def test_lazy_modules_get_their_shapes_from_the_data() -> None:
    config = resolve(RunConfig(model="net.py:lazy", dataset="net.py:load", world_size=1))
    network = seeded_network(config.filled["model"], spec.build("datasets", config.filled["dataset"]), 1)
    shapes = {name: tuple(tensor.shape) for name, tensor in network.state_dict().items() if tensor.dim()}
    assert (shapes["0.weight"], shapes["1.running_mean"], shapes["4.weight"]) == ((6, 8), (6,), (3, 6))
    assert float(network.state_dict()["1.running_mean"].abs().sum()) == 0  # the batch that gave the shapes is no step
    assert all(module.training for module in network.modules())


@pytest.mark.parametrize("function", ["lazy", "drawn"])
def test_weights_belong_to_the_seed_and_later_draws_to_the_rank_too(
    function: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = spec.build("datasets", "net.py:load")
    found, drawn = [], []
    for rank, seed in ((0, 1), (1, 1), (0, 2)):
        monkeypatch.setenv("RANK", str(rank))
        network = seeded_network(f"net.py:{function}", data, seed)
        found.append(bits_hash((*network.parameters(), *network.buffers())))
        drawn.append((float(torch.rand(1)), np.random.rand()))
    assert found[0] == found[1] != found[2]
    assert drawn[0][0] == drawn[1][0]  # as before, ranks draw the same from torch
    assert len({each for _, each in drawn}) == 3


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        ("net.py:Late", "makes last.bias, last.weight in its first forward pass"),
        ("net.py:ByHand", "makes only.bias, only.weight in its first forward pass"),
        ("torch.nn:Flatten", "has no parameters to train"),
        ("net.py:Unused", r"has parameters without a shape .* \(other.weight, other.bias\)"),
        ("net.py:frozen", "has no parameters to train"),
        ("net.py:same", "returned the same layers twice; build new ones in each call"),
        ("net.py:Named", "returns dict instead of a tensor of logits"),
    ],
)
def test_a_network_that_cannot_be_trained_is_refused(function: str, sentence: str) -> None:
    with pytest.raises(UsageError, match=f"{function} {sentence}"):
        resolve(RunConfig(model=function, dataset="net.py:load", world_size=1))


def test_tensor_pairs_are_samples_of_any_shape(files: Path) -> None:
    dataset = set_of("pairs:n=20")
    assert (dataset.num_classes, dataset.sizes()) == (3, (20, 3))
    train, _ = dataset.load(files, seed=1)
    assert train.inputs.shape == (20, 2, 3)
    assert dataset.normalise(train.inputs).dtype == torch.float32
    part = dataset.load(files, seed=1, train_size=9)[0]
    assert part.targets.bincount().tolist() == [3, 3, 3]


def test_items_of_a_data_set_are_read_when_they_are_used(files: Path) -> None:
    dataset = set_of("items")
    train, test = dataset.load(files, seed=1, train_size=6)
    module: Any = functions.find("data.py:items").call.__globals__
    module["READ"].clear()
    assert train.targets.bincount().tolist() == [3, 3]
    chosen = train.inputs[torch.tensor([0, 5])]
    numbers = chosen[:, 0].tolist()
    assert module["READ"] == numbers
    assert [number % 2 for number in numbers] == train.targets[[0, 5]].tolist()
    assert torch.equal(train.inputs[4:6], train.inputs[torch.tensor([4, 5])])
    assert dataset.normalise(chosen).dtype == torch.int64  # for embeddings
    assert isinstance(test.inputs, torch.Tensor)


def test_labels_without_an_attribute_are_read_from_the_items(files: Path) -> None:
    train, test = set_of("without_targets").load(files, seed=1)
    assert (train.targets.tolist(), test.targets.tolist()) == ([0, 1, 0, 1, 0, 1], [0, 1])


def test_a_random_split_is_the_same_in_every_process_and_keeps_its_labels(files: Path) -> None:
    dataset = set_of("split")
    state = torch.get_rng_state()
    train, _ = dataset.load(files, seed=1)
    assert torch.equal(torch.get_rng_state(), state)
    numbers = train.inputs[0:6][:, 0]
    assert torch.equal(numbers % 2, train.targets)
    expected = torch.randperm(10, generator=torch.Generator().manual_seed(0))[:6]
    assert numbers.tolist() == expected.tolist()


def test_an_item_that_cannot_be_read_is_named(files: Path) -> None:
    dataset = set_of("fails_later")
    with pytest.raises(UsageError, match=r"data.py:fails_later cannot be used: line \d+: ValueError: item 3 is broken"):
        dataset.load(files, seed=1)


def test_pixels_are_scaled_and_changed_only_on_request(files: Path) -> None:
    plain, changed = (set_of(f"pixels{text}") for text in ("", ":crop_and_flip=true"))
    inputs = plain.load(files, seed=1)[0].inputs
    assert plain.normalise(inputs).unique().tolist() == [1.0]
    generator = torch.Generator().manual_seed(1)
    assert plain.augment(inputs, generator) is inputs
    assert changed.augment(inputs, generator).unique().tolist() == [0, 255]  # zeros around the image


@pytest.mark.parametrize(
    "name",
    [
        "plain", "zeros", "windows", "odd", "subset", "of_zeros", "joined", "joined_tensors", "transformed", "library",
        "library_transformed", "inherited", "numpy", "numbers", "mixed", "one_buffer", "flipped",
    ],
)  # fmt: skip
def test_a_network_is_trained_on_the_items_that_the_users_code_returns(name: str, files: Path) -> None:
    train, test = set_of(f"given:name={name}").load(files, seed=1)
    module: Any = functions.find("data.py:given").call.__globals__
    items = [copy.deepcopy(module["SETS"][name][index]) for index in range(len(module["SETS"][name]))]
    for part in (train, test):
        inputs, targets = part.at(slice(0, len(items)))
        assert targets.tolist() == [int(label) for _, label in items]
        # torch reads no memory backwards
        values = [value.copy() if isinstance(value, np.ndarray) else value for value, _ in items]
        assert torch.equal(inputs, torch.stack(list(map(torch.as_tensor, values))))


def test_a_table_is_data_without_a_warning(files: Path, recwarn: pytest.WarningsRecorder) -> None:
    always = torch.is_warn_always_enabled()
    torch.set_warn_always(True)  # by default, a process is warned of memory that may not be written once
    train, _ = set_of("frame").load(files, seed=1)
    torch.set_warn_always(always)
    assert torch.equal(train.at(slice(0, 12))[0], torch.arange(24.0).view(12, 2))
    assert [str(each.message) for each in recwarn if "writable" in str(each.message)] == []


def test_a_label_that_changes_is_refused(files: Path) -> None:
    train, _ = set_of("given:name=changing").load(files, seed=1)
    module: Any = functions.find("data.py:given").call.__globals__
    module["SETS"]["changing"].make = lambda index: (torch.zeros(2), 0)
    with pytest.raises(UsageError, match="the training set has the label 0 in item 1, which had 1 before"):
        train.at(torch.tensor([1]))


def test_what_the_function_draws_belongs_to_the_seed_and_the_global_generators_stay_as_they_are(files: Path) -> None:
    states = functions.generator_states()
    dataset = set_of("drawn")
    (first, _), (other, _), (again, _) = (dataset.load(files, seed=seed) for seed in (1, 2, 1))
    assert torch.equal(first.inputs, again.inputs)
    assert not torch.equal(first.inputs, other.inputs)
    assert functions.generator_states() == states
    still = set_of("still")
    assert still.load(files, seed=1)[0].inputs is still.load(files, seed=2)[0].inputs  # called once


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("nothing", r"must return (training set, test set), and returned NoneType"),
        ("named", "and returned dict with the keys 'train', 'test'"),
        ("one_set", "and returned TensorDataset"),
        (
            "one_pair",
            "returned one pair of arrays, tuple of 2 (Tensor, Tensor); return (train_inputs, train_labels), (",
        ),
        ("one_numpy_pair", "returned one pair of arrays, tuple of 2 (ndarray, ndarray); return (train_inputs, "),
        ("flat", "and returned tuple of 4 (Tensor, Tensor, Tensor, Tensor)"),
        ("no_test", "the test set must be a torch Dataset or a pair of tensors, and is NoneType"),
        ("dicts", "the test set must have items (input, label), and item 0 is dict with the keys 'image', 'label'"),
        ("inputs_only", "the training set must have items (input, label), and item 0 is tuple of 1 (Tensor)"),
        ("weighted", "must have items (input, label), and item 0 is tuple of 3 (Tensor, Tensor, Tensor)"),
        ("fractions", "needs labels that are whole numbers from 0, and item 0 has float 0.5"),
        (
            "one_hot",
            "needs labels that are whole numbers from 0, and item 0 has Tensor of torch.float32 and shape (3,)",
        ),
        ("words", "needs labels that are whole numbers from 0, and item 0 has str 'cat'"),
        ("negative", "needs labels that are whole numbers from 0, and has the label -1"),
        ("texts", "the training set has an input in item 0 of type str 'abc'; give a tensor, or an array of numbers"),
        ("stream", "the training set must be a torch Dataset or a pair of tensors, and is Stream; return (inputs,"),
        ("loader", "and is DataLoader; return (inputs, labels), or a Dataset with a length whose items are (input,"),
        ("empty", "the test set is empty"),
        ("strings", "the training set has inputs of type ndarray of <U1 and shape (2, 1); give a tensor"),
        ("whole", "training inputs are torch.int64 and test inputs torch.float32"),
        ("lengths", "the training set has 3 inputs and 4 labels"),
        ("shapes", "training inputs have the shape (2,) and test inputs (4,)"),
        ("pairs:crop_and_flip=true", "crop_and_flip=true needs images [3, height, width], and inputs are (2, 3)"),
        ("columns", "whole numbers from 0, one for each input, and has Tensor of torch.int64 and shape (12, 1)"),
    ],
)
def test_a_wrong_return_is_named_with_what_is_wanted(name: str, sentence: str, files: Path) -> None:
    with pytest.raises(UsageError) as refused:
        set_of(name).sizes()
    assert str(refused.value).startswith(f"data.py:{name.partition(':')[0]}")
    assert sentence in str(refused.value)


def test_items_of_several_shapes_are_refused(files: Path) -> None:
    train, _ = set_of("ragged").load(files, seed=1)
    with pytest.raises(UsageError, match="must have inputs of one shape, and has"):
        train.at(slice(0, 2))
