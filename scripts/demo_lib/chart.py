# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What the demo found, as a picture."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

BAR_WIDTH = 0.38
OFF, ON, OTHERWISE = "tab:gray", "tab:blue", "lightgray"
MB = 1_000_000


@dataclass(frozen=True)
class Bars:
    """One request of the demo, in both arms, off before on."""

    label: str
    tensor_bytes: int
    first_token_seconds: tuple[float, float]
    # Of tensor_bytes, those that went through the arena.
    arena_bytes: tuple[int, int]


def draw(path: Path, requests: Sequence[Bars]) -> None:
    """Write a PNG: the time to first token, and which way the bytes went."""
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    times, ways = figure.subplots(1, 2)
    requests = sorted(requests, key=lambda bars: bars.tensor_bytes)
    _draw_times(times, requests)
    _draw_ways(ways, requests)
    for axes in (times, ways):
        axes.set_xticks(
            range(len(requests)),
            [f"{bars.label}\n{bars.tensor_bytes / MB:.0f} MB" for bars in requests],
            fontsize="small",
        )
        axes.grid(axis="y", alpha=0.3)
        axes.set_axisbelow(True)
        axes.use_sticky_edges = False
        axes.margins(y=0.15)
        axes.set_ylim(bottom=0)
        axes.legend()
    figure.savefig(path, format="png", dpi=120)


def _draw_times(axes: Axes, requests: Sequence[Bars]) -> None:
    for arm, (name, color) in enumerate((("arena off", OFF), ("arena on", ON))):
        drawn = axes.bar(
            [i + (arm - 0.5) * BAR_WIDTH for i in range(len(requests))],
            [bars.first_token_seconds[arm] for bars in requests],
            BAR_WIDTH,
            label=name,
            color=color,
        )
        axes.bar_label(drawn, fmt="%.2f", fontsize="small")
    axes.set_title("Time to first token, by size of the pixels")
    axes.set_ylabel("s, median")


def _draw_ways(axes: Axes, requests: Sequence[Bars]) -> None:
    for arm in (0, 1):
        x = [i + (arm - 0.5) * BAR_WIDTH for i in range(len(requests))]
        arena = [bars.arena_bytes[arm] / MB for bars in requests]
        otherwise = [
            (bars.tensor_bytes - bars.arena_bytes[arm]) / MB for bars in requests
        ]
        label = ("through the arena", "in the message") if arm == 0 else (None, None)
        axes.bar(x, arena, BAR_WIDTH, label=label[0], color=ON)
        drawn = axes.bar(
            x, otherwise, BAR_WIDTH, arena, label=label[1], color=OTHERWISE
        )
        axes.bar_label(drawn, [("off", "on")[arm]] * len(x), fontsize="small")
    axes.set_title("How the pixels reached the workers")
    axes.set_ylabel("MB a request")
