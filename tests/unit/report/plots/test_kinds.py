from __future__ import annotations

import itertools
from pathlib import Path
from xml.etree import ElementTree

import pytest
from matplotlib.text import Text

from bench.report.plots import style
from bench.report.plots.kinds import KINDS
from bench.report.plots.picture import SUFFIXES, inline_svg, save
from bench.report.plots.results import NotDrawable, Results
from tests.testing.fake_results import everything, fake_run, results
from tests.testing.fake_rows import fake_row

LABELS = {
    "accuracy-time": ("training time (s)", "test accuracy (%)"),
    "accuracy-bytes": ("bytes sent per rank (MB)", "test accuracy (%)"),
    "accuracy-epochs": ("epochs", "test accuracy (%)"),
    "target": ("optimizer steps", "seeds that reached the target (%)"),
    "step": ("time per step, mean over seeds (ms)", ""),
    "pareto": ("training time (s)", "test accuracy (%)"),
    "bandwidth": ("bandwidth of the link (Mbit/s)", "speed-up in samples per second (factor)"),
    "scaling": ("ranks", "speed (samples/s)"),
    "profile": ("time to target / that of the fastest method (factor)", "workloads within this factor (%)"),
    "density": ("", "layer"),
}
MAGIC = {".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF"}


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return results(tmp_path_factory.mktemp("full"), *everything())


def test_every_kind_is_tried_below() -> None:
    assert set(LABELS) == set(KINDS)


@pytest.mark.parametrize("name", KINDS)
def test_axes_say_what_they_show_and_in_which_unit(name: str, full: Results) -> None:
    axes = KINDS[name].draw(full).figure.axes[0]
    assert (axes.get_xlabel(), axes.get_ylabel()) == LABELS[name]


@pytest.mark.parametrize("name", KINDS)
def test_the_words_name_what_is_drawn(name: str, full: Results) -> None:
    assert "topk:ratio=0.01" in KINDS[name].draw(full).alt


@pytest.mark.parametrize(
    ("name", "suffix"),
    [
        # What is drawn is the same in every format, and each is written alike whatever is drawn.
        pytest.param(name, suffix, marks=[] if suffix == ".svg" or name == "target" else pytest.mark.long)
        for name, suffix in itertools.product(KINDS, SUFFIXES)
    ],
)
def test_equal_rows_give_equal_files(name: str, suffix: str, full: Results, tmp_path: Path) -> None:
    files = [tmp_path / f"{number}{suffix}" for number in (1, 2)]
    for file in files:
        save(KINDS[name].draw(full), file)
    first, second = (file.read_bytes() for file in files)
    assert first.startswith(MAGIC[suffix])
    assert first == second
    assert b"Date" not in first


@pytest.mark.parametrize("name", KINDS)
def test_nothing_that_is_written_lies_on_something_else_or_outside(name: str, full: Results) -> None:
    picture = KINDS[name].draw(full)
    with style.applied():
        picture.figure.draw_without_rendering()
        page = picture.figure.bbox
        boxes = [legend.get_window_extent() for legend in picture.figure.legends]
        for axes in picture.figure.axes:
            texts = [text for text in axes.get_children() if isinstance(text, Text)]
            texts += [axes.xaxis.label, axes.yaxis.label]
            low, high = sorted(axes.get_ylim())
            texts += [tick.label1 for tick in axes.yaxis.get_major_ticks() if low <= tick.get_loc() <= high]
            boxes += [text.get_window_extent() for text in texts if text.get_text()]
    shown = [box for box in boxes if box.width > 1.0 and box.height > 1.0]
    assert all(page.x0 <= box.x0 and box.x1 <= page.x1 and page.y0 <= box.y0 and box.y1 <= page.y1 for box in shown)
    assert not [(a, b) for a, b in itertools.combinations(shown, 2) if a.overlaps(b)]


@pytest.mark.parametrize("name", KINDS)
def test_rows_that_do_not_allow_it_are_named(name: str, tmp_path: Path) -> None:
    bare = fake_row(status="failed")
    with pytest.raises(NotDrawable, match=r" needs? .*"):
        KINDS[name].draw(results(tmp_path, [bare]))


@pytest.mark.parametrize("name", ["pareto", "scaling", "bandwidth"])
def test_seeds_that_agree_are_drawn_although_their_mean_is_rounded(name: str, tmp_path: Path) -> None:
    """Three times 0.7 has the mean 0.6999999999999998, below the lowest seed."""
    methods = itertools.product((("none", 100.1), ("topk", 200.1)), (2, 4), (1e7, 1e8), (1, 2, 3))
    rows = [
        row
        for (compressor, speed), world_size, uplink_bps, seed in methods
        for row in fake_run(
            [0.1, 0.7],
            compressor=compressor,
            samples_per_s=speed,
            world_size=world_size,
            uplink_bps=uplink_bps,
            seed=seed,
            config_id=f"{compressor}{world_size}{uplink_bps}",
        )
    ]
    KINDS[name].draw(results(tmp_path, rows))


def test_curves_differ_in_grey_print_too() -> None:
    looks = [(str(style.line(i)["linestyle"]), style.line(i)["marker"]) for i in range(35)]
    assert len(set(looks)) == 35


def test_a_name_is_never_read_as_a_formula(tmp_path: Path) -> None:
    rows = fake_run([0.5, 0.95], compressor="$\\frac{$", collective="</svg><script>")
    picture = KINDS["accuracy-time"].draw(results(tmp_path, rows))
    svg = inline_svg(picture, "a")
    ElementTree.fromstring(svg)
    assert "<script" not in svg


def test_pictures_on_one_page_share_no_id(full: Results) -> None:
    ids = [
        {element.get("id") for element in ElementTree.fromstring(inline_svg(KINDS["pareto"].draw(full), name)).iter()}
        for name in ("first", "second")
    ]
    assert ids[0] & ids[1] == {None}
    assert all(name is None or name.startswith("first-") for name in ids[0])


def test_a_long_name_is_broken_in_the_legend(tmp_path: Path) -> None:
    rows = fake_run([0.5, 0.95], compressor=f"topk:{'skip=norm ' * 30}")
    figure = KINDS["accuracy-time"].draw(results(tmp_path, rows)).figure
    (name,) = (text.get_text() for text in figure.legends[0].get_texts())
    assert max(map(len, name.split("\n"))) <= 88
