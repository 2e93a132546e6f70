# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The same photographs to the same engine, its tensor arena off and on.

The two servers run one after the other (a small machine has no room for both), so
the times show the order of magnitude; a benchmark interleaves.
"""

import argparse
import os
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from demo_lib.arena_log import THRESHOLD_BYTES
from demo_lib.chart import Bars, draw
from demo_lib.photos import as_data_url, photograph
from demo_lib.server import (
    Answer,
    DemoError,
    Server,
    engine_environment,
    serve,
    worker_count,
)
from demo_lib.tiny_models import pixel_bytes, tiny_qwen2_vl

LOG_DIR = Path(__file__).parents[2] / "build" / "demo-logs"
QUESTION = "What do you see?"
MAX_IMAGES = 4
WARM_UPS = 1
REPEATS = 3

STARTED = time.monotonic()


@dataclass(frozen=True)
class Page:
    """A request: one or several photographs of the same size."""

    photos: tuple[str, ...]
    edge: int

    def __str__(self) -> str:
        count = f"page of {len(self.photos)}, " if len(self.photos) > 1 else ""
        return f"{count}{'+'.join(self.photos)} {self.edge}²"

    def tensor_bytes(self, model: Path) -> list[int]:
        """Bytes of each pixel_values in the message."""
        return [pixel_bytes(model, self.edge)] * len(self.photos)


PAGES = (
    Page(("rocket",), 1024),
    Page(("astronaut",), 2048),
    Page(("coffee",), 3072),
    Page(("astronaut", "chelsea", "coffee"), 2048),
)
QUICK_PAGES = (Page(("astronaut",), 2048),)


def main() -> int:
    """Run the demo; the exit status is 0 only if all went as it should."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], allow_abbrev=False
    )
    parser.add_argument(
        "--quick", action="store_true", help="one photograph, asked about once"
    )
    # Taken before this, as vLLM must not be imported until it is known.
    parser.add_argument("--base", metavar="V", help="the fork of another release")
    quick = parser.parse_args().quick
    try:
        if quick:
            run(QUICK_PAGES, repeats=1)
        else:
            run(PAGES, REPEATS)
    except DemoError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    return 0


def run(pages: tuple[Page, ...], repeats: int) -> None:
    """Ask both servers everything, check the answers and print the table."""
    progress("making the model, unless an earlier run has")
    model = tiny_qwen2_vl()
    progress("bringing the photographs to size")
    # The shift makes every repetition a new image.
    urls = {
        page: [
            [as_data_url(photograph(name, page.edge, shift)) for name in page.photos]
            for shift in range(WARM_UPS + repeats)
        ]
        for page in pages
    }
    # Its own folder: another demo may run in this clone.
    logs = LOG_DIR / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    logs.mkdir(parents=True)
    env = engine_environment(logs / "logging.json")
    answers: dict[bool, dict[Page, list[Answer]]] = {}
    for arena in (False, True):
        arm = "on" if arena else "off"
        log = logs / f"arena-{arm}.log"
        progress(f"arena {arm}: starting {worker_count()} workers, log in {log}")
        with serve(
            model, arena=arena, max_images=MAX_IMAGES, log=log, env=env
        ) as server:
            server.wait_until_ready(progress)
            answers[arena] = {
                page: ask_all(server, page, urls[page], arm) for page in pages
            }
            progress(f"arena {arm}: stopping the server")
        for page in pages:
            check_traffic(page, page.tensor_bytes(model), arena, answers[arena][page])
    print_table(model, answers, logs)
    draw_chart(model, answers, logs / "demo.png")
    for page in pages:
        check_tokens(page, answers[False][page], answers[True][page])


def ask_all(
    server: Server, page: Page, repetitions: list[list[str]], arm: str
) -> list[Answer]:
    """The answers on each repetition of a page, warm-ups first."""
    answers = []
    for number, urls in enumerate(repetitions):
        answers.append(server.ask(QUESTION, urls))
        kind = " (warm-up)" if number < WARM_UPS else ""
        seconds = answers[-1].first_token_seconds
        progress(f"arena {arm}: {page}: first token after {seconds:.2f} s{kind}")
    return answers


def check_traffic(
    page: Page, tensor_bytes: list[int], arena: bool, answers: list[Answer]
) -> None:
    """Every large tensor has gone through the arena, or with it off none at all."""
    expected = [n for n in tensor_bytes if arena and n >= THRESHOLD_BYTES]
    for answer in answers:
        traffic = answer.traffic
        if traffic.diverted != expected:
            declined = "; ".join(traffic.declined) or "nothing"
            raise DemoError(
                f"With the arena {'on' if arena else 'off'}, {page} should have sent "
                f"tensors of {expected} bytes through it but sent {traffic.diverted} "
                f"(declined: {declined})."
            )


def check_tokens(page: Page, off: list[Answer], on: list[Answer]) -> None:
    """Both arms have answered alike."""
    for without, with_arena in zip(off, on, strict=True):
        if without.tokens != with_arena.tokens:
            raise DemoError(
                f"The answers on {page} differ: {without.tokens} without the arena, "
                f"{with_arena.tokens} with it."
            )


def print_table(
    model: Path, answers: dict[bool, dict[Page, list[Answer]]], logs: Path
) -> None:
    rows = [
        (
            "image",
            "pixel_values",
            "first token off",
            "first token on",
            "through arena off",
            "through arena on",
            "same tokens",
        )
    ]
    for page, off in answers[False].items():
        on = answers[True][page]
        same = all(a.tokens == b.tokens for a, b in zip(off, on, strict=True))
        rows.append(
            (
                str(page),
                f"{sum(page.tensor_bytes(model)):,} bytes",
                first_token(off),
                first_token(on),
                through_arena(off),
                through_arena(on),
                "yes" if same else "NO",
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows)]
    print()
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())
    timed = len(on) - WARM_UPS
    print(
        f"\nFirst token: median of {timed} request(s) after {WARM_UPS} warm-up, seen by"
        " the client, one\nserver after the other. Through arena: per request; tensors"
        f" under {THRESHOLD_BYTES:,} bytes do not go\nthat way. Logs: {logs}"
    )


def draw_chart(
    model: Path, answers: dict[bool, dict[Page, list[Answer]]], path: Path
) -> None:
    requests = []
    for page, off in answers[False].items():
        arms = off, answers[True][page]
        requests.append(
            Bars(
                label="\n".join((*page.photos, f"{page.edge}²")),
                tensor_bytes=sum(page.tensor_bytes(model)),
                first_token_seconds=tuple(map(first_token_seconds, arms)),
                arena_bytes=tuple(sum(arm[-1].traffic.diverted) for arm in arms),
            )
        )
    draw(path, requests)
    print(f"Chart: {path}")


def first_token(answers: list[Answer]) -> str:
    return f"{first_token_seconds(answers):.2f} s"


def first_token_seconds(answers: list[Answer]) -> float:
    """The median without the warm-ups."""
    return statistics.median(
        answer.first_token_seconds for answer in answers[WARM_UPS:]
    )


def through_arena(answers: list[Answer]) -> str:
    diverted = answers[-1].traffic.diverted
    return f"{len(diverted)}: {sum(diverted):,} bytes"


def progress(doing: str) -> None:
    print(f"[{time.monotonic() - STARTED:4.0f} s] {doing}", flush=True)
