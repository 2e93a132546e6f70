# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What the tensor arena's hooks cost a text-only message, in instructions.

The time of an `enqueue` depends on what else the machine does, by more than the
hooks take. The instructions that valgrind's callgrind counts do not. Needs
valgrind and a Python that is not stripped; takes a minute or two for each arm.
"""

import argparse
import gc
import importlib.util
import itertools
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MODULE = "vllm.distributed.device_communicators.shm_broadcast"
ARMS = ("base", "off", "on")
KINDS = ("new", "running")
WARM_UPS = 12
# callgrind counts inside this C function of Python's only; nothing in an
# `enqueue` uses `itertools.starmap`.
COUNTED = "starmap_next"


def base_module(file: Path):
    """Import vLLM's own module from a file, beside the fork's."""
    spec = importlib.util.spec_from_file_location(f"{MODULE}_of_base", file)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def send(arm: str, kind: str, messages: int, base: Path) -> None:
    """Enqueue and dequeue in this process, so that no message waits."""
    import torch
    from arena_bench.writer import scheduler_outputs

    torch.set_num_threads(1)
    module = base_module(base) if arm == "base" else importlib.import_module(MODULE)
    flag = {"enable_shm_tensor_arena": True} if arm == "on" else {}
    writer = module.MessageQueue(1, 1, **flag)
    reader = module.MessageQueue.create_from_handle(writer.export_handle(), 0)
    thread = threading.Thread(target=reader.wait_until_ready)
    thread.start()
    writer.wait_until_ready()
    thread.join()
    time.sleep(2)  # what the arena prepares after the barrier
    outputs = scheduler_outputs()
    (output,) = (outputs[name] for name in outputs if kind in name)
    for _ in range(WARM_UPS):
        writer.enqueue(output)
        reader.dequeue()
    # A collection would be counted with the message that it falls on.
    gc.collect()
    gc.disable()
    # Not before: all of vllm's imports would take ten times as long.
    subprocess.run(["callgrind_control", "--instr=on", str(os.getpid())], check=True)
    for _ in range(messages):
        list(itertools.starmap(writer.enqueue, [(output,)]))
        reader.dequeue()


def count(arm: str, kind: str, messages: int, base: Path, scratch: Path) -> float:
    """Instructions of one `enqueue`."""
    command = [
        *("valgrind", "--tool=callgrind", f"--toggle-collect={COUNTED}"),
        "--instr-atstart=no",
        f"--callgrind-out-file={scratch / 'out'}",
        *(sys.executable, __file__, "--messages", str(messages)),
        *("--send", arm, kind, str(base)),
    ]
    # The same hashes in all arms: they decide how long look-ups take.
    env = os.environ | {"PYTHONHASHSEED": "0"}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    found = re.search(r"(?m)^summary: (\d+)", (scratch / "out").read_text())
    if done.returncode or found is None or found[1] == "0":
        sys.exit(f"Nothing was counted:\n{done.stderr[-2000:]}")
    return int(found[1]) / messages


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kind", choices=KINDS, default="running")
    parser.add_argument("--messages", type=int, default=20)
    parser.add_argument("--send", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.send:
        arm, kind, base = args.send
        send(arm, kind, args.messages, Path(base))
        return
    sys.path.insert(0, str(ROOT / "scripts"))
    from stack import fetch, pins, target, wheel

    chosen = target.detect()
    pinned = pins.load_base(ROOT).wheel(chosen.device, chosen.machine)
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder, "base.py")
        with wheel.BaseWheel(fetch.fetch(pinned)) as archive:
            base.write_bytes(archive.read(MODULE.replace(".", "/") + ".py"))
        of_base = 0.0
        for arm in ARMS:
            n = count(arm, args.kind, args.messages, base, Path(folder))
            of_base = of_base or n
            print(f"{args.kind}, {arm}: {n:,.0f} ({n / of_base:.4f})", flush=True)


if __name__ == "__main__":
    main()
