"""The time line as a picture."""

from __future__ import annotations

from collections import deque
from xml.etree import ElementTree

from atoll.telemetry.samples import Sample
from atoll.telemetry.timeline import Bar, Row
from atoll.web.drawing import (
    COLOURS,
    MAX_ROWS,
    PIXELS,
    colour_of,
    legend_html,
    sparkline_svg,
    tile_html,
    time_line_svg,
)


def drawn(rows: list[Row], names: dict[int, str]) -> list[ElementTree.Element]:
    svg = time_line_svg(rows, names, lambda row: f"host {row.host}", now=10.0, window=10.0)
    return list(ElementTree.fromstring(svg))


def test_each_session_has_a_path_in_the_row_of_each_device_where_it_ran():
    rows = [Row(0, 0, 0, deque([Bar(0.0, 5.0, 1), Bar(5.0, 10.0, 2)])), Row(0, 1, 0, deque([Bar(9.0, 10.0, 2)]))]
    paths = [each for each in drawn(rows, {1: "a", 2: "b"}) if each.get("fill")]
    assert [(path.get("fill"), path[0].text) for path in paths] == [
        (COLOURS[0], "a"),
        (COLOURS[1], "b"),
        (COLOURS[1], "b"),
    ]
    assert f"h{PIXELS // 2}v" in (paths[0].get("d") or "")


def test_the_functions_of_a_session_have_its_color_and_a_title_each():
    rows = [Row(0, 0, 0, deque([Bar(0.0, 5.0, 1, "jit_step"), Bar(5.0, 10.0, 1, "jit_eval")]))]
    paths = [each for each in drawn(rows, {1: "train.py"}) if each.get("fill")]
    assert [(path.get("fill"), path[0].text) for path in paths] == [
        (COLOURS[0], "train.py: jit_step"),
        (COLOURS[0], "train.py: jit_eval"),
    ]


def test_functions_beyond_those_with_titles_are_drawn_as_their_session():
    bars = deque(Bar(number / 10, (number + 1) / 10, 1, f"f{number}") for number in range(100))
    titles = [each[0].text for each in drawn([Row(0, 0, 0, bars)], {1: "a"}) if each.get("fill")]
    assert titles == [*(f"a: f{number}" for number in range(50)), "a"]


def test_a_part_of_the_window_fills_the_picture():
    rows = [Row(0, 0, 0, deque([Bar(7.0, 7.5, 1, "f"), Bar(9.0, 10.0, 2, "g")]))]
    svg = time_line_svg(rows, {}, lambda row: "", now=10.0, window=1.0, ago=2.5)
    root = ElementTree.fromstring(svg)
    (path,) = [each for each in root if each.get("fill")]
    assert path[0].text == "session 1: f"
    assert f"h{PIXELS // 2}v" in (path.get("d") or "")
    assert [each.text for each in root if (each.text or "").endswith("ago")][:2] == ["2.5 s ago", "2.7 s ago"]


def test_names_that_clients_give_are_text_and_nothing_else():
    evil = "<script>alert(1)</script>\"'&"
    rows = [Row(0, 0, 0, deque([Bar(0.0, 5.0, 1)]))]
    (path,) = [each for each in drawn(rows, {1: evil}) if each.get("fill")]
    assert path[0].text == evil
    assert "<script" not in legend_html({1: evil})


def test_more_devices_than_a_picture_takes_are_left_out():
    rows = [Row(0, host, 0) for host in range(MAX_ROWS + 5)]
    labels = [each.text for each in drawn(rows, {}) if (each.text or "").startswith("host")]
    assert len(labels) == MAX_ROWS


def test_sessions_beyond_the_colours_share_them():
    assert colour_of(1) == colour_of(1 + len(COLOURS)) != colour_of(2)


def test_a_sparkline_has_the_height_of_its_values_and_leaves_gaps_open():
    samples = [Sample(0, 10, busy=0.5), Sample(10, 20, busy=1.0), Sample(60, 100, busy=0.0)]
    root = ElementTree.fromstring(sparkline_svg(samples, lambda sample: sample.busy, 1.0, "<busy>"))
    (area,) = [each.get("d") for each in root.iter() if each.get("class") == "area"]
    assert area == "M0.0 40V20.0H30.0V0.0H60.0V40ZM180.0 40V40.0H300.0V40Z"
    assert root[0].text == "<busy>"


def test_a_tile_without_samples_is_empty_and_its_texts_are_text():
    tile = tile_html("<b>", "1", "<i>", sparkline_svg([], lambda sample: 1.0, 0.0, ""))
    assert '<path d="" class="area"/>' in tile
    assert "<i>" not in tile
