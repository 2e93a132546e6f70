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


def test_requests_are_preempted_and_their_images_encoded_again(tight, tight_off):
    """Else the tests below show nothing."""
    assert total(tight, "resumed") > 0
    assert total(tight, "encoded") > tight.report["requests"]
    keys = ("running", "resumed", "encoded", "preempted")
    assert [[step[key] for key in keys] for step in tight.report["steps"]] == [
        [step[key] for key in keys] for step in tight_off.report["steps"]
    ]


@pytest.mark.parametrize("engine", ["tight", "speculative"])
def test_a_preempted_request_gets_its_image_again(engine, request):
    engine = request.getfixturevalue(engine)
    assert total(engine, "resumed") > 0
    sent = engine.report["requests"] + total(engine, "resumed")
    assert engine.traffic.diverted == [engine.report["image_bytes"]] * sent
    assert engine.traffic.declined == []


def test_same_tokens_with_drafts_that_are_rejected(speculative, tight_off):
    drafted, steps = total(speculative, "drafted"), len(speculative.report["steps"])
    accepted = len(tight_off.report["steps"]) - steps
    assert 0 < accepted < drafted
    assert speculative.report["tokens"] == tight_off.report["tokens"]


def test_same_tokens_as_without_the_flag(tight, tight_off):
    assert tight.report["tokens"] == tight_off.report["tokens"]
    assert len(set(map(tuple, tight.report["tokens"]))) > 1


def test_what_drops_them_is_imported_only_with_the_flag(tight, tight_off):
    def is_imported(log: str) -> bool:
        return any(
            "import time:" in line and "mm_input_release" in line
            for line in log.splitlines()
        )

    assert is_imported(tight.log)
    assert not is_imported(tight_off.log)


@pytest.mark.parametrize("arm", ["roomy", "tight", "tight_off", "speculative"])
def test_nothing_is_left_in_dev_shm(arm, request):
    assert request.getfixturevalue(arm).leftovers == []
