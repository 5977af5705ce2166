"""The host, its devices and one pool: the patent application of 2022."""

from __future__ import annotations

from bench.report.targets import TIME
from benchmarks.published.claims import Claim, Stated, above
from benchmarks.published.figures import Difference, Factor, Gain, Which, faster, fewer_bytes
from benchmarks.published.parts import Drawing, System, Table
from benchmarks.published.setups import LINKS

MAX_ADABELIEF: Which = {"optimizer": "max_adabelief"}
RELATIVES: dict[str, Which] = {"Adam": {"optimizer": "adam"}, "AdaBelief": {"optimizer": "adabelief"}}
PLACED: Which = {"optimizer": "sgd", "strategy": "placed:*"}


FACTORS: dict[str, Which] = {
    "whole, by a ring": {"optimizer": "kfac:transfer=dense,update_every=1"},
    "triangles, by a ring": {"optimizer": "kfac:update_every=1"},
    "L, by a ring with QR merge": {"optimizer": "kfac:transfer=cholesky,update_every=1"},
    "L, by all-gather": {"optimizer": "kfac:collective=allgather,transfer=cholesky,update_every=1"},
}
WHOLE, TRIANGLES, *OF_L = FACTORS
RANKS = (2, 3, 4, 6)
SLOW_LINKS: Which = {"world_size": 4, **LINKS["100 Mbit/s"]}


def _among(ranks: int, form: str) -> Which:
    """Return the factors in this form, with this number of ranks and without virtual hosts."""
    return {**FACTORS[form], "world_size": ranks, "uplink_bps": None}


def _trained_with(form: str) -> Which:
    usual = "kfac:collective=allgather"
    return {"optimizer": usual if form == "triangle" else f"{usual},transfer={form}"}


SYSTEM = System(
    name="heterogeneous",
    claims=[
        Claim(
            text="Max-AdaBelief converges better",
            source="paragraphs 12, 73-78",
            setup="small_cnn, digits, 2 ranks, 6 epochs, test accuracy less the other's, each at its tuned rate",
            sweep="heterogeneous",
            measure={name: Difference(which=MAX_ADABELIEF, than=than) for name, than in RELATIVES.items()},
            claimed=above(0.0),
        ),
        Claim(
            text="Max-AdaBelief converges better",
            source="paragraphs 12, 73-78",
            setup="the same runs, training loss of the other / of Max-AdaBelief in the last epoch; chosen afterwards",
            sweep="heterogeneous",
            measure={
                name: Factor(
                    which=MAX_ADABELIEF, than=than, value=lambda run: run["train_loss"], higher_is_better=False
                )
                for name, than in RELATIVES.items()
            },
            claimed=above(1.0),
            counts=False,
        ),
        *(
            Claim(
                text="sending L instead of D halves the traffic",
                source="paragraphs 9, 60-64",
                setup=f"K-FAC's factors, {ranks} ranks, bytes of whole matrices by a ring / of {form}",
                sweep="heterogeneous_factors",
                measure=fewer_bytes(_among(ranks, form), _among(ranks, WHOLE), "state_bytes_per_step"),
                claimed=above(1.9),
                counts=form in OF_L,
            )
            for form in (*OF_L, TRIANGLES)
            for ranks in RANKS
        ),
        *(
            Claim(
                text="sending L instead of D saves time",
                source="not stated",
                setup=f"the same, 4 hosts at 100 Mbit/s, samples per second of {form} / of whole matrices by a ring",
                sweep="heterogeneous_factors",
                measure=faster({**FACTORS[form], **SLOW_LINKS}, {**FACTORS[WHOLE], **SLOW_LINKS}),
                claimed=above(1.0),
                counts=False,
            )
            for form in (*OF_L, TRIANGLES)
        ),
        *(
            Claim(
                text="Max-AdaBelief converges better, in time",
                source="paragraphs 12, 73-78",
                setup=f"4 hosts at {link}, digits, time of dense SGD (which the document does not name) to 90 % / of "
                "Max-AdaBelief",
                sweep="together",
                measure=Gain(
                    which={**MAX_ADABELIEF, **bandwidth},
                    than={"optimizer": "sgd", "compressor": "none", **bandwidth},
                    metric=TIME,
                ),
                claimed=above(1.0),
                counts=False,
            )
            for link, bandwidth in LINKS.items()
        ),
        Stated(
            text="a device starts the sum when it is ready, or all on the host's command",
            source="paragraphs 11, 58-59",
            verdict="built",
            why="`--trigger async` and `sync`; both give the same numbers bit for bit; times are below",
        ),
        Stated(
            text="Γ stays positive definite, so the rate per coordinate only falls",
            source="paragraphs 30, 73, 76",
            verdict="built",
            why="the maximum never falls. The divisor, corrected by 1 - beta2^t, never falls only with "
            "`max_over=corrected` (tests), and a learning rate that rises undoes both",
        ),
        Stated(
            text="the receiver restores D from L; both can be combined with Max-AdaBelief",
            source="paragraphs 63, 72, 78",
            verdict="built",
            why="`kfac:transfer=cholesky,collective=ring`, without a fallback in any run below; with "
            "`inner=max_adabelief` ranks exchange the moments of their own gradients, preconditioned with the shared "
            "factors (tests)",
        ),
        Stated(
            text="the host loads the model, deals the data and commands; devices compute, exchange and wait",
            source="paragraphs 10, 45-51",
            verdict="built",
            why="`--strategy placed:by=data`: bit for bit equal to a run of ranks that sum over the pool",
        ),
        Stated(
            text="gradients go around a ring, through a tree, or are merged by the host",
            source="paragraphs 52-57",
            verdict="built",
            why="`ring`, `tree` and `pool`; `placed:merge=host` gives the same sums, all over the host's link",
        ),
        Stated(
            text="layers by type on GPU, FPGA, ASIC and DPU are more efficient, perhaps more accurate",
            source="paragraphs 7-8, 39-42",
            verdict="not testable here",
            why="no such devices. It is built (`placed:by=type`): the numbers are bit for bit those of one process "
            "with as many threads. In the model, with nominal figures, a step is slower than on the best single "
            "device: `../heterogeneous.md`",
        ),
        Stated(
            text="devices reach each other's memory over CXL; one oneAPI kernel for all of them; a host on QPI or UPI",
            source="paragraphs 2-6, 23, 30-36, 65-66",
            verdict="not testable here",
            why="no such hardware; a pool in shared memory and one step function in torch take their place",
        ),
    ],
    tables=[
        Table(
            title="Optimizers",
            sweep="heterogeneous",
            rows=[("Max-AdaBelief", MAX_ADABELIEF), *RELATIVES.items()],
            columns=["test_accuracy", "train_accuracy", "payload_bytes_per_step", "step_time_s"],
            note="Max-AdaBelief exchanges both moments in each step, which is twice the bytes.",
        ),
        Table(
            title="Triggers",
            sweep="heterogeneous",
            rows=[(trigger, {**PLACED, "trigger": trigger}) for trigger in ("sync", "async")],
            columns=["test_accuracy", "step_time_s", "exchange_s"],
            note="The trigger changes when a sum starts, not its value.",
        ),
        Table(
            title="Factors of K-FAC: bytes and time",
            sweep="heterogeneous_factors",
            rows=[
                *((f"{ranks} ranks, {form}", _among(ranks, form)) for ranks in RANKS for form in FACTORS),
                *((f"4 hosts at 100 Mbit/s, {form}", {**which, **SLOW_LINKS}) for form, which in FACTORS.items()),
            ],
            columns=["state_bytes_per_step", "step_time_s", "exchange_s", "factor_fallbacks"],
            note="Factors are updated in every step. Bytes are the mean over ranks.",
        ),
        Table(
            title="Factors of K-FAC: accuracy",
            sweep="heterogeneous",
            rows=[(form, _trained_with(form)) for form in ("dense", "triangle", "cholesky")],
            columns=["factor_fallbacks", "test_accuracy"],
            note="After one epoch with two ranks; all three use all-gather.",
        ),
    ],
    drawings=[
        Drawing(
            kind="accuracy-epochs",
            name="heterogeneous-optimizers",
            sweep="heterogeneous",
            only=[MAX_ADABELIEF, *RELATIVES.values()],
        )
    ],
)
