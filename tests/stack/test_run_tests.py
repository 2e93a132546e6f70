# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
import math
import os
import runpy
import shutil
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from stack import fetch, pins, upstream_tests
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


@pytest.fixture
def sort(runner, trees):
    def sort(*argv, folder=trees[0]):
        return runner["sort_arguments"](list(argv), *trees, folder)

    return sort


def test_paths_choose_whose_tests_run(sort):
    args = sort("-x", "tests/test_a.py::test_it", "-k", "tests", "tests/test_b.py")

    assert args.options == ["-x", "-k", "tests"]
    assert args.ours == ["tests/test_a.py::test_it"]
    assert args.upstream == ["tests/test_b.py"]


def test_a_path_that_nobody_has_is_refused(sort):
    with pytest.raises(StackError, match=r"no test tests/test_c\.py"):
        sort("tests/test_c.py")


def test_a_path_may_be_relative_to_the_callers_folder(sort, trees):
    args = sort("test_a.py::test_it", "../tests/test_b.py", folder=trees[0] / "tests")

    assert args.ours == ["tests/test_a.py::test_it"]
    assert args.upstream == ["tests/test_b.py"]


def test_from_any_folder_a_path_may_be_relative_to_the_root(sort, tmp_path):
    assert sort("tests/test_a.py", folder=tmp_path).ours == ["tests/test_a.py"]


@pytest.mark.parametrize(
    "options",
    [["-x"], ["--exitfirst"], ["-vx"], ["-qx"], ["--maxfail=1"], ["--maxfail", "1"]],
)
def test_upstreams_tests_do_not_run_after_a_failure_that_ends_the_run(sort, options):
    assert sort(*options).max_failures == 1


@pytest.mark.parametrize("options", [[], ["-v"], ["-k", "x"], ["-kx"], ["-rx"]])
def test_else_a_failure_does_not_end_the_run(sort, options):
    assert sort(*options).max_failures == math.inf


@pytest.mark.parametrize("options", [[], ["-x"], ["-vx"], ["--maxfail=2"]])
def test_a_whole_run_has_two_workers(sort, options):
    workers = ["-n", "2", "--dist", "loadfile", "--no-loadscope-reorder"]

    assert sort(*options).parts("cpu") == [workers]
    # Two engines do not fit a GPU.
    assert sort(*options).parts("cuda") == [
        [*workers, "--ignore=tests/e2e"],
        ["tests/e2e"],
    ]


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["-k", "it"], [[]]),
        (["--pdb"], [[]]),
        (["-s"], [[]]),
        (["tests/test_a.py"], [["tests/test_a.py"]]),
        (["tests/test_b.py"], []),
    ],
)
def test_what_is_chosen_runs_one_after_the_other(sort, argv, parts):
    assert sort(*argv).parts("cpu") == sort(*argv).parts("cuda") == parts


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


def test_a_pytest_that_only_tells_something_is_none(runner, tmp_path):
    found = runner["pytest"](tmp_path, ["--version"], tmp_path / "report.xml")

    assert found == (0, Counter())


@pytest.mark.parametrize("number", ["SIGHUP", "SIGINT", "SIGTERM", "SIGKILL"])
def test_a_signal_ends_pytest_and_what_its_tests_have_started(number, tmp_path):
    """One to the whole group, as a terminal and `timeout` send it; pytest's own
    handling of SIGINT works where a shell in the background has it ignored."""
    number = signal.Signals[number]
    (tmp_path / "test_it.py").write_text(
        "import pathlib, pytest, signal\n"
        "@pytest.fixture\n"
        "def server():\n"
        "    yield\n"
        "    pathlib.Path('ended').touch()\n"
        "def test_it(server, capfd):\n"
        "    with capfd.disabled():\n"
        "        print('up', flush=True)\n"
        "    signal.pause()\n"
    )
    ignored = "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
    program = (
        "import pathlib, run_tests, signal\n"
        f"{'' if number == signal.SIGINT else ignored}"
        "folder = pathlib.Path.cwd()\n"
        "run_tests.pytest(folder, ['-q', 'test_it.py'], folder / 'report.xml')\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT / "scripts")},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert any(line.endswith("up\n") for line in process.stdout)
        os.killpg(process.pid, number)
        # Until every process that holds it has ended.
        process.stdout.read()

    killed = number == signal.SIGKILL
    assert process.returncode == (-number if killed else 128 + number)
    assert (tmp_path / "ended").exists()


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT, signal.SIGTERM])
def test_a_signal_before_the_tests_leaves_nothing(number, tmp_path):
    os.mkfifo(tmp_path / "started")
    program = (
        "import pathlib, run_tests, signal, sys, time\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "def run(argv, folder, scratch):\n"
        f"    pathlib.Path({str(tmp_path / 'started')!r}).write_text('')\n"
        "    time.sleep(300)\n"
        "run_tests.run = run\n"
        "sys.exit(run_tests.main())\n"
    )
    (tmp_path / "scratch").mkdir()
    env = {"PYTHONPATH": str(ROOT / "scripts"), "TMPDIR": str(tmp_path / "scratch")}
    with subprocess.Popen(
        [sys.executable, "-c", program],
        env=os.environ | env,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        (tmp_path / "started").read_text()
        process.send_signal(number)
        _, error = process.communicate()

    assert process.returncode == 128 + number
    assert error == f"error: stopped by {number.name}.\n"
    assert list((tmp_path / "scratch").iterdir()) == []


@pytest.mark.parametrize("path", ["tests/e2e/test_it.py", "./tests/e2e", "tests"])
def test_engines_need_compiled_parts(runner, project, monkeypatch, path):
    """Told by a sentence, not by what fails at their start."""
    monkeypatch.setenv("VLLM_TARGET_DEVICE", "cpu")
    base = replace(project.base, version="1.3.0", wheels={})
    pins.add_base(project.root, base)
    project.write("patches/1.3.0/series", "")
    project.write("tests/upstream/selection.toml", "files = []\n")
    project.write("tests/e2e/test_it.py", "")
    names = runner["run"].__globals__
    monkeypatch.setitem(names, "ROOT", project.root)
    selection = project.root / "tests/upstream/selection.toml"
    monkeypatch.setitem(names, "SELECTION", selection)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PYTHONPATH", "")

    argv = ["--base", "1.3.0", path]
    with pytest.raises(StackError, match="vLLM 1.3.0, without a CPU wheel"):
        runner["run"](argv, project.root, project.root)


def test_help_needs_no_environment(tmp_path):
    (tmp_path / "scripts").mkdir()
    script = shutil.copy(ROOT / "scripts/test", tmp_path / "scripts")
    done = subprocess.run([script, "--help"], capture_output=True, text=True)

    assert done.returncode == 0
    assert "usage: scripts/test" in done.stdout


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
