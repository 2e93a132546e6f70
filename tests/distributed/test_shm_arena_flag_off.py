# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Without the flag the fork is the base: same imports, same bytes on the wire."""

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from stack.fetch import fetch
from stack.pins import load_base

ROOT = Path(__file__).parents[2]
QUEUE_MODULE = "vllm.distributed.device_communicators.shm_broadcast"

# Prints, for each object of a corpus, a hash of what a queue puts on the ring and
# on the socket for it. argv[1]: a file to take the queue's module from.
WIRE = f"""
import hashlib, importlib.util, json, sys
from collections import OrderedDict
from unittest import mock
import numpy as np, torch
if len(sys.argv) > 1:
    spec = importlib.util.spec_from_file_location("{QUEUE_MODULE}", sys.argv[1])
    module = importlib.util.module_from_spec(spec)
    sys.modules["{QUEUE_MODULE}"] = module
    spec.loader.exec_module(module)
from {QUEUE_MODULE} import MessageQueue
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
torch.manual_seed(0)
def requests(n):
    return [NewRequestData(req_id=str(i), prompt_token_ids=list(range(50)),
        mm_features=[], sampling_params=SamplingParams(seed=i), pooling_params=None,
        block_ids=([1, 2, i],), num_computed_tokens=0, lora_request=None)
        for i in range(n)]
output = SchedulerOutput.make_empty()
output.scheduled_new_reqs = requests(64)
# Not in it: what torch pickles itself (requires grad, conjugate bit), with an
# address of this process inside.
corpus = dict(
    none=None, text="x" * 1000, numbers=[1, 2.5, 1 << 70, True],
    nested=OrderedDict(a=[{{"b": (1, 2)}}], c=frozenset((1,))),
    array=np.arange(300_000), scheduler_output=("execute_model", (output,), {{}}),
    small=torch.rand(100), medium=torch.rand(1 << 19), large=torch.rand(9 << 18),
    overflowing=torch.rand(10 << 20), bf16=torch.rand(5 << 20).bfloat16(),
    noncontiguous=torch.rand(3, 1 << 20).t(), same_twice=[torch.ones(3)] * 2,
    parameter=torch.nn.Parameter(torch.rand(1000), requires_grad=False),
    empty=torch.empty(0, 3), scalar=torch.tensor(1.5),
)
wire = {{}}
for name, obj in corpus.items():
    queue = MessageQueue(1, 1)
    hashes = []
    def send_multipart(buffers, copy):
        hashes.extend(hashlib.sha256(buffer).hexdigest() for buffer in buffers)
    queue.local_socket = mock.Mock(send_multipart=send_multipart)
    queue.enqueue(obj)
    with queue.buffer.get_data(0) as chunk:
        hashes.append(hashlib.sha256(chunk).hexdigest())
    wire[name] = hashes
from vllm.config import VllmConfig
from vllm.v1.metrics.loggers import LoggingStatLogger
LoggingStatLogger(VllmConfig())
print(json.dumps(dict(
    wire=wire,
    arena_modules=[name for name in sys.modules if "shm_arena" in name
                   or "shm_tensor_arena" in name],
    module=sys.modules["{QUEUE_MODULE}"].__file__,
)))
"""


def run(*args: str) -> dict:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", WIRE, *args],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"PYTHONHASHSEED": "0"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def fork() -> dict:
    return run()


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> dict:
    with tarfile.open(fetch(load_base(ROOT).sdist)) as sdist:
        member = f"{sdist.getnames()[0].split('/')[0]}/{QUEUE_MODULE.replace('.', '/')}"
        source = sdist.extractfile(member + ".py").read()
    path = tmp_path_factory.mktemp("base") / "shm_broadcast.py"
    path.write_bytes(source)
    return run(str(path))


def test_wire_of_the_base_is_the_base(base: dict, fork: dict):
    """The comparison below compares two different modules."""
    assert base["module"] != fork["module"]


def test_same_bytes_on_the_wire(base: dict, fork: dict):
    assert fork["wire"] == base["wire"]
    assert len(fork["wire"]) == 16


def test_arena_is_not_imported(fork: dict):
    assert fork["arena_modules"] == []
