# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
import subprocess
from pathlib import Path

import pytest

from stack import checkout, fetch, pins
from stack.errors import StackError

ROOT = Path(__file__).resolve().parents[2]


def git(folder: Path, *args: str) -> str:
    identity = ("-c", "user.name=B Person", "-c", "user.email=b@example.org")
    return subprocess.run(
        ["git", *identity, *args],
        cwd=folder,
        check=True,
        capture_output=True,
        text=True,
    ).stdout


def patch_files(base: pins.Base) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in base.patches.iterdir()}


@pytest.fixture
def stack(project, make_patch, tmp_path):
    """A checkout of two patches."""
    project.add_patch("core-add-a-hook.patch", make_patch(line=5))
    project.add_patch(
        "misc-a-2nd-one.patch", make_patch(line=15, subject="[Misc] A 2nd one")
    )
    folder = tmp_path / "stack"
    checkout.create(project.base, fetch.fetch(project.base.sdist), folder)
    return folder


def test_each_patch_is_a_commit(stack):
    log = git(stack, "log", "--reverse", "--format=%an|%aI|%s", "fork-base..HEAD")

    assert log.splitlines() == [
        "A Person|2026-10-05T10:00:00+02:00|[Core] Add a hook",
        "A Person|2026-10-05T10:00:00+02:00|[Misc] A 2nd one",
    ]
    assert "Remove-When: upstream has it" in git(stack, "log", "-1", "--format=%b")
    assert git(stack, "status", "--porcelain") == ""


def test_export_gives_back_the_same_bytes(project, stack):
    before = patch_files(project.base)
    checkout.export(project.base, stack)

    assert patch_files(project.base) == before


def test_export_of_the_real_stack_gives_back_the_same_bytes(tmp_path):
    real = pins.load_base(ROOT)
    copy = pins.Base(real.version, real.sdist, real.wheels, tmp_path / "patches")
    checkout.create(real, fetch.fetch(real.sdist), tmp_path / "stack")
    checkout.export(copy, tmp_path / "stack")

    assert patch_files(copy) == patch_files(real)


def test_git_configuration_does_not_change_the_export(
    project, stack, tmp_path, monkeypatch
):
    (tmp_path / ".gitconfig").write_text(
        "[format]\nsignature = me\nnumbered = true\n[diff]\nnoprefix = true\n"
        "context = 9\nalgorithm = patience\n[core]\nautocrlf = true\n"
        "attributesFile = /dev/null\n[log]\nshowSignature = true\n"
    )
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("GIT_DIFF_OPTS", "--unified=1")
    git(stack, "config", "diff.noprefix", "true")
    git(stack, "config", "diff.context", "9")
    git(stack, "config", "format.signature", "me")
    git(stack, "config", "diff.statGraphWidth", "5")
    before = patch_files(project.base)
    checkout.export(project.base, stack)

    assert patch_files(project.base) == before


def test_a_change_of_one_commit_changes_one_file(project, stack):
    before = patch_files(project.base)
    engine = stack / "vllm/engine.py"
    lines = engine.read_text().splitlines()
    lines[14] = "better"
    engine.write_text("\n".join(lines) + "\n")
    git(stack, "commit", "--all", "--amend", "--no-edit")
    checkout.export(project.base, stack)

    after = patch_files(project.base)
    assert {name for name in after if after[name] != before[name]} == {
        "misc-a-2nd-one.patch"
    }
    assert b"\n+better\n" in after["misc-a-2nd-one.patch"]


def test_a_dropped_commit_is_a_dropped_patch(project, stack):
    git(stack, "reset", "--hard", "HEAD~1")
    names = checkout.export(project.base, stack)

    assert names == ["core-add-a-hook.patch"]
    assert patch_files(project.base).keys() == {"series", "core-add-a-hook.patch"}


def test_uncommitted_changes_are_not_lost(project, stack):
    before = patch_files(project.base)
    (stack / "vllm/other.py").write_text("mine\n")

    with pytest.raises(StackError, match="changes that are not committed"):
        checkout.export(project.base, stack)
    assert patch_files(project.base) == before


def test_two_commits_of_one_name(project, stack):
    before = patch_files(project.base)
    (stack / "vllm/other.py").write_text("mine\n")
    git(stack, "commit", "--all", "--message=[Core] Add a hook")

    with pytest.raises(StackError, match=r"both be core-add-a-hook\.patch"):
        checkout.export(project.base, stack)
    assert patch_files(project.base) == before


def test_a_folder_that_is_no_checkout(project, tmp_path):
    with pytest.raises(StackError, match="no checkout"):
        checkout.export(project.base, tmp_path)


def test_apply_overwrites_nothing(project, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/file").touch()

    with pytest.raises(StackError, match="is in the way"):
        checkout.create(
            project.base, fetch.fetch(project.base.sdist), tmp_path / "mine"
        )


def test_a_stack_that_does_not_apply_leaves_no_checkout(project, make_patch, tmp_path):
    project.add_patch("fits.patch", make_patch())
    project.add_patch("off.patch", make_patch(line=15, at=16))

    with pytest.raises(StackError, match=r"off\.patch does not apply"):
        checkout.create(
            project.base, fetch.fetch(project.base.sdist), tmp_path / "stack"
        )
    assert not (tmp_path / "stack").exists()
