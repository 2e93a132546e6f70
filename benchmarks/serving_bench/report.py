# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What the results of benchmark_shm_arena_serving.py say: tables and plots.

    python -m serving_bench.report RESULT.json... [--plot PREFIX]

Several files are pooled: blocks of the same arms on the same kind of machine.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import bootstrap

ARMS = ("off", "on", "peer-off", "peer-on", "ported-off", "ported-on")
# Each arm is compared with the same release, flag off; and the fork with the peer.
COMPARED = (
    ("on", "off"),
    ("peer-on", "peer-off"),
    ("on", "peer-on"),
    ("ported-on", "peer-off"),
    ("ported-on", "peer-on"),
)
TRANSPORT = ("enqueue", "dequeued", "h2d", "on_device")
RESAMPLES = 9999
PERCENTILES = {"median": 50, "p90": 90, "p99": 99}
# With fewer values above it a percentile hangs on single values, and a bootstrap draws
# the same ones again and again.
MIN_ABOVE = 4

Values = dict[str, list[float]]


def difference(a: list[float], b: list[float], percentile: float) -> str:
    """Of a percentile of two arms, in ms, with a 95 % interval; "none" where that
    spans zero."""

    def statistic(x, y, axis=-1):
        return np.percentile(x, percentile, axis) - np.percentile(y, percentile, axis)

    low, high = bootstrap(
        (a, b),
        statistic,
        n_resamples=RESAMPLES,
        method="percentile",
        rng=np.random.default_rng(0),
    ).confidence_interval
    interval = f"[{low:+.0f}, {high:+.0f}]"
    if low <= 0 <= high:
        return f"none {interval}"
    return f"{statistic(a, b):+.0f} {interval}"


def table(head: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    head = list(head)
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def spread(values: list[float]) -> list[str]:
    return [f"{np.percentile(values, p):.0f}" for p in PERCENTILES.values()]


def differences(
    values: Values, pairs: Iterable[tuple[str, str]], percentile: float
) -> list[str]:
    def is_enough(arm: str) -> bool:
        return len(values.get(arm, [])) * (100 - percentile) >= 100 * MIN_ABOVE

    return [
        difference(values[a], values[b], percentile)
        if is_enough(a) and is_enough(b)
        else "-"
        for a, b in pairs
    ]


def ttft_tables(cells: dict[str, Values]) -> str:
    """Of several cells (input -> arm -> ms): the spread of each arm, and what the
    flag changes."""
    arms = list(dict.fromkeys(arm for values in cells.values() for arm in values))
    spreads = [
        [name, arm, len(values[arm]), *spread(values[arm])]
        for name, values in cells.items()
        for arm in arms
        if values.get(arm)
    ]
    pairs = [pair for pair in COMPARED if set(pair) <= set(arms)]
    changes = [
        [name, percentile, *differences(values, pairs, q)]
        for name, values in cells.items()
        for percentile, q in PERCENTILES.items()
    ]
    return "\n\n".join(
        (
            table(["", "arm", "n", *PERCENTILES], spreads),
            table(["", "of", *(f"{a} - {b}" for a, b in pairs)], changes),
        )
    )


def single(blocks: list[dict]) -> dict[str, dict[str, list[dict]]]:
    """Input -> arm -> records."""
    cells: dict[str, dict[str, list[dict]]] = defaultdict(lambda: defaultdict(list))
    for block in blocks:
        for record in sorted(block["single"], key=lambda r: ARMS.index(r["arm"])):
            cells[record["input"]][record["arm"]].append(record)
    return cells


def column(cells: dict[str, dict[str, list[dict]]], key: str) -> dict[str, Values]:
    return {
        name: {arm: [r[key] for r in records] for arm, records in arms.items()}
        for name, arms in cells.items()
    }


def transport_table(cells: dict[str, dict[str, list[dict]]]) -> str:
    rows = []
    for name, arms in cells.items():
        for arm, records in arms.items():
            medians = [
                f"{np.median([r[key] for r in records]):.1f}"
                if key in records[0]
                else "-"
                for key in TRANSPORT
            ]
            sent = sum(r["bytes"] for r in records)
            # Only the fork's arena is asked what it took.
            share = f"{sum(r['diverted'] for r in records) / sent:.0%}"
            intact = sum(r.get("intact", False) for r in records)
            rows.append(
                [
                    name,
                    f"{records[0]['bytes'] / 1e6:.0f}",
                    arm,
                    *medians,
                    "-" if arm.startswith("peer") else share,
                    f"{intact} of {len(records)}" if "intact" in records[0] else "-",
                ]
            )
    head = ("", "MB", "arm", *TRANSPORT, "diverted", "intact")
    return table(head, rows)


def first_table(blocks: list[dict]) -> str:
    rows = []
    for arm in [a for a in ARMS if any(a in block["first"] for block in blocks)]:
        first = [b["first"][arm] for b in blocks if arm in b["first"]]
        rows.append(
            [
                arm,
                ", ".join(f"{r['ttft']:.0f}" for r in first),
                ", ".join(f"{r['dequeued']:.0f}" for r in first),
            ]
        )
    return table(["arm", "TTFT of each block's first", "dequeued"], rows)


def mix_values(blocks: list[dict]) -> dict[str, Values]:
    """What is compared in the mix -> arm -> one value for each request."""
    cells: dict[str, Values] = defaultdict(lambda: defaultdict(list))
    for block in blocks:
        for run in sorted(block["mix"], key=lambda r: ARMS.index(r["arm"])):
            arm = run["arm"]
            cells["image: TTFT"][arm] += run["image_ttft"]
            for key, name in (
                ("ttft", "TTFT"),
                ("itl", "ITL"),
                ("itl_max", "worst ITL"),
            ):
                cells[f"text: {name}"][arm] += [t[key] for t in run["text"]]
            cells["enqueue of images"][arm] += run["enqueue_large"]
    return cells


def step_table(blocks: list[dict]) -> str:
    rows = [
        [run["arm"], run["steps"], *(f"{run['step_gap'][p]:.0f}" for p in
         ("p50", "p90", "p99", "max"))]
        for block in blocks
        for run in block["mix"]
    ]  # fmt: skip
    return table(["run", "steps", "gap: median", "p90", "p99", "max"], rows)


def in_flight_table(blocks: list[dict]) -> str:
    runs: dict[tuple[str, str], list[dict]] = defaultdict(list)
    for run in (run for block in blocks for run in block["in_flight"]):
        runs[run["input"], run["arm"]].append(run)
    rows = []
    for name, arm in sorted(runs, key=lambda key: (key[0], ARMS.index(key[1]))):
        same = runs[name, arm]
        used = [n for run in same for _, n, _ in run["slots_over_time"]]
        ttft = [t for run in same for t in run["ttft"]]
        sent = sum(run["bytes"] for run in same)
        rows.append(
            [
                name,
                arm,
                f"{np.median(ttft):.0f} ({max(ttft):.0f})",
                ", ".join(f"{run['seconds']:.1f}" for run in same),
                ", ".join(f"{run['decoding_s']:.1f}" for run in same),
                f"{sum(run['diverted'] for run in same) / sent:.0%}"
                if used and sent
                else "-",
                max(used) if used else "-",
            ]
        )
    return table(
        (
            "each with",
            "arm",
            "TTFT median (max)",
            "all done, s, each run",
            "of it after the last first token",
            "diverted",
            "slots, most",
        ),
        rows,
    )


def report(blocks: list[dict]) -> str:
    parts = ["## First large request of an engine", first_table(blocks)]
    cells = single(blocks)
    if cells:
        parts += ["## One request at a time", ttft_tables(column(cells, "ttft"))]
        parts += ["## Transport", transport_table(cells)]
    mixed = mix_values(blocks)
    if mixed:
        parts += ["## Text among images", ttft_tables(mixed), step_table(blocks)]
    if any(block["in_flight"] for block in blocks):
        parts += ["## In flight together", in_flight_table(blocks)]
    return "\n\n".join(parts)


def plots(blocks: list[dict], prefix: str) -> list[Path]:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    written = []

    def save(figure: Any, name: str) -> None:
        path = Path(f"{prefix}-{name}.png")
        figure.savefig(path, dpi=110)
        plt.close(figure)
        written.append(path)

    cells = single(blocks)
    if cells:
        figure, axes = plt.subplots(
            1, len(cells), figsize=(3 * len(cells), 4), layout="constrained"
        )
        for axis, (name, values) in zip(
            np.atleast_1d(axes), column(cells, "ttft").items(), strict=True
        ):
            axis.boxplot(list(values.values()), tick_labels=list(values), whis=(0, 100))
            axis.tick_params(axis="x", rotation=45)
            axis.set_title(name)
            axis.set_ylim(bottom=0)
        np.atleast_1d(axes)[0].set_ylabel("TTFT, ms (box: quartiles; whiskers: all)")
        save(figure, "ttft")

        figure, axes = plt.subplots(
            1, len(cells), figsize=(3 * len(cells), 4), layout="constrained"
        )
        for axis, (name, arms) in zip(np.atleast_1d(axes), cells.items(), strict=True):
            _stack(axis, arms)
            axis.set_title(name)
        np.atleast_1d(axes)[0].set_ylabel("ms from the start of enqueue, median")
        handles, labels = np.atleast_1d(axes)[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=4)
        save(figure, "transport")

    mixed = mix_values(blocks)
    if mixed:
        names = ("image: TTFT", "text: TTFT", "text: worst ITL")
        figure, axes = plt.subplots(
            1, len(names), figsize=(4 * len(names), 4), layout="constrained"
        )
        for axis, name in zip(axes, names, strict=True):
            for arm, values in mixed[name].items():
                axis.ecdf(values, label=arm)
            axis.set_title(name)
            axis.set_xlabel("ms")
        axes[0].set_ylabel("share of requests")
        axes[-1].legend()
        save(figure, "mix")
    return written


def _stack(axis: Any, arms: dict[str, list[dict]]) -> None:
    """What follows what, until the tensors are on every device."""
    bottom = np.zeros(len(arms))
    marks = ["enqueue", "dequeued", "before", "on_device"]
    labels = ["enqueue", "until dequeued", "worker's own work", "H2D"]
    reached = {}
    for arm, records in arms.items():
        at = {key: np.median([r[key] for r in records]) for key in TRANSPORT}
        reached[arm] = {**at, "before": at["on_device"] - at["h2d"]}
    for mark, label in zip(marks, labels, strict=True):
        top = np.maximum([reached[arm][mark] for arm in arms], bottom)
        axis.bar(list(arms), top - bottom, bottom=bottom, label=label)
        bottom = top
    axis.tick_params(axis="x", rotation=45)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", nargs="+", type=Path)
    parser.add_argument("--plot", metavar="PREFIX")
    args = parser.parse_args()
    blocks = [
        b for path in args.results for b in json.loads(path.read_text())["blocks"]
    ]
    print(report(blocks))
    if args.plot:
        for path in plots(blocks, args.plot):
            print(f"\n{path}")


if __name__ == "__main__":
    main()
