# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
import platform
import sys

import pytest

from stack import target
from stack.errors import StackError


@pytest.fixture(autouse=True)
def linux(monkeypatch):
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.delenv("VLLM_TARGET_DEVICE", raising=False)
    # No nvidia-smi, whatever this machine has.
    monkeypatch.setenv("PATH", "/nowhere")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_variable_chooses(monkeypatch, device):
    monkeypatch.setenv("VLLM_TARGET_DEVICE", device)

    assert target.detect() == target.Target(device, "x86_64")


def test_an_unknown_device_is_refused(monkeypatch):
    monkeypatch.setenv("VLLM_TARGET_DEVICE", "xpu")

    with pytest.raises(StackError, match="VLLM_TARGET_DEVICE is 'xpu'"):
        target.detect()


@pytest.mark.parametrize(("driver", "device"), [(True, "cuda"), (False, "cpu")])
def test_else_the_driver_chooses(monkeypatch, tmp_path, driver, device):
    file = tmp_path / "version"
    if driver:
        file.touch()
    monkeypatch.setattr(target, "DRIVER_FILES", (file,))

    assert target.detect().device == device


@pytest.mark.parametrize(
    ("system", "machine"), [("darwin", "x86_64"), ("linux", "riscv64")]
)
def test_an_unsupported_platform_is_refused(monkeypatch, system, machine):
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(platform, "machine", lambda: machine)

    with pytest.raises(StackError, match=f"not for {system} on {machine}"):
        target.detect()


def test_a_device_without_a_pinned_wheel_is_refused(project):
    with pytest.raises(StackError, match="no pinned wheel for cuda on x86_64"):
        project.base.wheel("cuda", "x86_64")
