"""Drawings of graphs: boxes do not overlap, edges lead down, frames hold their boxes."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from rlx.report.drawing import Drawing, draw

Edges = list[tuple[int, int]]


@st.composite
def layered(pick: st.DrawFn) -> tuple[list[tuple[float, float]], list[int], Edges]:
    """Boxes in groups in ascending order, and edges from earlier to later boxes."""
    count = pick(st.integers(1, 24))
    sizes = [(float(pick(st.integers(40, 260))), float(pick(st.integers(30, 90)))) for _ in range(count)]
    drawn = sorted(pick(st.lists(st.integers(-1, 2), min_size=count, max_size=count)))
    groups = [sorted({*drawn}).index(group) - 1 for group in drawn]  # -1, 0, 1, ... without gaps
    pairs = [(a, b) for a, b in combinations(range(count), 2)]
    edges = pick(st.lists(st.sampled_from(pairs), max_size=40, unique=True)) if pairs else []
    return sizes, groups, edges


def boxes(sizes: list[tuple[float, float]], drawing: Drawing) -> list[tuple[float, float, float, float]]:
    return [(x - w / 2, y, x + w / 2, y + h) for (w, h), (x, y) in zip(sizes, drawing.at, strict=True)]


@given(layered())
def test_boxes_lie_apart_and_edges_lead_down(given: tuple[list[tuple[float, float]], list[int], Edges]) -> None:
    sizes, groups, edges = given
    drawing = draw(sizes, groups, edges, framed=max(0, max(groups)))
    found = boxes(sizes, drawing)
    for a, b in combinations(found, 2):
        assert a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]
    for left, top, right, bottom in found:
        assert left >= 0 and top >= 0 and right <= drawing.width and bottom <= drawing.height
    for (a, b), route in zip(edges, drawing.routes, strict=True):
        assert found[a][3] <= found[b][1]
        assert route[0] == (drawing.at[a][0], found[a][3]) and route[-1] == drawing.at[b]
        heights = [y for _, y in route]
        assert heights == sorted(heights)
    for i, j in combinations(range(len(sizes)), 2):
        assert groups[i] == groups[j] or found[i][3] <= found[j][1]


def test_a_frame_holds_its_boxes_and_no_others() -> None:
    sizes = [(100.0, 40.0)] * 6
    drawing = draw(sizes, [-1, 0, 0, 0, 0, 1], [(0, 1), (1, 2), (1, 3), (2, 4), (3, 4), (4, 5)], framed=1)
    ((left, top, width, height),) = drawing.frames
    inside = [left < a and c < left + width and top < b and d < top + height for a, b, c, d in boxes(sizes, drawing)]
    assert inside == [False, True, True, True, True, False]
