import pytest

from dynaflow.timeline import Span, Timeline
from dynaflow.view.picture import PART_COLOURS, WHOLE_COLOUR, part_colours, picture, split_label

pytest.importorskip("matplotlib")

SEQUENTIAL = Timeline((Span("caller", "layers.0.attn", 0, 4000), Span("caller", "layers.0.ar", 4000, 6000, "network")), "sequential")
TWO = Timeline(tuple(Span("compute", f"layers.0.attn {k}/2", 2000 * k, 2000 * k + 2000) for k in range(2)), "two")
FUSED = Timeline((Span("compute", "layers.0.attn..layers.0.mlp 0/2", 0, 9000), Span("compute", "layers.1.attn", 9000, 9900)), "fused")
UNEVEN = Timeline((Span("compute", "a 3:8/8", 0, 5), Span("compute", "a 0:3/8", 5, 8)))


def test_split_label():
    assert split_label("layers.0.attn 1/2") == ("layers.0.attn", "1/2")
    assert split_label("attn 3:8/17") == ("attn", "3:8/17")
    assert split_label("attn") == ("attn", "")


def test_split_label_of_a_function():
    assert split_label("pkg.fn[a 1/2, b 1/2]") == ("fn", "1/2")
    assert split_label("pkg.fn(own=None, ctas=8)[a 3:8/17, b 3:8/17]") == ("fn", "3:8/17")
    assert split_label("pkg.fn.2[layers.0.a 1/2]") == split_label("pkg.fn(ctas=8).12[a.1 1/2, b.1 1/2]") == ("fn", "1/2")
    assert split_label("f[a 0/2, b 1/2]") == split_label("f[a, b]") == ("f", "")


def test_split_label_of_fused_ops():
    assert split_label("layers.0.attn..layers.0.mlp 0/2") == ("layers.0.attn..layers.0.mlp", "0/2")


def test_colours_follow_the_rows():
    assert part_colours([SEQUENTIAL, TWO]) == {"": WHOLE_COLOUR, "0/2": PART_COLOURS[0], "1/2": PART_COLOURS[1]}
    assert part_colours([UNEVEN]) == {"0:3/8": PART_COLOURS[0], "3:8/8": PART_COLOURS[1]}


DRAWN = {"one": [SEQUENTIAL], "three": [SEQUENTIAL, TWO, UNEVEN], "fused": [FUSED], "empty": [Timeline(())]}


@pytest.mark.parametrize("timelines", DRAWN.values(), ids=DRAWN)
def test_picture_is_a_png(timelines, tmp_path):
    picture(timelines, tmp_path / "t.png")
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")


def test_to_picture(tmp_path):
    TWO.to_picture(tmp_path / "t.png")
    assert (tmp_path / "t.png").stat().st_size > 5000


def test_times_that_are_nobody_s_have_no_numbers(monkeypatch, tmp_path):
    drawn = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, *_, **options: drawn.append((figure, options)))
    picture([SEQUENTIAL], tmp_path / "t.png", time_label="made up", source="a plan")
    picture([SEQUENTIAL], tmp_path / "t.png")
    (made_up, options), (measured, plain) = drawn
    assert [list(figure.axes[0].get_xticks()) == [] for figure in (made_up, measured)] == [True, False]
    assert [figure.axes[0].get_title("right") for figure in (made_up, measured)] == ["", "6.0 ms"]
    assert options["metadata"] == {"Description": "a plan"} and plain["metadata"] is None
