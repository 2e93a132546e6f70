# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What is asked of the engines, and what their answers and events come to.

All times of the results are in ms, from the moment a request is handed to its
engine's frontend, or, in a transport, from the start of the `enqueue`.
"""

import random
import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from serving_bench.engines import Engine
from serving_bench.probe import DEVICE, HOST

TEXT_LENGTH = 64
LONG_LENGTH = 512
IN_FLIGHT = 20
MIX_IMAGE = "2048"


def one(engine: Engine, name: str, sums: Sequence[int]) -> dict[str, Any]:
    """A request alone in its engine, one token long, and its transport."""
    request = {"input": name, "at": 0, "max_tokens": 1}
    (record,) = engine.ask("run", requests=[request], level=DEVICE)["records"]
    begin, end = record["begin"], record["begin"] + record["ttft"]
    events = [e for e in engine.events() if begin <= e[0] <= end]
    return {
        "input": name,
        "ttft": _ms(record["ttft"]),
        "token": record["tokens"][0],
        **_transport(events, begin, sums),
    }


def _transport(events: list[list], begin: float, sums: Sequence[int]) -> dict[str, Any]:
    steps = [e for e in events if e[2] == "step" and e[3]["bytes"]]
    if not steps:
        return {}
    start = steps[0][0]
    arrived: dict[int, list[int]] = defaultdict(list)
    copying: dict[int, float] = defaultdict(float)
    copied = [e for e in events if e[2] == "h2d"]
    for began, ended, _, facts in copied:
        arrived[facts["pid"]] += facts["sums"]
        copying[facts["pid"]] += ended - began
    dequeued = [e[1] for e in events if e[2] == "dequeue"]
    facts = {
        "bytes": sum(e[3]["bytes"] for e in steps),
        "diverted": sum(e[3].get("diverted", 0) for e in steps),
        "at_core": _ms(max(e[1] for e in events if e[2] == "core") - begin),
        "enqueue_at": _ms(start - begin),
        "enqueue": _ms(sum(e[1] - e[0] for e in steps)),
        "dequeued": _ms(max(dequeued) - start),
    }
    if copied:
        facts |= {
            "h2d": _ms(max(copying.values())),
            "on_device": _ms(max(e[1] for e in copied) - start),
            # Of every worker, and in the order of the prompt.
            "intact": all(got == list(sums) for got in arrived.values()),
        }
    return facts


def mix(
    engine: Engine, seconds: float, image_rate: float, text_rate: float, seed: int
) -> dict[str, Any]:
    """Text among images, each arriving at its own random times whatever the engine
    does; rates in requests a second."""
    draw = random.Random(seed)
    requests = []
    for name, rate, length in (
        (MIX_IMAGE, image_rate, 1),
        ("text", text_rate, TEXT_LENGTH),
    ):
        at = draw.expovariate(rate)
        while at < seconds:
            requests.append({"input": name, "at": at, "max_tokens": length})
            at += draw.expovariate(rate)
    records = engine.ask("run", requests=requests, level=HOST)["records"]
    text = []
    for record in records:
        if record["input"] == "text":
            times = record["times"]
            gaps = [b - a for a, b in zip(times, times[1:], strict=False)]
            text.append(
                {
                    "ttft": _ms(record["ttft"]),
                    "itl": _ms(statistics.median(gaps)),
                    "itl_max": _ms(max(gaps)),
                }
            )
    images = [_ms(r["ttft"]) for r in records if r["input"] != "text"]
    begin = min(r["begin"] for r in records)
    return {
        "image_ttft": images,
        "text": text,
        **_step_loop(engine, begin),
    }


def _step_loop(engine: Engine, begin: float) -> dict[str, Any]:
    """How long steps with and without tensors keep the loop of EngineCore."""
    steps = [e for e in engine.events() if e[2] == "step" and e[0] >= begin]
    gaps = [
        _ms(after[0] - before[0])
        for before, after in zip(steps, steps[1:], strict=False)
    ]
    large = [_ms(e[1] - e[0]) for e in steps if e[3]["bytes"]]
    sent = sum(e[3]["bytes"] for e in steps)
    diverted = sum(e[3].get("diverted", 0) for e in steps)
    return {
        "steps": len(steps),
        "step_gap": _percentiles(gaps),
        "enqueue_large": large,
        "bytes": sent,
        "diverted": diverted,
    }


def in_flight(engine: Engine, name: str) -> dict[str, Any]:
    """Requests with long answers, all at once."""
    request = {"input": name, "at": 0, "max_tokens": LONG_LENGTH}
    answer = engine.ask("run", requests=[request] * IN_FLIGHT, level=HOST)
    records = answer["records"]
    begin = min(r["begin"] for r in records)
    end = max(r["begin"] + r["times"][-1] for r in records)
    prefilled = max(r["begin"] + r["ttft"] for r in records)
    steps = [e for e in engine.events() if e[2] == "step" and e[0] >= begin]
    use = [
        (round(e[0] - begin, 2), e[3]["slots_in_use"], e[3]["requests"])
        for e in steps
        if "slots_in_use" in e[3]
    ]
    gaps = [
        (round(before[0] - begin, 2), _ms(after[0] - before[0]))
        for before, after in zip(steps, steps[1:], strict=False)
    ]
    return {
        "ttft": [_ms(r["ttft"]) for r in records],
        "seconds": end - begin,
        "decoding_s": end - prefilled,
        "cpu_s": answer["cpu_s"],
        "n_large_steps": sum(bool(e[3]["bytes"]) for e in steps),
        "bytes": sum(e[3]["bytes"] for e in steps),
        "diverted": sum(e[3].get("diverted", 0) for e in steps),
        "slots_over_time": _thinned(use),
        "step_gap_over_time": _thinned(gaps),
    }


def busy(
    engine: Engine, names: list[str], concurrency: int, seconds: float, seed: int
) -> dict[str, Any]:
    """A closed loop of random sizes and lengths; memory and slots watched."""
    answer = engine.ask(
        "keep_busy",
        names=names,
        concurrency=concurrency,
        seconds=seconds,
        seed=seed,
        level=HOST,
    )
    records = answer["records"]
    begin = min(r["begin"] for r in records)
    steps = [e for e in engine.events() if e[2] == "step" and e[0] >= begin]
    use = [
        (round(e[0] - begin, 1), e[3]["slots_in_use"])
        for e in steps
        if "slots_in_use" in e[3]
    ]
    ttft = defaultdict(list)
    for record in records:
        ttft[record["input"]].append(_ms(record["ttft"]))
    memory = [
        {**sample, "at": round(sample["at"] - begin, 1)} for sample in answer["memory"]
    ]
    return {
        "requests": len(records),
        "ttft": {name: _percentiles(values) for name, values in ttft.items()},
        "bytes": sum(e[3]["bytes"] for e in steps),
        "diverted": sum(e[3].get("diverted", 0) for e in steps),
        "slots_in_use_max": max((n for _, n in use), default=None),
        "slots_over_time": _thinned(use),
        "memory": memory,
    }


def _thinned(points: list) -> list:
    """At most about a hundred of them, the last one included."""
    return points[:: max(1, len(points) // 100)] + points[-1:]


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 2)


def _percentiles(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {
        name: ordered[min(len(ordered) - 1, int(share * len(ordered)))]
        for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("max", 1.0))
    }
