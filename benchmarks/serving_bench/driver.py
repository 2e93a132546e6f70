# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""One engine, driven through a socket: one JSON object a line, each answered.

    {"do": "prepare", "inputs": [...], "seed": 0}   render prompts, keep them
    {"do": "run", "requests": [...], "level": 2}    open loop: each at its time
    {"do": "keep_busy", "seconds": 60, ...}         closed loop

A prompt is rendered (resized, normalised, tokenised) once and sent many times,
under a new identity each time, so that no cache answers for it. So a time to first
token here begins when the engine's frontend has the tensors; rendering is measured
apart.
"""

import argparse
import asyncio
import json
import os
import random
import socket
import time
import uuid
from pathlib import Path
from typing import Any

from serving_bench import inputs, processes
from serving_bench.probe import TRACE_FOLDER, Trace, checksum

RENDERINGS = 2


class Driver:
    def __init__(self, engine_args: dict[str, Any]):
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        started = time.monotonic()
        self._engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**engine_args))
        self.start_s = time.monotonic() - started
        self._trace = Trace(Path(os.environ[TRACE_FOLDER]))
        self._rendered: dict[str, Any] = {}

    def close(self) -> None:
        self._engine.shutdown()
        # Its finalizer would fail when the interpreter has half ended.
        del self._engine

    async def prepare(self, names: list[str], seed: int) -> dict[str, Any]:
        from vllm.renderers.inputs.preprocess import parse_model_prompt

        config = self._engine.model_config
        renderer = self._engine.renderer
        facts = {}
        for name in names:
            wanted = inputs.parse(name)
            raw = inputs.prompt(wanted, seed, config.get_hidden_size())
            seconds = []
            for _ in range(RENDERINGS):
                begin = time.monotonic()
                parsed = parse_model_prompt(config, raw)
                (rendered,) = await renderer.render_cmpl_async([parsed])
                seconds.append(time.monotonic() - begin)
            self._rendered[name] = rendered
            tensors = _tensors(rendered)
            facts[name] = {
                "render_s": seconds,
                "bytes": sum(t.nbytes for t in tensors),
                "dtype": str(tensors[0].dtype) if tensors else None,
                "sums": [checksum(t) for t in tensors],
            }
        return facts

    async def run(self, requests: list[dict], level: int) -> dict[str, Any]:
        self._trace.level = level
        before = processes.cpu_seconds()
        begin = time.monotonic()

        async def one(request: dict) -> dict:
            await asyncio.sleep(max(0.0, begin + request["at"] - time.monotonic()))
            return await self._generate(request["input"], request["max_tokens"])

        records = await asyncio.gather(*(one(r) for r in requests))
        self._trace.level = 0
        after = processes.cpu_seconds()
        used = {name: after[name] - before.get(name, 0.0) for name in after}
        return {"records": records, "cpu_s": used}

    async def keep_busy(
        self, names: list[str], concurrency: int, seconds: float, seed: int, level: int
    ) -> dict[str, Any]:
        """`concurrency` requests at a time, for `seconds`."""
        self._trace.level = level
        end = time.monotonic() + seconds
        draw = random.Random(seed)
        records: list[dict] = []
        samples: list[dict] = []

        async def client() -> None:
            while time.monotonic() < end:
                name, length = draw.choice(names), draw.randint(1, 64)
                records.append(await self._generate(name, length))

        async def watch() -> None:
            while time.monotonic() < end:
                samples.append(processes.memory())
                await asyncio.sleep(5)

        await asyncio.gather(watch(), *(client() for _ in range(concurrency)))
        self._trace.level = 0
        for record in records:
            del record["times"]
        return {"records": records, "memory": samples}

    async def _generate(self, name: str, max_tokens: int) -> dict[str, Any]:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        identity = uuid.uuid4().hex
        prompt = dict(self._rendered[name])
        if "mm_hashes" in prompt:
            prompt["mm_hashes"] = {
                modality: [f"{identity}-{i}" for i, _ in enumerate(hashes)]
                for modality, hashes in prompt["mm_hashes"].items()
            }
        sampling = SamplingParams(
            max_tokens=max_tokens,
            temperature=0,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        begin = time.monotonic()
        times, tokens = [], []
        async for output in self._engine.generate(prompt, sampling, identity):
            times.append(time.monotonic())
            tokens += output.outputs[0].token_ids
        return {
            "input": name,
            "begin": begin,
            "ttft": times[0] - begin,
            "times": [round(t - begin, 5) for t in times],
            "n_tokens": len(tokens),
            "tokens": tokens[:8],
        }


def _tensors(rendered: Any) -> list:
    if rendered["type"] == "embeds":
        return [rendered["prompt_embeds"]]
    images = rendered.get("mm_kwargs", {}).get("image", [])
    return [image["pixel_values"].data for image in images]


async def serve(driver: Driver, channel: socket.socket) -> None:
    stream = channel.makefile("rw")
    print(json.dumps({"start_s": driver.start_s}), file=stream, flush=True)
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, stream.readline):
        command = json.loads(line)
        reply = await getattr(driver, command.pop("do"))(**command)
        print(json.dumps(reply), file=stream, flush=True)


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--socket", type=int, required=True)
    parser.add_argument("--engine-args", type=json.loads, required=True)
    args = parser.parse_args()
    driver = Driver(args.engine_args)
    try:
        await serve(driver, socket.socket(fileno=args.socket))
    finally:
        driver.close()


# Spawned processes of the engine import this file again.
if __name__ == "__main__":
    asyncio.run(main())
