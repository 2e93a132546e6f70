# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A vLLM server of ours: how it is started, waited for and asked."""

import contextlib
import os
import re
import socket
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import openai
import torch

from demo_lib.arena_log import ArenaTraffic, read_traffic, write_logging_config
from demo_lib.own_process import OwnProcess, own_process

MODEL_NAME = "tiny"
ANSWER_TOKENS = 8
START_SECONDS = 600
REQUEST_SECONDS = 300
PROGRESS_SECONDS = 10


class DemoError(Exception):
    """Something is wrong; the message is the sentence for the user."""


@dataclass(frozen=True)
class Answer:
    """What came back on one request, and what it sent through the arena."""

    first_token_seconds: float
    tokens: list[int]
    traffic: ArenaTraffic


def engine_environment(logging_config: Path) -> dict[str, str]:
    """The environment in which this machine runs the engine."""
    write_logging_config(logging_config)
    env = {
        "HF_HUB_OFFLINE": "1",
        "NO_COLOR": "1",
        "VLLM_LOGGING_CONFIG_PATH": str(logging_config),
        "VLLM_NO_USAGE_STATS": "1",
    }
    if not torch.cuda.is_available():
        cpus = sorted(os.sched_getaffinity(0))
        if len(cpus) < 2:
            raise DemoError("Two workers need two CPUs, this process may use one only.")
        env |= {
            "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
            "VLLM_CPU_OMP_THREADS_BIND": f"{cpus[0]}|{cpus[1]}",
        }
    return env


def worker_count() -> int:
    """The tensor-parallel size: two, but one where there is a single GPU."""
    return 1 if torch.cuda.device_count() == 1 else 2


class Server:
    """A running server; made by `serve`."""

    def __init__(self, process: OwnProcess, port: int) -> None:
        self._process = process
        self._url = f"http://127.0.0.1:{port}"
        self._client = openai.OpenAI(
            base_url=f"{self._url}/v1",
            api_key="none",
            max_retries=0,
            timeout=REQUEST_SECONDS,
        )

    def wait_until_ready(self, progress: Callable[[str], None]) -> None:
        """Return once the server answers; DemoError if it does not come to that."""
        started = last_word = time.monotonic()
        while True:
            if self._process.poll() is not None:
                raise DemoError(
                    f"The server ended before it was ready: {self._last_error()}"
                )
            with contextlib.suppress(openai.APIConnectionError):
                self._client.models.list()
                return
            now = time.monotonic()
            if now - started > START_SECONDS:
                raise DemoError(
                    f"The server was not ready after {START_SECONDS} s: "
                    f"{self._last_error()}"
                )
            if now - last_word > PROGRESS_SECONDS:
                progress("still starting ...")
                last_word = now
            time.sleep(0.5)

    def ask(
        self, question: str, image_urls: list[str], engine: int | None = None
    ) -> Answer:
        """Ask about images; returns when the whole answer is there. `engine` is the
        data-parallel rank that is to answer."""
        log_size = self._process.log.stat().st_size
        tokens: list[int] = []
        first_token_seconds = 0.0
        started = time.monotonic()
        try:
            stream = self._client.chat.completions.create(
                model=MODEL_NAME,
                messages=[
                    {
                        "role": "user",
                        "content": [
                            *(
                                {"type": "image_url", "image_url": {"url": url}}
                                for url in image_urls
                            ),
                            {"type": "text", "text": question},
                        ],
                    }
                ],
                stream=True,
                temperature=0,
                max_tokens=ANSWER_TOKENS,
                extra_headers=(
                    {} if engine is None else {"X-data-parallel-rank": str(engine)}
                ),
                extra_body={"ignore_eos": True, "return_token_ids": True},
            )
            for chunk in stream:
                # A field of vLLM's, which the client's classes do not know.
                new = getattr(chunk.choices[0], "token_ids", None) or []
                if new and not tokens:
                    first_token_seconds = time.monotonic() - started
                tokens += new
        except (openai.APIError, OSError) as error:
            raise DemoError(
                f"The server did not answer a request ({error}): {self._last_error()}"
            ) from error
        # Also a look at /dev/shm, for what is mapped only at work.
        self._process.poll()
        if len(tokens) != ANSWER_TOKENS:
            raise DemoError(
                f"The server answered with {len(tokens)} tokens instead of "
                f"{ANSWER_TOKENS}; its log is {self._process.log}"
            )
        traffic = read_traffic(self._process.log, start=log_size)
        return Answer(first_token_seconds, tokens, traffic)

    def metrics(self) -> str:
        """What the server exports to Prometheus."""
        with urllib.request.urlopen(f"{self._url}/metrics", timeout=60) as answer:
            return answer.read().decode()

    def _last_error(self) -> str:
        lines = self._process.log.read_text(errors="replace").splitlines()
        told = [line.strip() for line in lines if line.strip()]
        errors = [line for line in told if re.search(r"\berror\b|Error\b", line)]
        last = (errors or told or ["it said nothing"])[-1]
        return f"{last} (log: {self._process.log})"


@contextlib.contextmanager
def serve(
    model: Path,
    *,
    arena: bool,
    max_images: int,
    log: Path,
    env: dict[str, str],
    options: Sequence[str] = (),
) -> Iterator[Server]:
    """Start `vllm serve`; leaving the block ends it and all it has made. `options`
    are for its command line, beside ours."""
    program = Path(sys.executable).with_name("vllm")
    if not program.exists():
        raise DemoError(f"There is no vLLM in this environment: {program} is missing.")
    port = _free_port()
    command = [
        *(str(program), "serve", str(model)),
        *("--served-model-name", MODEL_NAME),
        *("--host", "127.0.0.1"),
        *("--port", str(port)),
        *("--tensor-parallel-size", str(worker_count())),
        *("--distributed-executor-backend", "mp"),
        "--enforce-eager",
        *("--max-model-len", "16384"),
        *("--max-num-batched-tokens", "16384"),
        *("--max-num-seqs", "4"),
        *("--limit-mm-per-prompt", f'{{"image": {max_images}, "video": 0}}'),
        # Every request is to bring its pixels and to have them computed.
        *("--mm-processor-cache-gb", "0"),
        "--no-enable-prefix-caching",
        "--skip-mm-profiling",
        "--enable-shm-tensor-arena" if arena else "--no-enable-shm-tensor-arena",
        *options,
    ]
    with own_process(command, env, log) as process:
        yield Server(process, port)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
