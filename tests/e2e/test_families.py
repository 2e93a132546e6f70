# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""No worker writes into the tensors that all workers share."""

import pytest

from tests.e2e.run_families import FOLDER, run_apart

# What vLLM's own code does for most models; the others are for `run_families.py`.
SOME = ["llava", "qwen3_vl", "idefics3"]


@pytest.fixture(autouse=True)
def folder() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)


@pytest.mark.parametrize("family", SOME)
def test_every_worker_gets_along_with_read_only_inputs(family: str):
    workers = run_apart(family, write=False)
    assert workers, (FOLDER / f"{family}.log").read_text()[-3000:]
    for seen in workers:
        assert "pixel_values" in seen
        assert {how for hows in seen.values() for how in hows} == {"read-only"}


def test_a_worker_that_writes_is_noticed():
    """Otherwise the test above would show nothing."""
    assert run_apart("llava", write=True) is None
    log = (FOLDER / "llava.log").read_text(errors="replace")
    assert "died unexpectedly" in log
    # Of Python's handler, or of that which a library puts in its place.
    assert "Segmentation fault" in log or "Segfault encountered" in log
