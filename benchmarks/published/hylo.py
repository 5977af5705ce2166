"""Hylo: a compression of its own for convolutions and for fully connected layers, on a parameter server."""

from __future__ import annotations

from bench.report.targets import BYTES
from benchmarks.published.claims import Claim, Stated, above
from benchmarks.published.figures import Difference, Gain, Which, faster
from benchmarks.published.parts import Drawing, System, Table
from benchmarks.published.setups import DENSE, links

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
EXISTING: dict[str, Which] = {"dense": DENSE, "MXNet's two bits": TWOBIT}
CHOSEN = ("VGG-11", "100 Mbit/s", "one server")
"""before the runs"""


def _variants(model: str) -> dict[str, Which]:
    """What compresses on this model; ResNet-20 has no fully connected layer large enough."""
    return VARIANTS if model == "VGG-11" else {"both": HYLO}


def _on_links(model: str, link: str, placement: str) -> Which:
    return {**MODELS[model], **FAST_LINKS[link], **PLACEMENTS[placement]}


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
            for name, variant in {**_variants(model), "MXNet's two bits": TWOBIT}.items()
        ),
        *(
            Claim(
                text="better than existing methods, accuracy and bytes together",
                source=ABSTRACT,
                setup=f"{model}, digits, 4 workers, gradient bytes of {name} until 90 % / its own; chosen afterwards",
                sweep="hylo",
                measure=Gain(which={**which, **HYLO}, than={**which, **than}, metric=BYTES, accuracy=0.9),
                claimed=above(1.0),
                counts=False,
            )
            for model, which in MODELS.items()
            for name, than in EXISTING.items()
        ),
        *(
            Claim(
                text="faster than existing methods by up to 30 %",
                source=ABSTRACT,
                setup=f"{', 4 hosts at '.join(CHOSEN[:2])}, {CHOSEN[2]}, samples/s / of {name}; the case chosen before "
                "the runs",
                sweep="hylo_links",
                measure=faster({**_on_links(*CHOSEN), **HYLO}, {**_on_links(*CHOSEN), **than}),
                claimed=above(1.3),
            )
            for name, than in EXISTING.items()
        ),
        *(
            Claim(
                text="faster than existing methods",
                source=ABSTRACT,
                setup=f"{model}, 4 hosts at {link}, {placement}, samples/s / of {name}",
                sweep="hylo_links",
                measure=faster(
                    {**_on_links(model, link, placement), **HYLO}, {**_on_links(model, link, placement), **than}
                ),
                claimed=above(1.0),
            )
            for model in MODELS
            for link in FAST_LINKS
            for placement in PLACEMENTS
            if (model, link, placement) != CHOSEN
            for name, than in EXISTING.items()
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
            why="tests: whole filters, the packing of MXNet, what is sent and kept adds up",
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
                for name, variant in {"dense": DENSE, **_variants(model), "two bits": TWOBIT}.items()
            ],
            columns=["test_accuracy", "train_accuracy", "payload_bytes_per_step", "effective_density"],
            note="On one server; bytes are those of a rank on average, the server's dense answers included. "
            "`effective_density` is the share of elements sent, whatever their bits.",
        ),
        Table(
            title="Speed on links",
            sweep="hylo_links",
            rows=[
                (f"{model}, {name}, {placement}, {link}", {**which, **variant, **where, **bandwidth})
                for model, which in MODELS.items()
                for link, bandwidth in FAST_LINKS.items()
                for placement, where in PLACEMENTS.items()
                for name, variant in {"dense": DENSE, **_variants(model), "two bits": TWOBIT}.items()
            ],
            columns=["samples_per_s", "step_time_s", "exposed_s", "payload_bytes_max_per_step"],
        ),
    ],
    drawings=[
        Drawing(
            kind="accuracy-bytes",
            name="hylo-bytes",
            sweep="hylo",
            only=[{**MODELS["VGG-11"], **variant} for variant in (DENSE, *VARIANTS.values(), TWOBIT)],
        ),
        Drawing(
            kind="step",
            name="hylo-step",
            sweep="hylo_links",
            only=[
                {**MODELS["VGG-11"], **variant, **FAST_LINKS["100 Mbit/s"], **PLACEMENTS["one server"]}
                for variant in (DENSE, *VARIANTS.values(), TWOBIT)
            ],
        ),
    ],
)
