"""Hylo: different compression for convolutions and for fully connected layers, on a parameter server."""

from __future__ import annotations

from bench.report.targets import BYTES, TIME
from benchmarks.published.claims import Claim, Stated, above
from benchmarks.published.figures import Difference, Gain, Measure, Which, faster
from benchmarks.published.parts import Drawing, System, Table
from benchmarks.published.setups import (
    BF16,
    DENSE,
    DENSE_ANSWERS,
    ENCODED_ANSWERS,
    ENCODED_ANSWERS_KEPT,
    LINKS,
    METHODS,
    WHOLE_TRAINING,
    WITHOUT_SERVER,
    links,
)

MODELS: dict[str, Which] = {"VGG-11": {"model": "vgg11:hidden=1024,width=16"}, "ResNet-20": {"model": "resnet20"}}
TWOBIT: Which = {"compressor": "twobit:*"}
VARIANTS: dict[str, Which] = {
    "both": {"compressor": "hylo"},
    "convolutions only": {"compressor": "hylo:skip=linear"},
    "fully connected only": {"compressor": "hylo:skip=conv"},
}
HYLO = VARIANTS["both"]
FAST_LINKS = links("100 Mbit/s", "1 Gbit/s")
PLACEMENTS: dict[str, Which] = {
    "one server": {"collective": "server"},
    "sharded server": {"collective": "server:placement=sharded"},
}
ABSTRACT = "thesis, abstract"
ON_SERVERS: dict[str, Which] = {
    "dense": DENSE,
    "MXNet's two bits": TWOBIT,
    "bf16": BF16,
    "top-k": {"compressor": "topk"},
}
EXISTING: dict[str, Which] = {**ON_SERVERS, **WITHOUT_SERVER}
USUAL = ("dense fp32", "bf16", "top-k", "DGC", "PowerSGD")
ANSWERS: dict[str, Which] = {
    "dense answers": DENSE_ANSWERS,
    "encoded answers": ENCODED_ANSWERS,
    "encoded answers, the server keeps what they lose": ENCODED_ANSWERS_KEPT,
}
CHOSEN = ("VGG-11", "100 Mbit/s", "one server")  # chosen before the runs


def _variants(model: str) -> dict[str, Which]:
    """Return the variants that compress this model; ResNet-20 has no fully connected layer large enough."""
    return VARIANTS if model == "VGG-11" else {"both": HYLO}


def _existing(model: str) -> dict[str, Which]:
    """Return the other methods that were trained to the end on this model."""
    if model == "VGG-11":
        return {**ON_SERVERS, "PowerSGD": WITHOUT_SERVER["PowerSGD"]}
    return {name: which for name, which in ON_SERVERS.items() if name != "top-k"}


def _compared(model: str) -> dict[str, Which]:
    """Return all methods that run on links, by name and placement of the server."""
    by_placement = {
        f"{name}, {placement}": {**which, **where}
        for placement, where in PLACEMENTS.items()
        for name, which in {**_variants(model), **ON_SERVERS}.items()
    }
    return {**by_placement, **WITHOUT_SERVER}


def _speeds(model: str, link: str, placement: str) -> dict[str, Measure]:
    where = {**MODELS[model], **FAST_LINKS[link], **PLACEMENTS[placement]}
    return {name: faster({**where, **HYLO}, {**where, **than}) for name, than in EXISTING.items()}


SYSTEM = System(
    name="hylo",
    claims=[
        *(
            Claim(
                text="accuracy loss below 0.5 %",
                source=ABSTRACT,
                setup=f"{model}, digits, 4 workers, {name}, less dense at its own rate",
                sweep="hylo",
                measure=Difference(which={**which, **variant}, than={**which, **DENSE}),
                claimed=above(-0.005),
                counts=variant is HYLO,
            )
            for model, which in MODELS.items()
            for name, variant in {**_variants(model), **_existing(model)}.items()
            if variant is not DENSE
        ),
        *(
            Claim(
                text="better than existing methods, accuracy and bytes together",
                source=ABSTRACT,
                setup=f"{model}, digits, 4 workers, gradient bytes until 90 % of each method / its own; chosen "
                "afterwards",
                sweep="hylo",
                measure={
                    name: Gain(which={**which, **HYLO}, than={**which, **than}, metric=BYTES, accuracy=0.9)
                    for name, than in _existing(model).items()
                },
                claimed=above(1.0),
                counts=False,
            )
            for model, which in MODELS.items()
        ),
        *(
            Claim(
                text="faster than existing methods by up to 30 %",
                source=ABSTRACT,
                setup=f"{model}, 4 hosts at {link}, {placement}, samples/s / of each method; the case chosen before "
                "the runs",
                sweep="hylo_links",
                measure=_speeds(model, link, placement),
                claimed=above(1.3),
            )
            for model, link, placement in (CHOSEN,)
        ),
        *(
            Claim(
                text="faster than existing methods",
                source=ABSTRACT,
                setup=f"{model}, 4 hosts at {link}, {placement}, samples/s / of each method",
                sweep="hylo_links",
                measure=_speeds(model, link, placement),
                claimed=above(1.0),
            )
            for model in MODELS
            for link in FAST_LINKS
            for placement in PLACEMENTS
            if (model, link, placement) != CHOSEN
        ),
        *(
            Claim(
                text="faster than existing methods",
                source=ABSTRACT,
                setup=f"small_cnn, 4 hosts at {link}, layers cut for the servers, time to 90 % of each method / its "
                "own",
                sweep="together",
                measure={
                    name: Gain(which={**HYLO, **bandwidth}, than={**METHODS[name], **bandwidth}, metric=TIME)
                    for name in USUAL
                },
                claimed=above(1.0),
            )
            for link, bandwidth in LINKS.items()
        ),
        Claim(
            text="what is not sent accumulates",
            source=ABSTRACT,
            setup="small_cnn, 4 hosts at 100 Mbit/s, test accuracy with what encoded answers lose kept less without",
            sweep="answers",
            measure=Difference(which={**HYLO, **ENCODED_ANSWERS_KEPT}, than={**HYLO, **ENCODED_ANSWERS}),
            claimed=above(0.0),
            counts=False,
        ),
        Stated(
            text="a layer is treated by its type, and only above a number of parameters",
            source=ABSTRACT,
            verdict="built",
            why="`compressors/hylo.py` and its tests",
        ),
        Stated(
            text="important filters at a rate that follows the layer's size; two bits with a threshold that follows "
            "its gradients; what is not sent accumulates",
            source=ABSTRACT,
            verdict="built",
            why="tests: whole filters are sent, packing is that of MXNet, what is sent and kept adds up",
        ),
        Stated(
            text="on MXNet with CIFAR-10, CIFAR-100 and ImageNet-1K",
            source=ABSTRACT,
            verdict="not testable here",
            why="the runs use PyTorch and data that need no download",
        ),
    ],
    tables=[
        Table(
            title="Accuracy and bytes",
            sweep="hylo",
            rows=[
                (f"{model}, {name}", {**which, **variant})
                for model, which in MODELS.items()
                for name, variant in {**_variants(model), **_existing(model)}.items()
            ],
            columns=["test_accuracy", "train_accuracy", "payload_bytes_per_step", "effective_density"],
            note="On one server, except PowerSGD. Bytes are the mean over ranks and include the server's answers. "
            "`effective_density` is the share of elements sent, whatever their bits.",
        ),
        Table(
            title="Speed on links",
            sweep="hylo_links",
            rows=[
                (f"{model}, {name}, {link}", {**MODELS[model], **which, **bandwidth})
                for model in MODELS
                for link, bandwidth in FAST_LINKS.items()
                for name, which in _compared(model).items()
            ],
            columns=["samples_per_s", "step_time_s", "payload_bytes_per_step"],
        ),
        Table(
            title="What the server's answers lose",
            sweep="answers",
            rows=[(name, {**HYLO, **answers}) for name, answers in ANSWERS.items()],
            columns=["test_accuracy", "train_accuracy", "time_to_target_s", "step_time_s"],
            derived=WHOLE_TRAINING,
            note="small_cnn on digits, 4 hosts at 100 Mbit/s, layers cut for the servers.",
        ),
    ],
    drawings=[
        Drawing(
            kind="accuracy-bytes",
            name="hylo-bytes",
            sweep="hylo",
            only=[{**MODELS["VGG-11"], **method} for method in (*VARIANTS.values(), *_existing("VGG-11").values())],
        ),
    ],
)
