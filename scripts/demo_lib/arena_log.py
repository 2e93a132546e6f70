# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What a server's log tells about the tensors that its arena carried."""

import copy
import json
import re
from dataclasses import dataclass, field
from pathlib import Path

from vllm.logger import DEFAULT_LOGGING_CONFIG

ARENA_LOGGER = "vllm.distributed.device_communicators.shm_tensor_arena"
# Tensors of at least this many bytes go through the arena.
THRESHOLD_BYTES = 8 * 1024 * 1024

_LINE = re.compile(
    rb"\[shm_tensor_arena\.py:\d+\] (?P<what>Diverted|Declined) (?P<bytes>\d+) bytes"
    rb"(?:: (?P<reason>.*))?"
)


@dataclass
class ArenaTraffic:
    """The tensors of some messages, in the order in which they were sent."""

    diverted: list[int] = field(default_factory=list)  # bytes of each
    declined: list[str] = field(default_factory=list)  # bytes and reason of each


def write_logging_config(path: Path) -> None:
    """A file for VLLM_LOGGING_CONFIG_PATH: as usual, and the arena in detail."""
    config = copy.deepcopy(DEFAULT_LOGGING_CONFIG)
    config["handlers"]["vllm"]["level"] = "DEBUG"
    config["loggers"][ARENA_LOGGER] = {"level": "DEBUG"}
    path.write_text(json.dumps(config, indent=2))


def read_traffic(log: Path, start: int = 0) -> ArenaTraffic:
    """The traffic in a log from the byte `start` on."""
    with log.open("rb") as file:
        file.seek(start)
        text = file.read()
    traffic = ArenaTraffic()
    for match in _LINE.finditer(text):
        if match["what"] == b"Diverted":
            traffic.diverted.append(int(match["bytes"]))
        else:
            reason = (match["reason"] or b"no reason given").decode()
            traffic.declined.append(f"{int(match['bytes']):,} bytes: {reason}")
    return traffic
