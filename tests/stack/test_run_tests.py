# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
import runpy
from collections import Counter
from pathlib import Path

import pytest

from stack import fetch, upstream_tests
from stack.errors import StackError

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def runner():
    return runpy.run_path(str(ROOT / "scripts/run_tests.py"))


@pytest.fixture
def trees(tmp_path):
    for name in ("ours/tests/test_a.py", "upstream/tests/test_b.py"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).touch()
    return tmp_path / "ours", tmp_path / "upstream"


def test_paths_choose_whose_tests_run(runner, trees):
    args = runner["sort_arguments"](
        ["-x", "tests/test_a.py::test_it", "-k", "tests", "tests/test_b.py"], *trees
    )

    assert args.options == ["-x", "-k", "tests"]
    assert args.ours == ["tests/test_a.py::test_it"]
    assert args.upstream == ["tests/test_b.py"]


def test_a_path_that_nobody_has_is_refused(runner, trees):
    with pytest.raises(StackError, match=r"no test tests/test_c\.py"):
        runner["sort_arguments"](["tests/test_c.py"], *trees)


def test_what_pytest_found_is_counted(runner, tmp_path):
    (tmp_path / "test_it.py").write_text(
        "import pytest\n"
        "def test_passes(): pass\n"
        "def test_fails(): assert False\n"
        "def test_skips(): pytest.skip('why')\n"
        "@pytest.fixture\n"
        "def broken(): assert False\n"
        "def test_is_in_error(broken): pass\n"
    )
    code, counts = runner["pytest"](tmp_path, ["-q"], tmp_path / "report.xml")

    assert code == 1
    assert counts == Counter(passed=1, failed=2, skipped=1)


def test_a_pytest_that_stops_is_a_failure(runner, tmp_path):
    code, counts = runner["pytest"](tmp_path, ["--nonsense"], tmp_path / "report.xml")

    assert code not in (0, 1, 5)
    assert counts == Counter(failed=1)


def test_upstreams_tests_come_without_upstreams_package(project, tmp_path):
    folder = upstream_tests.unpacked(
        project.base, fetch.fetch(project.base.sdist), tmp_path / "upstream"
    )

    assert (folder / "tests/test_it.py").read_text() == "it\n"
    assert not (folder / "vllm").exists()


def test_upstreams_tests_are_as_the_stack_changes_them(project, make_patch, tmp_path):
    text = make_patch()
    message = text[: text.index("diff --git")]
    project.add_patch(
        "it.patch",
        f"{message}diff --git a/tests/test_it.py b/tests/test_it.py\n"
        "--- a/tests/test_it.py\n+++ b/tests/test_it.py\n@@ -1 +1 @@\n-it\n+that\n",
    )
    folder = upstream_tests.unpacked(
        project.base, fetch.fetch(project.base.sdist), tmp_path / "upstream"
    )

    assert (folder / "tests/test_it.py").read_text() == "that\n"
