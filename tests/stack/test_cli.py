# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
import fcntl
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from stack import cli

SCRIPTS = Path(cli.__file__).parents[1]
# A shell starts what it puts into the background with SIGINT ignored.
RUN = """
import signal, sys
from pathlib import Path
from stack import cli
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.exit(cli.main(Path(sys.argv[1]), sys.argv[2:]))
"""


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)],
)
def test_a_run_that_is_stopped_leaves_nothing(
    project, make_patch, tmp_path, monkeypatch, number, code
):
    project.add_patch("core-add-a-hook.patch", make_patch())
    os.mkfifo(tmp_path / "started")
    git = tmp_path / "bin/git"
    git.parent.mkdir()
    git.write_text(f"#!/bin/sh\necho > {tmp_path}/started\nexec sleep 300\n")
    git.chmod(0o755)
    monkeypatch.setenv("PATH", f"{git.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(SCRIPTS))
    command = [sys.executable, "-c", RUN, str(project.root), "apply"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as run:
        (tmp_path / "started").read_text()
        run.send_signal(number)
        _, error = run.communicate()

    assert run.returncode == code
    assert error.splitlines()[-1] == f"error: stopped by {number.name}."
    assert "Traceback" not in error
    assert list((project.root / "build").iterdir()) == []


@pytest.mark.parametrize("lines", ["0", "-1", "many"])
def test_a_change_needs_lines_around_it(project, capsys, lines):
    with pytest.raises(SystemExit, match="2"):
        cli.main(project.root, ["pr", f"--context={lines}"])
    assert "argument --context: invalid" in capsys.readouterr().err


@pytest.fixture
def script(project):
    """scripts/fork of the made-up project, in the environment of the tests."""
    shutil.copytree(SCRIPTS, project.root / "scripts")
    (project.root / ".venv").symlink_to(sys.prefix)
    return project.root / "scripts/fork"


def test_an_environment_that_is_none_is_no_loop(project, script):
    """Its Python does not know that it is of an environment."""
    venv = project.root / ".venv"
    venv.unlink()
    (venv / "bin").mkdir(parents=True)
    (venv / "bin/python").symlink_to(Path(sys.executable).resolve())
    # Ends: with what it was asked, or with what this Python lacks.
    done = subprocess.run([script, "status"], capture_output=True, timeout=60)

    assert b"Traceback" not in done.stderr


def test_ctrl_c_while_it_loads_is_one_sentence(project, script):
    """Whatever of its modules is loaded then."""
    project.write(
        "scripts/stack/cli.py",
        "import os, signal, time\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "os.kill(os.getpid(), signal.SIGINT)\n"
        "time.sleep(300)\n",
    )
    done = subprocess.run([script, "status"], capture_output=True, text=True)

    assert (done.returncode, done.stderr) == (130, "error: stopped by SIGINT.\n")


def test_text_is_utf_8_in_any_locale(project, script, make_patch, tmp_path):
    text = make_patch().replace("From: A Person", "From: Å Person")
    project.add_patch("core-add-a-hook.patch", text)
    for name, value in (("name", "Sølve"), ("email", "s@example.org")):
        subprocess.run(
            ["git", "config", "--file", tmp_path / ".gitconfig", f"user.{name}", value],
            check=True,
        )
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run(
        [script, "pr", "--no-tests"],
        env=os.environ | locale | {"HOME": str(tmp_path)},
        capture_output=True,
    )

    # Ruff has something to say of the made-up files.
    assert b"Traceback" not in done.stderr
    _, mail = sorted((project.root / "build/pr-1.2.3").iterdir())
    assert "Signed-off-by: Sølve <s@example.org>" in mail.read_text("utf-8")


@pytest.mark.parametrize("verb", [("apply",), ("rebase", "--to", "1.3.0")])
def test_verbs_that_write_wait_for_each_other(project, make_patch, monkeypatch, verb):
    project.add_patch("core-add-a-hook.patch", make_patch())
    monkeypatch.setenv("PYTHONPATH", str(SCRIPTS))
    command = [sys.executable, "-c", RUN, str(project.root), *verb]
    other = os.open(project.root / "patches", os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as run:
        assert run.stderr is not None
        assert run.stderr.readline() == "Waiting for another scripts/fork to end.\n"
        assert not (project.root / "build").exists()
        os.close(other)
        run.communicate()
    # There is no 1.3.0.
    assert run.returncode == (verb[0] == "rebase")


@pytest.mark.parametrize(
    ("folder", "code"),
    [("patches/1.2.3/", 0), ("", 0), ("patches/1.2.2/", 1), ("elsewhere/", 1)],
)
def test_a_patch_of_another_base_is_not_edited(
    project, make_patch, capsys, folder, code
):
    project.add_patch("core-add-a-hook.patch", make_patch())

    path = f"{folder}core-add-a-hook.patch"
    assert cli.main(project.root, ["edit", path]) == code
    assert not code or f"{path} is no patch of 1.2.3" in capsys.readouterr().err


def test_a_system_error_is_one_sentence(project, capsys):
    build = project.write("build", "")

    assert cli.main(project.root, ["apply"]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error == f"error: {build}: File exists."
