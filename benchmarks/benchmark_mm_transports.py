# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The ways that vLLM has for an image's pixels, on the same work in a real engine.

The arena (engine to workers), `mm_processor_cache_type=shm` (front end to workers)
and `mm_tensor_ipc=torch_shm` (front end to engine) do different parts of the way.
Each arm is an engine of its own with a tiny random-weight Qwen2-VL; it gets photographs
that it has not seen, one after the other, then the same again. For a CPU machine with
two cores or more.

    PYTHONPATH=scripts python benchmarks/benchmark_mm_transports.py
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from demo_lib.own_process import own_process
from demo_lib.photos import photograph
from demo_lib.server import engine_environment
from demo_lib.tiny_models import pixel_bytes, tiny_qwen2_vl
from vllm import LLM, SamplingParams
from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.serial_utils import MsgpackEncoder

TWO = {"tensor_parallel_size": 2}
ONE = {"tensor_parallel_size": 1}
ARENA = {"enable_shm_tensor_arena": True}
SHM_CACHE = {"mm_processor_cache_type": "shm"}
# vLLM refuses it with more than one worker.
TORCH_SHM = {"mm_tensor_ipc": "torch_shm"}
ARMS: dict[str, dict[str, Any]] = {
    "2 workers, lru": TWO,
    "2 workers, lru, arena": TWO | ARENA,
    "2 workers, shm cache": TWO | SHM_CACHE,
    "1 worker, lru": ONE,
    "1 worker, lru, arena": ONE | ARENA,
    "1 worker, lru, torch_shm": ONE | TORCH_SHM,
    "1 worker, lru, torch_shm, arena": ONE | TORCH_SHM | ARENA,
}
WARM_UPS = 2
ARM_SECONDS = 900
PROMPT = "<|vision_start|><|image_pad|><|vision_end|>What do you see?"
RECORD = "MM_TRANSPORTS_RECORD"
MB = 1_000_000


def record(**values: Any) -> None:
    """Append to the record of this arm. All processes write to one file."""
    with open(os.environ[RECORD], "a") as file:
        file.write(json.dumps(values | {"pid": os.getpid()}) + "\n")


class RecordingExecutor(MultiprocExecutor):
    """Notes what EngineCore does to send a message with a new request."""

    def _init_executor(self) -> None:
        super()._init_executor()
        mq = self.rpc_broadcast_mq
        assert mq is not None
        enqueue, send = mq.enqueue, mq.local_socket.send_multipart
        sent = 0

        def counting_send(buffers: list, *args: Any, **kwargs: Any) -> None:
            nonlocal sent
            sent += sum(memoryview(buffer).nbytes for buffer in buffers)
            send(buffers, *args, **kwargs)

        def recording_enqueue(obj: Any, *args: Any, **kwargs: Any) -> None:
            nonlocal sent
            sent = 0
            started = time.monotonic()
            enqueue(obj, *args, **kwargs)
            blocked = time.monotonic() - started
            method, arguments = obj[:2]
            if method == "execute_model" and arguments[0].scheduled_new_reqs:
                arena = mq.tensor_arena
                stats = (arena and arena.take_stats()) or {"bytes": 0}
                record(
                    what="enqueue",
                    started=started,
                    blocked=blocked,
                    # One copy for each worker.
                    socket_bytes=sent * mq.n_local_reader,
                    arena_bytes=stats["bytes"],
                )

        mq.enqueue = recording_enqueue
        mq.local_socket.send_multipart = counting_send


class RecordingWorker:
    """Mixed into vLLM's worker class: notes when the model runner has the pixels."""

    model_runner: Any

    def start_recording(self) -> None:
        execute_model = self.model_runner.execute_model

        def recording(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            if scheduler_output.scheduled_new_reqs:
                record(what="arrived", at=time.monotonic())
            return execute_model(scheduler_output, *args, **kwargs)

        self.model_runner.execute_model = recording


def run_arm(name: str, edge: int, repeat: int) -> None:
    llm = LLM(
        model=str(tiny_qwen2_vl()),
        distributed_executor_backend="benchmark_mm_transports.RecordingExecutor",
        worker_extension_cls="benchmark_mm_transports.RecordingWorker",
        limit_mm_per_prompt={"image": 1, "video": 0},
        max_model_len=16384,
        max_num_batched_tokens=16384,
        max_num_seqs=4,
        skip_mm_profiling=True,
        enforce_eager=True,
        enable_prefix_caching=False,
        **ARMS[name],
    )
    llm.collective_rpc("start_recording")
    to_engine = 0
    encode = MsgpackEncoder.encode

    def counting_encode(self: MsgpackEncoder, obj: Any) -> Any:
        nonlocal to_engine
        buffers = encode(self, obj)
        to_engine += sum(memoryview(buffer).nbytes for buffer in buffers)
        return buffers

    MsgpackEncoder.encode = counting_encode
    sampling = SamplingParams(temperature=0, max_tokens=1)
    images = [photograph("astronaut", edge, shift) for shift in range(repeat)]
    for seen in (False, True):
        for image in images:
            prompt = {"prompt": PROMPT, "multi_modal_data": {"image": image}}
            to_engine, started = 0, time.monotonic()
            llm.generate(prompt, sampling, use_tqdm=False)
            took = time.monotonic() - started
            record(what="request", seen=seen, took=took, to_engine_bytes=to_engine)


def summarize(lines: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Seen or new → median of each figure, ms and MB."""
    # The processes' lines are mixed; each process's own are in order.
    streams: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for line in lines:
        streams.setdefault((line["what"], line["pid"]), []).append(line)
    by_what: dict[str, list[list[dict[str, Any]]]] = {}
    for (what, _), stream in streams.items():
        by_what.setdefault(what, []).append(stream)
    (requests,), (enqueues,) = by_what["request"], by_what["enqueue"]
    figures: dict[str, list[dict[str, float]]] = {"new": [], "seen": []}
    for request, enqueue, *arrivals in zip(
        requests, enqueues, *by_what["arrived"], strict=True
    ):
        last = max(arrival["at"] for arrival in arrivals)
        figures["seen" if request["seen"] else "new"].append(
            {
                "front end writes, MB": request["to_engine_bytes"] / MB,
                "engine to workers, socket MB": enqueue["socket_bytes"] / MB,
                "engine to workers, arena MB": enqueue["arena_bytes"] / MB,
                "engine blocked, ms": enqueue["blocked"] * 1e3,
                "at the last worker after, ms": (last - enqueue["started"]) * 1e3,
                "first token after, ms": request["took"] * 1e3,
            }
        )
    figures["new"] = figures["new"][WARM_UPS:]
    return {
        pixels: {key: statistics.median(one[key] for one in each) for key in each[0]}
        for pixels, each in figures.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--edge", type=int, default=3072, help="pixels")
    parser.add_argument("--repeat", type=int, default=8, help="photographs")
    parser.add_argument("--arms", choices=ARMS, nargs="+", default=list(ARMS))
    parser.add_argument("--in-this-process", action="store_true")
    args = parser.parse_args()
    if args.in_this_process:
        run_arm(args.arms[0], args.edge, args.repeat)
        return

    print(f"pixel_values: {pixel_bytes(tiny_qwen2_vl(), args.edge):,} bytes")
    with tempfile.TemporaryDirectory() as scratch:
        for arm in args.arms:
            print(f"\n{arm}", flush=True)
            lines = run_in_a_process(arm, args.edge, args.repeat, Path(scratch))
            for pixels, figures in summarize(lines).items():
                for key, value in figures.items():
                    print(f"  {pixels:<6}{key:<32}{value:10.1f}", flush=True)


def run_in_a_process(
    arm: str, edge: int, repeat: int, scratch: Path
) -> list[dict[str, Any]]:
    """What the processes of an engine have recorded; they have ended."""
    record_path, log = scratch / "record", scratch / "log"
    record_path.write_text("")
    env = engine_environment(scratch / "logging.json") | {
        RECORD: str(record_path),
        "PYTHONPATH": os.pathsep.join([*sys.path[1:], str(Path(__file__).parent)]),
        # torch_shm insists on it; the others keep it company.
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    }
    # A set of CPUs for each worker.
    cpus = env["VLLM_CPU_OMP_THREADS_BIND"].split("|")
    cpus = cpus[: ARMS[arm]["tensor_parallel_size"]]
    env["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(cpus)
    command = [sys.executable, __file__, "--in-this-process", "--arms", arm]
    command += ["--edge", str(edge), "--repeat", str(repeat)]
    # Also removes what the base's CPU collectives leave in /dev/shm.
    with own_process(command, env, log) as process:
        status = process.wait(ARM_SECONDS)
    if status != 0:
        said = [line for line in log.read_text().splitlines() if line.strip()]
        sys.exit("\n".join([f"{arm}: failed.", *said[-30:]]))
    return [json.loads(line) for line in record_path.read_text().splitlines()]


if __name__ == "__main__":
    main()
