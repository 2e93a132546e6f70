# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A large tensor that workers keep and read over many later messages."""

import pytest


@pytest.fixture(scope="module")
def off(run_engine):
    return run_engine("prompt_embeds", "off")


@pytest.fixture(scope="module")
def on(run_engine):
    return run_engine("prompt_embeds", "on")


def test_same_tokens(off, on):
    assert on.report["tokens"] == off.report["tokens"]


def test_embeddings_go_through_the_arena(on):
    # 6000 positions, 1024 values, 2 bytes
    assert on.traffic.diverted == [6000 * 1024 * 2]


def test_every_worker_gets_the_embeddings_that_were_sent(on):
    assert len(on.report["sent"]) == 1
    for worker in on.report["arrived"]:
        assert worker["digests"] == on.report["sent"]


def test_embeddings_are_read_over_several_steps(on):
    # Otherwise this module would not test what it is there for.
    for worker in on.report["arrived"]:
        assert worker["step_tokens"][:6] == [1024] * 5 + [6000 - 5 * 1024]
