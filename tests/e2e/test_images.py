# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Photographs above the threshold, from the processor to the workers."""

import pytest

from demo_lib.tiny_models import pixel_bytes, tiny_qwen2_vl

# One photograph in the first request, two in the second.
IMAGES = 3


@pytest.fixture(scope="module")
def off(run_engine):
    return run_engine("images", "off")


@pytest.fixture(scope="module")
def on(run_engine):
    return run_engine("images", "on")


def test_same_tokens(off, on):
    assert on.report["tokens"] == off.report["tokens"]


def test_tokens_depend_on_the_images(off):
    one_photo, two_photos = off.report["tokens"]
    assert one_photo != two_photos


def test_every_image_goes_through_the_arena(on):
    nbytes = pixel_bytes(tiny_qwen2_vl(), 2048)
    assert on.traffic.diverted == [nbytes] * IMAGES


def test_nothing_is_diverted_without_the_flag(off):
    assert off.traffic.diverted == []


def test_every_worker_gets_the_pixels_that_were_sent(on):
    assert len(on.report["sent"]) == IMAGES
    for worker in on.report["arrived"]:
        assert worker["digests"] == on.report["sent"]


def test_workers_import_the_arena_only_with_the_flag(off, on):
    assert not any(off.report["workers_with_arena_module"])
    assert all(on.report["workers_with_arena_module"])


def test_no_process_imports_the_arena_without_the_flag(off, on):
    # The second half shows that an import would be seen.
    assert "shm_tensor_arena" not in imports(off.log)
    assert "shm_tensor_arena" in imports(on.log)


@pytest.mark.parametrize("arm", ["off", "on"])
def test_nothing_is_left_in_dev_shm(arm, request):
    assert request.getfixturevalue(arm).leftovers == []


def imports(log: str) -> str:
    return "\n".join(line for line in log.splitlines() if "import time:" in line)
