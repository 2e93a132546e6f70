# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Images of many requests in flight: their slots come back while they decode."""

import pytest


@pytest.fixture(scope="module")
def run(run_engine):
    def run(workload, arena):
        return run_engine(workload, arena, program="run_in_flight.py")

    return run


@pytest.fixture(scope="module")
def roomy(run):
    """With memory for all requests."""
    return run("roomy", "on")


@pytest.fixture(scope="module")
def tight(run):
    """With memory for half of them, so that some are preempted."""
    return run("tight", "on")


@pytest.fixture(scope="module")
def tight_off(run):
    return run("tight", "off")


@pytest.fixture(scope="module")
def speculative(run):
    """As `tight`, with draft tokens."""
    return run("speculative", "on")


@pytest.fixture(scope="module")
def speculative_off(run):
    return run("speculative", "off")


def steps(engine, **wanted) -> list:
    return [
        step
        for step in engine.report["steps"]
        if all(step[key] == value for key, value in wanted.items())
    ]


def total(engine, key: str) -> int:
    return sum(step[key] for step in engine.report["steps"])


def slots_in_use(found: list) -> list[int]:
    return [n for step in found if (n := step["slots_in_use"]) is not None]


def test_every_image_goes_through_the_arena(roomy):
    report = roomy.report
    assert roomy.traffic.diverted == [report["image_bytes"]] * report["requests"]
    assert roomy.traffic.declined == []


def test_no_slot_is_held_while_all_requests_decode(roomy):
    decoding = slots_in_use(
        steps(roomy, running=roomy.report["requests"], prefilling=0)
    )
    assert len(decoding) > 1
    assert decoding[-1] == 0
    assert max(slots_in_use(roomy.report["steps"])) > 0


@pytest.fixture(params=["tight", "speculative"])
def preempted(request):
    """An engine of which requests are preempted, with the flag on, and off."""
    name = request.param
    return request.getfixturevalue(name), request.getfixturevalue(f"{name}_off")


def test_requests_are_preempted_and_their_images_encoded_again(preempted):
    """Else the tests below show nothing."""
    on, off = preempted
    assert total(on, "resumed") > 0
    assert total(on, "encoded") > on.report["requests"]
    keys = ("running", "resumed", "drafted", "encoded", "preempted")
    assert [[step[key] for key in keys] for step in on.report["steps"]] == [
        [step[key] for key in keys] for step in off.report["steps"]
    ]


def test_only_one_of_them_drafts(tight, speculative):
    assert total(tight, "drafted") == 0 < total(speculative, "drafted")


def test_a_preempted_request_gets_its_image_again(preempted):
    on, _ = preempted
    sent = on.report["requests"] + total(on, "resumed")
    assert on.traffic.diverted == [on.report["image_bytes"]] * sent
    assert on.traffic.declined == []


def test_same_tokens_as_without_the_flag(preempted):
    on, off = preempted
    assert on.report["tokens"] == off.report["tokens"]
    assert len(set(map(tuple, on.report["tokens"]))) > 1


def test_what_drops_them_is_imported_only_with_the_flag(tight, tight_off):
    def is_imported(log: str) -> bool:
        return any(
            "import time:" in line and "mm_input_release" in line
            for line in log.splitlines()
        )

    assert is_imported(tight.log)
    assert not is_imported(tight_off.log)


@pytest.mark.parametrize(
    "arm", ["roomy", "tight", "tight_off", "speculative", "speculative_off"]
)
def test_nothing_is_left_in_dev_shm(arm, request):
    assert request.getfixturevalue(arm).leftovers == []
