# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What a server's /metrics say of the arena."""

from prometheus_client.parser import text_string_to_metric_families

from demo_lib.server import MODEL_NAME, Server

PREFIX = "vllm:shm_tensor_arena_"
# Name without the prefix -> values of the labels besides engine and model -> value.
Samples = dict[str, dict[tuple[str, ...], float]]


def arena_samples(server: Server) -> dict[str, Samples]:
    """By engine, as its label says."""
    found: dict[str, Samples] = {}
    for family in text_string_to_metric_families(server.metrics()):
        for sample in family.samples:
            if not sample.name.startswith(PREFIX):
                continue
            labels = dict(sample.labels)
            assert labels.pop("model_name") == MODEL_NAME
            of_engine = found.setdefault(labels.pop("engine"), {})
            of_name = of_engine.setdefault(sample.name.removeprefix(PREFIX), {})
            of_name[tuple(labels.values())] = sample.value
    return found
