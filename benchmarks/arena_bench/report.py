# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What the samples say: numbers, table, plot."""

import itertools
import math
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

# Messages are counted from 1 in each set of processes.
PHASES = {"first": (1, 1), "cold 1-10": (1, 10), "warm 20-60": (20, 60)}
METRICS = {
    "enqueue_ms": "enqueue",
    "dequeued_ms": "dequeued",
    "device_ms": "on device",
}
FLAGS = ("off", "on")
RATIOS = (("on", "limit"), ("peer", "on"), ("off", "on"))

Sample = dict[str, Any]
Spread = dict[str, float]


def spread(values: list[float]) -> Spread:
    p10, median, p90 = np.percentile(values, (10, 50, 90))
    return {"median": median, "p10": p10, "p90": p90, "n": len(values)}


def summarize(samples: list[Sample]) -> dict[str, dict[str, dict[str, Spread]]]:
    """Return phase → metric → arm → spread, for samples of one size and one
    number of readers."""
    summary: dict[str, dict[str, dict[str, Spread]]] = {}
    limit = _best_limit(samples)
    for phase, (low, high) in PHASES.items():
        summary[phase] = {}
        for metric in METRICS:
            values: dict[str, list[float]] = defaultdict(list)
            for s in samples:
                if s["arm"] != "limit" and low <= s["message"] <= high:
                    values[s["arm"]].append(s[metric])
            # The limit's memory is warm in every phase.
            values["limit"] = [s[metric] for s in limit]
            summary[phase][metric] = {a: spread(v) for a, v in values.items() if v}
    return summary


def _best_limit(samples: list[Sample]) -> list[Sample]:
    by_threads: dict[int, list[Sample]] = defaultdict(list)
    for s in (s for s in samples if s["arm"] == "limit"):
        by_threads[s["threads"]].append(s)
    return min(
        by_threads.values(),
        key=lambda group: np.median([s["enqueue_ms"] for s in group]),
        default=[],
    )


def table(title: str, samples: list[Sample], arms: list[str]) -> str:
    summary = summarize(samples)
    ratios = [pair for pair in RATIOS if set(pair) <= set(arms)]
    head = f"{'':<22}" + "".join(f"{arm:>24}" for arm in arms)
    head += "".join(f"{'/'.join(pair):>10}" for pair in ratios)
    lines = [f"{title}; ms: median [p10-p90]", head]
    for phase, metrics in summary.items():
        for metric, name in METRICS.items():
            by_arm = metrics[metric]
            line = f"{phase:<11}{name:<11}"
            line += "".join(f"{_cell(by_arm.get(arm)):>24}" for arm in arms)
            for a, b in ratios:
                known = a in by_arm and b in by_arm
                ratio = by_arm[a]["median"] / by_arm[b]["median"] if known else None
                line += f"{f'{ratio:.2f}' if ratio is not None else '-':>10}"
            lines.append(line)
    lines.append(f"{'first / warm, on device':<22}" + _first_to_warm(summary, arms))
    lines.append(f"{'diverted':<22}" + _diverted(samples, arms))
    threads = _best_limit(samples)[0]["threads"]
    lines.append(f"limit: {threads} threads were best")
    return "\n".join(lines)


def _cell(s: Spread | None) -> str:
    if s is None:
        return "-"
    digits = 2 if s["p90"] < 1000 else 0
    median, low, high = (f"{s[key]:.{digits}f}" for key in ("median", "p10", "p90"))
    return f"{median} [{low}-{high}]"


def _first_to_warm(summary: dict, arms: list[str]) -> str:
    first, *_, warm = (phase["device_ms"] for phase in summary.values())
    return "".join(
        f"{first[arm]['median'] / warm[arm]['median']:>24.2f}"
        if arm != "limit" and arm in first and arm in warm
        else f"{'-':>24}"
        for arm in arms
    )


def _diverted(samples: list[Sample], arms: list[str]) -> str:
    line = ""
    for arm in arms:
        shares = [s["shared"] for s in samples if s["arm"] == arm and "shared" in s]
        line += f"{f'{np.mean(shares):.0%}' if shares else '-':>24}"
    return line


def resident_line(blocks: list[dict[str, Any]], arms: list[str]) -> str:
    """Return MiB resident before the first message and at the end, the largest
    of the blocks."""
    line = f"{'arena resident, MiB':<22}"
    for arm in arms:
        own = [b for b in blocks if b["arm"] == arm and "resident_after" in b]
        cell = "-"
        if own:
            before, after = (
                max(b[key] for b in own) / (1 << 20)
                for key in ("resident_before", "resident_after")
            )
            cell = f"{before:.0f} -> {after:.0f}"
        line += f"{cell:>24}"
    return line


def text_table(pairs: dict[str, list[dict[str, float]]]) -> str:
    lines = [f"{'enqueue, ms':<40}{'off':>8}{'on':>8}{'on/off: median':>16}"]
    lines[0] += f"{'95 % interval':>16}{'[p10-p90]':>14}{'pairs':>8}"
    times = {"wall clock": "ms", "CPU of its thread": "cpu_ms"}
    for (kind, rows), (name, key) in itertools.product(pairs.items(), times.items()):
        off, on = (np.array([row[f"{flag}_{key}"] for row in rows]) for flag in FLAGS)
        ratios = sorted(on / off)
        low, high = median_interval(ratios)
        s = spread(ratios)
        interval = f"{low:.3f}-{high:.3f}"
        outer = f"[{s['p10']:.2f}-{s['p90']:.2f}]"
        lines.append(
            f"{f'{kind}, {name}':<40}{np.median(off):>8.3f}{np.median(on):>8.3f}"
            f"{s['median']:>16.3f}{interval:>16}{outer:>14}{s['n']:>8}"
        )
    return "\n".join(lines)


def pairs_table(pairs: list[dict[str, float]]) -> str:
    """Of messages with tensors that went by two queues in turn."""
    lines = [f"{'ms':<13}{'off':>22}{'on':>22}{'on/off: median':>16}"]
    lines[0] += f"{'95 % interval':>14}"
    metrics = {**METRICS, "device_ms": "read"}
    if "on_remote_ms" in pairs[0]:
        metrics["remote_ms"] = "read, remote"
    for metric, name in metrics.items():
        off, on = (
            np.array([pair[f"{flag}_{metric}"] for pair in pairs]) for flag in FLAGS
        )
        ratios = sorted(on / off)
        low, high = median_interval(ratios)
        lines.append(
            f"{name:<13}{_cell(spread(off)):>22}{_cell(spread(on)):>22}"
            f"{np.median(ratios):>16.2f}{f'{low:.2f}-{high:.2f}':>14}"
        )
    share = np.mean([pair["on_shared"] for pair in pairs])
    lines.append(f"through the arena: {share:.0%}; pairs: {len(pairs)}")
    return "\n".join(lines)


def median_interval(ordered: list[float]) -> tuple[float, float]:
    """Return a 95 % confidence interval of the median, from order statistics."""
    n = len(ordered)
    half = 0.98 * math.sqrt(n)
    low, high = math.floor(n / 2 - half), math.ceil(n / 2 + half)
    return ordered[max(0, low)], ordered[min(n - 1, high)]


def burst_table(names: list[str], samples: list[Sample], arms: list[str]) -> str:
    lines = [
        "Bursts, one after the other in fresh processes; ms: median [p10-p90]",
        f"{'':<22}" + "".join(f"{arm:>24}" for arm in arms),
    ]
    for number, name in enumerate(names, 1):
        own = [s for s in samples if s["message"] == number]
        for metric, label in METRICS.items():
            line = f"{name:<11}{label:<11}"
            for arm in arms:
                values = [s[metric] for s in own if s["arm"] == arm]
                line += f"{_cell(spread(values)):>24}"
            lines.append(line)
        lines.append(f"{name:<11}{'diverted':<11}" + _diverted(own, arms))
    return "\n".join(lines)


def plot(path: Path, groups: dict[str, list[Sample]], arms: list[str]) -> None:
    """Draw each message's median time by arm, a row of axes for each group.

    Raises:
        ImportError: If matplotlib is not there.

    """
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    shown = ("enqueue_ms", "device_ms")
    figure, axes = pyplot.subplots(
        len(groups),
        len(shown),
        figsize=(12, 4 * len(groups)),
        squeeze=False,
        layout="constrained",
    )
    for row, (title, samples) in zip(axes, groups.items()):
        limit = _best_limit(samples)
        for axis, metric in zip(row, shown):
            for arm in arms:
                if arm == "limit":
                    median = spread([s[metric] for s in limit])["median"]
                    axis.axhline(median, color="black", ls="--", label=arm)
                    continue
                by_message: dict[int, list[float]] = defaultdict(list)
                for s in (s for s in samples if s["arm"] == arm):
                    by_message[s["message"]].append(s[metric])
                low, middle, high = np.percentile(
                    [by_message[m] for m in sorted(by_message)], (10, 50, 90), axis=1
                )
                axis.plot(sorted(by_message), middle, marker=".", label=arm)
                axis.fill_between(sorted(by_message), low, high, alpha=0.2)
            axis.set(
                title=f"{title}: {METRICS[metric]}",
                xlabel="message of a fresh set of processes",
                ylabel="ms",
                yscale="log",
            )
            axis.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
