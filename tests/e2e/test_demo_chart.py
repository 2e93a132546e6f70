# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The demo's picture, without an engine."""

from pathlib import Path
from unittest import mock

from matplotlib.figure import Figure
from PIL import Image

from demo_lib.chart import Bars, draw

REQUESTS = [
    Bars("large", 58_000_000, (0.9, 0.7), (0, 58_000_000)),
    Bars("small", 6_000_000, (0.2, 0.3), (0, 0)),
]


def test_png_is_written(tmp_path: Path):
    path = tmp_path / "demo.png"
    draw(path, REQUESTS)
    with Image.open(path) as image:
        assert image.format == "PNG"
        assert len(image.getcolors(1 << 20)) > 2


def test_every_request_is_drawn_smallest_first():
    with mock.patch.object(Figure, "savefig", autospec=True) as saved:
        draw(Path("unused"), REQUESTS)
    times, ways = saved.call_args.args[0].axes
    assert [label.get_text() for label in times.get_xticklabels()] == [
        "small\n6 MB",
        "large\n58 MB",
    ]
    off, on = times.containers
    assert [bar.get_height() for bar in off] == [0.2, 0.9]
    assert [bar.get_height() for bar in on] == [0.3, 0.7]
    arena_off, otherwise_off, arena_on, otherwise_on = ways.containers
    assert [bar.get_height() for bar in arena_off] == [0, 0]
    assert [bar.get_height() for bar in otherwise_off] == [6, 58]
    assert [bar.get_height() for bar in arena_on] == [0, 58]
    assert [bar.get_height() for bar in otherwise_on] == [6, 0]
