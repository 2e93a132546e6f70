# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
from dataclasses import replace

import pytest

from stack import checkout, editable, fetch, pins, series, status
from stack.git import Git


@pytest.fixture
def lines(project, make_patch):
    project.add_patch("core-add-a-hook.patch", make_patch())

    def report() -> str:
        return "\n".join(status.lines(project.root))

    return report


def test_it_says_what_applies_and_downloads_nothing(project, lines):
    assert "1 patches, not tried: vllm-1.2.3.tar.gz has not been" in lines()
    assert not fetch.cached_path(project.base.sdist).exists()

    fetch.fetch(project.base.sdist)
    assert "vLLM 1.2.3, the base of record: 1 patches, all apply." in lines()
    assert "core-add-a-hook.patch: vllm/engine.py +1 -1" in lines()


def test_a_damaged_download_is_told(project, lines, monkeypatch):
    monkeypatch.setenv("VLLM_TARGET_DEVICE", "cpu")
    wheel = fetch.fetch(project.fork.distribution)
    editable.create(project.fork, wheel, editable.tree_path(project.root))
    sdist = fetch.fetch(project.base.sdist)
    for file in (wheel, sdist):
        file.write_bytes(file.read_bytes()[:-50])

    assert f"not tried: the cached {sdist} is damaged" in lines()
    assert f"The cached {wheel} is damaged" in lines()


def test_what_a_killed_run_left_is_named(project, lines):
    folder = project.root / "build/tmpabc"
    folder.mkdir(parents=True)

    assert f"{folder} is of a run that was killed" in lines()


def test_it_says_what_does_not_apply(project, lines, make_patch):
    fetch.fetch(project.base.sdist)
    project.write("patches/1.2.3/core-add-a-hook.patch", make_patch(at=8))

    assert "core-add-a-hook.patch does not apply to vllm/engine.py" in lines()


def test_a_patch_that_cannot_be_read_is_told_once(project, lines, make_patch):
    text = make_patch().replace("\n", "\r\n")
    project.write("patches/1.2.3/core-add-a-hook.patch", text)
    fetch.fetch(project.base.sdist)

    assert lines().count("carriage returns") == 1
    assert "core-add-a-hook.patch: cannot be read" in lines()


def test_it_names_work_in_checkouts(project, lines):
    folder = checkout.default_folder(project.root, project.base)
    sdist = fetch.fetch(project.base.sdist)
    checkout.create(project.base, sdist, folder, project.overlay)
    assert "is as it was made" in lines()

    checkout_git = Git(folder)
    checkout_git("checkout", "--quiet", "--detach", "HEAD~1")
    assert "is at an older commit than the last of its stack." in lines()
    checkout_git("checkout", "--quiet", "stack")

    (folder / "vllm/engine.py").write_text("")
    assert "has changes that are not committed" in lines()


def test_a_checkout_that_is_none_is_named_once(project, lines):
    folder = project.root / "build/stack-1.2.3"
    Git(project.root)("init", "--quiet", str(folder))

    (line,) = (line for line in lines().splitlines() if str(folder) in line)
    assert line == f"{folder} has no tag fork-base, which `apply` gives it."


@pytest.mark.parametrize("path", ["vllm/new.py", "tests/new.py", "docs/new.md"])
def test_it_names_what_is_not_committed(project, lines, path):
    git = Git(project.root)
    git("init", "--quiet")
    # As some have it for speed.
    git("config", "status.showUntrackedFiles", "no")
    git("add", "--all")
    git("commit", "--quiet", "--message=it", env=checkout.TOOL)
    assert "Not committed" not in lines()

    project.write(path, "")
    folder, _, _ = path.partition("/")
    assert f"Not committed in this repository:\n  ?? {folder}" in lines()


def test_it_names_what_the_editable_tree_lacks(project, lines, make_patch, monkeypatch):
    monkeypatch.setenv("VLLM_TARGET_DEVICE", "cpu")
    tree = editable.tree_path(project.root)
    editable.create(project.fork, fetch.fetch(project.fork.distribution), tree)
    assert "editable" not in lines()

    project.write("patches/1.2.3/core-add-a-hook.patch", make_patch(new="other"))
    assert "is behind in vllm/engine.py: run `scripts/fork sync`" in lines()


def test_a_base_whose_stack_lags_behind_is_named(project, lines, make_patch):
    pins.add_base(project.root, replace(project.base, version="1.2.4"))
    source = series.Source("1.2.3", series.stack_hash(project.patches))
    project.write("patches/1.2.4/series", str(source))
    assert "behind" not in lines()

    project.write("patches/1.2.3/core-add-a-hook.patch", make_patch(new="other"))
    assert "`scripts/fork rebase --to 1.2.4` brings it up to date" in lines()
