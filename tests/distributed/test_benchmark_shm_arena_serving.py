# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The serving benchmark: what it counts, compares and refuses."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
RESULTS = BENCHMARKS.parent / "docs" / "results"


@pytest.fixture(autouse=True)
def benchmarks_on_path(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def test_checksum_sees_every_byte_and_its_place():
    from serving_bench.probe import checksum

    noise = torch.Generator().manual_seed(0)
    t = torch.randint(0, 256, (3, 5000), generator=noise, dtype=torch.uint8)
    expected = checksum(t)
    assert checksum(t.clone()) == expected
    for i in (0, 4095, 4096, t.numel() - 1):
        changed = t.clone()
        changed.view(-1)[i] ^= 1
        assert checksum(changed) != expected
    swapped = t.clone()
    swapped[0], swapped[1] = t[1], t[0]
    assert checksum(swapped) != expected


def test_events_of_all_processes_come_back_in_order(tmp_path):
    from serving_bench.probe import Trace, read_events

    folder = tmp_path / "trace"
    Trace.prepare(folder)
    trace = Trace(folder)
    trace.level = 2
    assert Trace(folder).level == 2
    trace.note(2.0, 3.0, "h2d", bytes=7)
    trace.note(1.0, 1.5, "step", bytes=7)
    assert [(e[0], e[2], e[3]["bytes"]) for e in read_events(folder)] == [
        (1.0, "step", 7),
        (2.0, "h2d", 7),
    ]


@pytest.mark.parametrize(
    ("name", "n_images", "side", "embeds_bytes"),
    [
        ("2048", 1, 2048, 0),
        ("6x1024", 6, 1024, 0),
        ("embeds64", 0, 0, 64 * 10**6),
        ("text", 0, 0, 0),
    ],
)
def test_names_of_inputs(name, n_images, side, embeds_bytes):
    from serving_bench import inputs

    wanted = inputs.parse(name)
    found = (wanted.n_images, wanted.side, wanted.embeds_bytes)
    assert found == (n_images, side, embeds_bytes)


def test_difference_is_none_where_its_interval_spans_zero():
    from serving_bench.report import difference

    slow, fast = [100.0 + i % 7 for i in range(40)], [80.0 + i % 7 for i in range(40)]
    assert difference(fast, slow, 50).startswith("-20 [")
    assert difference(fast, fast[::-1], 50).startswith("none [")


def test_few_rounds_give_no_interval():
    from serving_bench.report import differences

    pair = ("on", "off")
    assert differences({"on": [1.0], "off": [2.0]}, [pair], 50) == ["-"]
    assert differences({"off": [2.0] * 40}, [pair], 50) == ["-"]
    many = {"on": [1.0] * 40, "off": [2.0] * 40}
    assert differences(many, [pair], 90) == ["-1 [-1, -1]"]
    assert differences(many, [pair], 99) == ["-"]


@pytest.mark.parametrize(
    ("names", "lines"),
    [
        (
            ("tp2-single", "tp2-single-2"),
            ("| 4096 | median | -169 [-180, -160] |", "| 2048 | 50 | on | 2.9 | 3.7 |"),
        ),
        (
            ("tp2-single-2",),
            (
                "| 6x2048 | median | -247 [-270, -236] |",
                "| 768 | median | none [-9, +15] |",
            ),
        ),
        (("tp2-embeds",), ("| embeds64 | median | -91 [-130, -76] |",)),
        (("tp2-mix",), ("| text: worst ITL | median | -17 [-31, -10] |",)),
        (("tp2-in-flight",), ("| 37.7, 32.4 | 34.8, 29.9 | 100% | 480 |",)),
        (
            ("tp1-single", "tp1-single-2"),
            ("| 4096 | median | -164 [-171, -159] |", "| 4096 | p99 | - |"),
        ),
        (("tp1-embeds",), ("| embeds64 | median | -49 [-53, -44] |",)),
        (("tp1-mix",), ("| image: TTFT | p90 | -134 [-218, -44] |",)),
        (
            ("tp1-in-flight",),
            ("| 11.6, 11.3, 11.4, 11.4, 11.4, 11.4 | 3.0, 3.0, 3.0, 3.0, 3.0, 3.0 |",),
        ),
    ],
)
def test_published_tables_come_from_the_published_results(names, lines):
    run = subprocess.run(
        [
            sys.executable,
            "-m",
            "serving_bench.report",
            *(str(RESULTS / f"serving-h200-{name}.json") for name in names),
        ],
        cwd=BENCHMARKS,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    for line in lines:
        assert line in run.stdout


def test_every_published_request_arrived_intact():
    records = [
        record
        for path in sorted(RESULTS.glob("serving-h200-*.json"))
        for block in json.loads(path.read_text())["blocks"]
        for record in block["single"]
        if "intact" in record
    ]
    assert len(records) == 1453
    assert all(record["intact"] for record in records)


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["m", "--json", "r", "--arms", "peer-on"], "peer-off and peer-on need --peer"),
        (["m", "--json", "r", "--arms", "ported-on"], "ported-on need --ported"),
        (["m", "--json", "r", "--inputs", "huge"], "'huge' is no input"),
        (["m", "--json", "r", "--mix", "-3"], "'-3' is not a positive number"),
        (["m", "--json", "r", "--engine-args", "[1]"], "'[1]' is not a JSON object"),
        (["m", "--json", "r", "--arms", "peer-on", "--peer", "."], "holds no vllm/"),
    ],
)
def test_bad_arguments_are_refused(args, sentence, tmp_path):
    script = BENCHMARKS / "benchmark_shm_arena_serving.py"
    run = subprocess.run(
        [sys.executable, script, *args], cwd=tmp_path, capture_output=True, text=True
    )
    assert run.returncode != 0
    assert sentence in run.stderr
    assert "Traceback" not in run.stderr


def test_an_engine_that_does_not_start_ends_it_with_a_sentence(tmp_path):
    script = BENCHMARKS / "benchmark_shm_arena_serving.py"
    run = subprocess.run(
        [sys.executable, script, "no-such-model", "--arms", "off", "--json", "r.json"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={"PATH": "", "HF_HUB_OFFLINE": "1"},
    )
    assert run.returncode == 1
    assert "error: The engine of arm off ended" in run.stderr
    assert json.loads((tmp_path / "r.json").read_text())["blocks"][0]["single"] == []
