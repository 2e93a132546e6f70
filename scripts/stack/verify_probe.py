# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Imports a fork of one base and sends messages; `verify` runs it in a process.

Reads a task (JSON) on stdin: the base's package tree, the files, by path, that the
patches and the overlay put into it, and those that the patches delete. Prints the
problems as a JSON list.
"""

import hashlib
import importlib
import importlib.util
import json
import sys
from importlib.abc import MetaPathFinder
from pathlib import Path
from unittest import mock

QUEUE = "vllm.distributed.device_communicators.shm_broadcast"
ARENA = "vllm.distributed.device_communicators.shm_tensor_arena"
ARENA_PARTS = "vllm.distributed.device_communicators.shm_arena"
FLAG = "--enable-shm-tensor-arena"


class ForkFinder(MetaPathFinder):
    """Finds the fork's files; all others come from the base's tree."""

    def __init__(self, files: dict[str, str], deleted: list[str]):
        self.files = files
        self.deleted = deleted

    def find_spec(self, fullname, path=None, target=None):
        name = fullname.replace(".", "/")
        for candidate in (f"{name}.py", f"{name}/__init__.py"):
            if candidate in self.files:
                file = self.files[candidate]
                folder = [str(Path(file).parent)] if "__init__" in candidate else None
                return importlib.util.spec_from_file_location(
                    fullname, file, submodule_search_locations=folder
                )
            if candidate in self.deleted:
                raise ModuleNotFoundError(
                    f"No module named {fullname!r}, which a patch deletes"
                )
        return None


def module_name(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def corpus() -> dict[str, object]:
    """Return objects of all kinds that go through the queue.

    Not among them: what torch pickles itself (requires grad, conjugate bit), with
    an address of this process inside.
    """
    from collections import OrderedDict

    import numpy as np
    import torch

    from vllm.sampling_params import SamplingParams
    from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput

    torch.manual_seed(0)
    output = SchedulerOutput.make_empty()
    output.scheduled_new_reqs = [
        NewRequestData(
            req_id=str(i),
            prompt_token_ids=list(range(50)),
            mm_features=[],
            sampling_params=SamplingParams(seed=i),
            pooling_params=None,
            block_ids=([1, 2, i],),
            num_computed_tokens=0,
            lora_request=None,
        )
        for i in range(64)
    ]
    return {
        "None": None,
        "a text": "x" * 1000,
        "numbers": [1, 2.5, 1 << 70, True],
        "nested containers": OrderedDict(a=[{"b": (1, 2)}], c=frozenset((1,))),
        "an array": np.arange(300_000),
        "a SchedulerOutput": ("execute_model", (output,), {}),
        "a small tensor": torch.rand(100),
        "a tensor of 2 MiB": torch.rand(1 << 19),
        "a tensor of 9 MiB": torch.rand(9 << 18),
        "a tensor of 40 MiB": torch.rand(10 << 20),
        "a bfloat16 tensor": torch.rand(5 << 20).bfloat16(),
        "a tensor that is not contiguous": torch.rand(3, 1 << 20).t(),
        "a tensor twice": [torch.ones(3)] * 2,
        "a parameter": torch.nn.Parameter(torch.rand(1000), requires_grad=False),
        "an empty tensor": torch.empty(0, 3),
        "a scalar tensor": torch.tensor(1.5),
    }


def wire(queue_class, objects: dict[str, object]) -> dict[str, list[str]]:
    """Return, for each object, hashes of what a queue sends for it."""
    result = {}
    for name, obj in objects.items():
        queue = queue_class(1, 1)
        hashes: list[str] = []

        def send_multipart(buffers, copy, hashes=hashes):
            hashes.extend(hashlib.sha256(buffer).hexdigest() for buffer in buffers)

        queue.local_socket.close(linger=0)
        queue.local_socket = mock.Mock(send_multipart=send_multipart)
        queue.enqueue(obj)
        with queue.buffer.get_data(0) as chunk:
            hashes.append(hashlib.sha256(chunk).hexdigest())
        result[name] = hashes
    return result


def flag_off_problems(tree: str) -> list[str]:
    objects = corpus()
    fork = wire(importlib.import_module(QUEUE).MessageQueue, objects)
    found = [
        f"{name} is imported with the flag off."
        for name in sorted(sys.modules)
        if name == ARENA or name.startswith(ARENA_PARTS)
    ]
    # pickle writes a function's module, so the base's goes by the same name.
    file = Path(tree, QUEUE.replace(".", "/") + ".py")
    spec = importlib.util.spec_from_file_location(QUEUE, file)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    with mock.patch.dict(sys.modules, {QUEUE: module}):
        spec.loader.exec_module(module)
        base = wire(module.MessageQueue, objects)
    return found + [
        f"with the flag off {name} is not sent as the base sends it."
        for name in objects
        if fork[name] != base[name]
    ]


def flag_problems() -> list[str]:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    for argv, expected in (([], False), ([FLAG], True)):
        args = EngineArgs.from_cli_args(parser.parse_args(argv))
        if args.enable_shm_tensor_arena is not expected:
            return [f"{FLAG} on the command line does not reach the configuration."]
    return []


def needs_what_is_missing(path: str) -> bool:
    """Whether upstream's module itself cannot be imported without a package that
    vLLM does not require and that is not here: Ray's executors."""
    is_rays = Path(path).name.startswith("ray_")
    return is_rays and importlib.util.find_spec("ray") is None


def main() -> None:
    task = json.load(sys.stdin)
    sys.path.insert(0, task["tree"])
    files = task["edited"] | task["overlay"]
    sys.meta_path.insert(0, ForkFinder(files, task["deleted"]))
    found = []
    for path in task["edited"]:
        if needs_what_is_missing(path):
            print(f"Not imported, since Ray is not here: {path}", file=sys.stderr)
            continue
        try:
            importlib.import_module(module_name(path))
        except Exception as e:
            found.append(f"{path} cannot be imported: {e!r}.")
    if not found and task["overlay"]:
        found += flag_off_problems(task["tree"]) + flag_problems()
    for path in task["overlay"]:
        try:
            importlib.import_module(module_name(path))
        except Exception as e:
            found.append(f"{path} cannot be imported: {e!r}.")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
