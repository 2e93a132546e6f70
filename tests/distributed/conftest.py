# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What every test of a queue needs."""

import gc

import pytest

from vllm.distributed.device_communicators.shm_broadcast import MessageQueue


@pytest.fixture(autouse=True)
def close_queues():
    """A queue has no close. In a reference cycle (a traceback is enough) it may
    hang when it is collected: its zmq context waits for sockets that are
    collected after it."""
    yield
    for queue in [o for o in gc.get_objects() if type(o) is MessageQueue]:
        (queue.local_socket or queue.remote_socket).context.destroy(linger=0)
