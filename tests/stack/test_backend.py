# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
import re
import runpy
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def backend(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    return runpy.run_path(str(ROOT / "setup.py"))


def test_an_old_python_is_refused_at_once(monkeypatch):
    monkeypatch.setattr(sys, "version_info", (3, 10, 9))

    with pytest.raises(SystemExit, match=r"needs Python 3\.11 or newer, this is 3\.10"):
        runpy.run_path(str(ROOT / "setup.py"))


@pytest.mark.parametrize("hook", ["build_wheel", "build_editable"])
def test_bad_input_is_one_sentence_and_no_wheel(backend, monkeypatch, tmp_path, hook):
    monkeypatch.setenv("VLLM_TARGET_DEVICE", "xpu")

    with pytest.raises(SystemExit, match="^error: VLLM_TARGET_DEVICE is 'xpu'"):
        backend[hook](str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_there_is_no_sdist_and_it_says_so(backend, tmp_path):
    with pytest.raises(SystemExit, match="no source distribution"):
        backend["build_sdist"](str(tmp_path))


def test_the_tool_and_the_build_require_the_same():
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]
    tool = (ROOT / "requirements/stack.txt").read_text()

    def names(requirements):
        return {re.match(r"[\w-]+", r)[0] for r in requirements if r[0] != "#"}

    # pip, which the build asks for the index settings, is in every environment.
    assert names(build["requires"]) == names(tool.splitlines()) | {"pip"}
