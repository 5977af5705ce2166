from __future__ import annotations

import itertools
from pathlib import Path
from xml.etree import ElementTree

import pytest
from matplotlib.colors import to_hex
from matplotlib.text import Text

from bench.report.plots import style
from bench.report.plots.kinds import KINDS
from bench.report.plots.results import NotDrawable, Results
from bench.report.plots.style import SUFFIXES, inline_svg, save
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
    "profile": ("time to target / time of the fastest method (factor)", "workloads within this factor (%)"),
    "density": ("", "layer"),
}
SVG = "{http://www.w3.org/2000/svg}"
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
        # The picture is the same in every format, and writing a format does not depend on the picture.
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
    """The mean of three times 0.7 is 0.6999999999999998, below the lowest seed."""
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


@pytest.mark.parametrize("name", KINDS)
def test_every_picture_has_a_title(name: str, full: Results) -> None:
    figure = KINDS[name].draw(full).figure
    titles = [figure.get_suptitle(), figure.axes[0].get_title(loc="left")]
    assert any("topk" not in title and title for title in titles)


@pytest.mark.parametrize("name", KINDS)
def test_what_is_drawn_says_its_figures_under_the_pointer(name: str, full: Results, tmp_path: Path) -> None:
    save(KINDS[name].draw(full), tmp_path / "picture.svg")
    for svg in (inline_svg(KINDS[name].draw(full), name), (tmp_path / "picture.svg").read_text(encoding="utf-8")):
        said = [title.text or "" for title in ElementTree.fromstring(svg).iter(f"{SVG}title")]
        assert any("topk:ratio=0.01 + allgather" in text for text in said)


def test_each_point_of_a_curve_has_its_own_tooltip(tmp_path: Path) -> None:
    svg = inline_svg(KINDS["accuracy-epochs"].draw(results(tmp_path, fake_run([0.5, 0.95]))), "a")
    said = [point[0].text for point in ElementTree.fromstring(svg).iter(f"{SVG}use") if len(point)]
    assert said == [
        "none + native: 50.00% after 1, seeds from 50.00% to 50.00%",
        "none + native: 95.00% after 2, seeds from 95.00% to 95.00%",
    ]


@pytest.mark.parametrize("name", ["accuracy-time", "accuracy-bytes", "accuracy-epochs", "pareto"])
def test_an_axis_of_accuracies_ends_at_100_percent(name: str, full: Results) -> None:
    axes = KINDS[name].draw(full).figure.axes[0]
    assert 1.0 < axes.get_ylim()[1] < 1.03


def test_a_method_has_one_colour_in_all_pictures_of_the_same_rows(tmp_path: Path) -> None:
    """The colour depends neither on other methods in a picture nor on the number of the method's curves."""
    rows, layers = everything()
    failed = fake_row(compressor="bf16", status="failed", error="a rank was lost")
    of_all = results(tmp_path, [failed, *rows], layers)
    curve = {name: KINDS[name].draw(of_all).figure.axes[0].lines for name in ("accuracy-time", "scaling", "profile")}
    colors = {
        name: [line.get_color() for line in lines if line.get_color() != style.GREY] for name, lines in curve.items()
    }
    assert {tuple(dict.fromkeys(each)) for each in colors.values()} == {(style.PALETTE[1], style.PALETTE[2])}
    bars = KINDS["step"].draw(of_all).figure.axes[0].patches
    assert {to_hex(bar.get_facecolor()) for bar in bars} == {style.PALETTE[1], style.PALETTE[2]}
    assert style.Methods([("topk", "allgather", "sgd")]).index("topk", "allgather") == 0  # as a prediction names it


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
