# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
import os
import subprocess
import sys
from pathlib import Path

import pytest

from stack import checkout, cli, fetch, pins, series
from stack.errors import StackError

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


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


def make(project, folder: Path) -> None:
    sdist = fetch.fetch(project.base.sdist)
    checkout.create(project.base, sdist, folder, project.overlay)


def export(project, folder: Path, **options: bool) -> checkout.Exported:
    return checkout.export(project.base, folder, project.overlay, **options)


@pytest.fixture
def stack(project, make_patch, tmp_path):
    """A checkout of two patches."""
    project.add_patch("core-add-a-hook.patch", make_patch(line=5))
    project.add_patch(
        "misc-a-2nd-one.patch", make_patch(line=15, subject="[Misc] A 2nd one")
    )
    folder = tmp_path / "stack"
    make(project, folder)
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
    export(project, stack)

    assert patch_files(project.base) == before


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
    git(stack, "config", "diff.suppressBlankEmpty", "true")
    git(stack, "config", "format.coverLetter", "true")
    git(stack, "config", "format.from", "true")
    git(stack, "config", "format.signOff", "true")
    (tmp_path / "order").write_text("vllm/*\n")
    git(stack, "config", "diff.orderFile", str(tmp_path / "order"))
    before = patch_files(project.base)
    export(project, stack)

    assert patch_files(project.base) == before


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_folder_of_another_user_that_git_is_told_to_trust(tmp_path):
    """As a repository that is mounted into a container."""
    subprocess.run(["git", "init", "--quiet", tmp_path / "tree"], check=True)
    os.chown(tmp_path / "tree", 1234, 1234)
    os.chown(tmp_path / "tree/.git", 1234, 1234)
    program = (
        "import sys; from pathlib import Path; from stack.git import Git\n"
        "print(Git(Path(sys.argv[1]))('status', '--porcelain'))"
    )
    for trusted, works in (("/elsewhere", False), ("*", True)):
        config = f"[safe]\ndirectory = {trusted}\n"
        (tmp_path / ".gitconfig").write_text(config)
        done = subprocess.run(
            [sys.executable, "-c", program, tmp_path / "tree"],
            env=os.environ | {"HOME": str(tmp_path), "PYTHONPATH": str(SCRIPTS)},
            capture_output=True,
            text=True,
        )
        assert (done.returncode == 0) is works, done.stderr


def test_a_change_of_one_commit_changes_one_file(project, stack):
    before = patch_files(project.base)
    engine = stack / "vllm/engine.py"
    lines = engine.read_text().splitlines()
    lines[14] = "better"
    engine.write_text("\n".join(lines) + "\n")
    git(stack, "commit", "--all", "--amend", "--no-edit")
    export(project, stack)

    after = patch_files(project.base)
    assert {name for name in after if after[name] != before[name]} == {
        "misc-a-2nd-one.patch"
    }
    assert b"\n+better\n" in after["misc-a-2nd-one.patch"]


def test_a_dropped_commit_is_a_dropped_patch(project, stack):
    before = patch_files(project.base)
    drop = "sequence.editor=sed -i 2s/^pick/drop/"
    git(stack, "-c", drop, "rebase", "--interactive", "fork-base")
    exported = export(project, stack)

    assert exported.patches == ["core-add-a-hook.patch"]
    (removed, copy), *others = exported.removed.items()
    assert (removed, others) == ("patches/1.2.3/misc-a-2nd-one.patch", [])
    assert copy.read_bytes() == before[copy.name]
    assert patch_files(project.base).keys() == {"series", "core-add-a-hook.patch"}


@pytest.mark.parametrize(
    "where", [("--detach", "HEAD~1"), ("-b", "wip"), ("--detach", "fork-applied")]
)
def test_only_the_branch_is_exported(project, stack, where):
    before = patch_files(project.base)
    git(stack, "checkout", "--quiet", *where)

    with pytest.raises(StackError, match="not on the branch stack"):
        export(project, stack)
    assert patch_files(project.base) == before


def message(text: str, *options: str):
    def do(stack: Path) -> None:
        (stack / "vllm/other.py").write_text("mine\n")
        git(
            *(stack, "commit", "--all", "--allow-empty-message"),
            *(f"--message={text}", *options),
        )

    return do


def content(data: bytes):
    def do(stack: Path) -> None:
        (stack / "vllm/other.py").write_bytes(data)
        git(stack, "commit", "--all", "--message=[Core] Mine")

    return do


def mode(stack: Path) -> None:
    (stack / "vllm/other.py").chmod(0o755)
    git(stack, "commit", "--all", "--message=[Core] Mine")


def link(stack: Path) -> None:
    (stack / "vllm/link.py").symlink_to("other.py")
    git(stack, "add", "vllm/link.py")
    git(stack, "commit", "--message=[Core] Mine")


@pytest.mark.parametrize(
    ("do", "reason"),
    [
        (message(""), "has no subject"),
        (message("[...]"), "has no subject"),
        (message("fixup! [Core] Add a hook"), "is not squashed yet"),
        (message("[Core] It\n\nWhy.\n---\nMore."), "has the line '---' in"),
        (message("[Core] It\n\ndiff --git a/x b/x"), "has the line 'diff --git"),
        (message("[Core] It\n\nFrom: me"), "has the line 'From: me' in"),
        (message("[Core] It\n\nFrom me Mon Sep 17 00:00:00 2001"), "has the line"),
        (message("[PATCH] [Core] It"), "has a subject that would not come back"),
        (message("Re: [Core] It"), "has a subject that would not come back"),
        (message("[Core] It  does"), "has a subject that would not come back"),
        (mode, "makes a file executable"),
        (link, "makes a file executable, a link"),
        (content(b"\xe9\n"), "is no text in UTF-8"),
        (content(b"\0\1\2"), "is no text in UTF-8"),
        (content(b"a\n=======\nb\n"), "has the markers of a conflict"),
        (content(b"other\n>>>>>>> theirs\n"), "has the markers of a conflict"),
    ],
)
def test_a_commit_that_can_be_no_patch(project, stack, do, reason):
    before = patch_files(project.base)
    do(stack)

    with pytest.raises(StackError, match=f"^The commit .* {reason}"):
        export(project, stack)
    assert patch_files(project.base) == before


def test_a_long_subject_is_cut_to_a_name(project, stack):
    message(f"[Core] {'very ' * 60}long")(stack)
    *_, name = export(project, stack).patches

    assert name.startswith("core-very-very-") and len(name) <= 110
    assert {path.name for path in project.base.patches.iterdir()} == {
        "series",
        "core-add-a-hook.patch",
        "misc-a-2nd-one.patch",
        name,
    }


def test_uncommitted_changes_are_not_lost(project, stack):
    before = patch_files(project.base)
    (stack / "vllm/other.py").write_text("mine\n")

    with pytest.raises(StackError, match="changes that are not committed"):
        export(project, stack)
    assert patch_files(project.base) == before


def quoted_name(stack: Path) -> None:
    (stack / "vllm/é.py").write_text("mine\n")
    git(stack, "add", "--all")
    git(stack, "commit", "--message=[Core] Mine")


@pytest.mark.parametrize(
    ("do", "reason"),
    [
        (
            message("[Core] Mine", "--author=m@me <m@e>"),
            "would not give its commit again",
        ),
        (
            message("[Core] It\n\nWhy.\n\n\n\nMore.\n", "--cleanup=verbatim"),
            "would not give its commit again",
        ),
        (content(b"other\nmine\r\n"), "would not give its commit again"),
        (quoted_name, r'would not give "vllm/\\303'),
    ],
)
def test_what_a_patch_does_not_give_again_is_not_exported(project, stack, do, reason):
    before = patch_files(project.base)
    do(stack)

    with pytest.raises(StackError, match=reason):
        export(project, stack)
    assert patch_files(project.base) == before


@pytest.mark.parametrize("text", ["", "mine\n"])
def test_a_file_that_is_emptied_or_was_empty(project, stack, text):
    """Which to unidiff is one that is deleted, or was not there."""
    path = "vllm/__init__.py" if text else "vllm/other.py"
    (stack / path).write_text(text)
    git(stack, "commit", "--all", "--message=[Core] Mine")
    export(project, stack)

    read = {name: data.encode() for name, data in project.upstream.items()}.get
    assert series.apply(project.patches, read)[path] == text.encode()


def test_a_folder_of_patches_that_is_a_link(project, stack, tmp_path):
    before = patch_files(project.base)
    project.base.patches.rename(tmp_path / "elsewhere")
    project.base.patches.symlink_to(tmp_path / "elsewhere")

    with pytest.raises(StackError, match=r"1\.2\.3 is a link"):
        export(project, stack)
    assert patch_files(project.base) == before


def test_what_looks_like_a_draft_is_cleared_whatever_it_is(project):
    (project.root / "patches/.x.new").touch()
    (project.root / "patches/.y.old").symlink_to("1.2.3")
    project.write("build/.fork-x", "")

    assert cli.main(project.root, ["apply"]) == 0
    assert not list((project.root / "patches").glob(".*"))


def test_two_commits_of_one_name(project, stack):
    before = patch_files(project.base)
    (stack / "vllm/other.py").write_text("mine\n")
    git(stack, "commit", "--all", "--message=[Core] Add a hook")

    with pytest.raises(StackError, match=r"both be core-add-a-hook\.patch"):
        export(project, stack)
    assert patch_files(project.base) == before


def test_a_folder_that_is_no_checkout(project, tmp_path):
    with pytest.raises(StackError, match="no checkout"):
        export(project, tmp_path)


def test_apply_overwrites_nothing(project, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/file").touch()

    with pytest.raises(StackError, match="is in the way"):
        make(project, tmp_path / "mine")


def test_a_stack_that_does_not_apply_leaves_no_checkout(project, make_patch, tmp_path):
    project.add_patch("fits.patch", make_patch())
    project.add_patch("off.patch", make_patch(line=15, at=16))

    with pytest.raises(StackError, match=r"off\.patch does not apply"):
        make(project, tmp_path / "stack")
    assert not (tmp_path / "stack").exists()


@pytest.mark.parametrize("can_exchange", [True, False])
def test_an_export_that_is_killed_writes_all_or_nothing(
    project, make_patch, monkeypatch, killed_everywhere, writes_below, can_exchange
):
    for line, subject in ((5, "[Core] Add a hook"), (15, "[Misc] A 2nd one")):
        name = subject.partition("] ")[2].lower().replace(" ", "-")
        name = f"{subject[1:5].lower()}-{name}.patch"
        project.add_patch(name, make_patch(line, subject=subject))
    project.write("patches/1.2.3/notes.txt", "mine\n")
    assert cli.main(project.root, ["apply"]) == 0
    stack = checkout.default_folder(project.root, project.base)
    amend = "git commit --amend --quiet --no-edit --author='C Person <c@example.org>'"
    git(stack, "rebase", "--quiet", "--exec", amend, "fork-base")
    before = patch_files(project.base)
    if not can_exchange:
        monkeypatch.setattr(checkout, "_exchange", checkout._exchange_by_steps)

    wanted = writes_below(project.root / "patches")
    states = []
    for _ in killed_everywhere(
        project.root, wanted, lambda: cli.main(project.root, ["export"])
    ):
        there = project.base.patches.is_dir()
        states.append(patch_files(project.base) if there else {})
        assert cli.main(project.root, ["export"]) == 0
        after = patch_files(project.base)
        assert [name for name in before if before[name] != after[name]] == [
            name for name in before if name.endswith(".patch")
        ]
        assert sorted(path.name for path in (project.root / "patches").iterdir()) == [
            "1.2.3",
            "upstream.toml",
        ]
    assert len(states) > 5
    assert all(
        state in (before, after) or not (can_exchange or state) for state in states
    )


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_patches_that_may_not_be_written(project, stack):
    before = patch_files(project.base)
    project.base.patches.chmod(0o555)

    with pytest.raises(StackError, match="cannot be written"):
        export(project, stack, force=True)
    assert patch_files(project.base) == before


def test_an_export_that_cannot_write_all_writes_nothing(project, with_overlay):
    for name in ("vllm/arena.py", "tests/test_arena.py"):
        (with_overlay / name).write_text("changed\n")
    git(with_overlay, "commit", "--all", "--amend", "--no-edit", "--author=C <c@e.org>")
    (project.root / "vllm/arena.py").unlink()
    (project.root / "vllm/arena.py/in_the_way").mkdir(parents=True)
    before = patch_files(project.base)

    with pytest.raises(StackError, match=r"arena\.py is a folder"):
        export(project, with_overlay, force=True)
    assert patch_files(project.base) == before
    assert [path.name for path in (project.root / "tests").iterdir()] == [
        "test_arena.py"
    ]
    assert (project.root / "tests/test_arena.py").read_text() == "arena\n"


def test_a_removed_patch_is_kept_beside_an_earlier_one_of_its_name(project, stack):
    name = "misc-a-2nd-one.patch"
    texts = []
    for author in ("C <c@e.org>", "D <d@e.org>"):
        git(stack, "commit", "--amend", "--no-edit", f"--author={author}")
        head = git(stack, "rev-parse", "HEAD").strip()
        export(project, stack)
        texts.append((project.base.patches / name).read_text())
        git(stack, "reset", "--quiet", "--hard", "HEAD~")
        removed = export(project, stack).removed
        assert removed[f"patches/1.2.3/{name}"].read_text() == texts[-1]
        git(stack, "reset", "--quiet", "--hard", head)

    kept = (project.root / "build/removed/patches/1.2.3").iterdir()
    assert sorted(path.read_text() for path in kept) == sorted(texts)


def test_comments_of_the_series_stay(project, stack):
    listing = (
        "# Rebased from 1.2.2, stack " + "0" * 64 + "\n"
        "# of them all\n\n"
        "# why it is first\n"
        "core-add-a-hook.patch  # beside it\n"
        "# of the second\n"
        "misc-a-2nd-one.patch\n"
        "# the end\n"
    )
    project.write("patches/1.2.3/series", listing)
    git(stack, "commit", "--amend", "--no-edit", "--author=C <c@e.org>")
    export(project, stack)
    assert (project.base.patches / "series").read_text() == listing

    git(stack, "commit", "--amend", "--message=[Misc] Reworded")
    export(project, stack)
    listing = listing.replace("misc-a-2nd-one", "misc-reworded")
    assert (project.base.patches / "series").read_text() == listing

    git(stack, "reset", "--quiet", "--hard", "HEAD~")
    export(project, stack)
    assert (project.base.patches / "series").read_text() == listing.replace(
        "# of the second\nmisc-reworded.patch\n", ""
    )


OWNED = '"core-add-a-hook.patch" = ["vllm/arena.py", "tests/test_arena.py"]\n'


@pytest.fixture
def with_overlay(project, make_patch, tmp_path):
    """A checkout of a patch that files of ours belong to, and of one without."""
    project.add_patch("core-add-a-hook.patch", make_patch(line=5))
    project.add_patch(
        "misc-a-2nd-one.patch", make_patch(line=15, subject="[Misc] A 2nd one")
    )
    project.write("patches/overlay.toml", OWNED)
    project.write("vllm/arena.py", "arena = 1\n")
    project.write("tests/test_arena.py", "arena\n")
    make(project, tmp_path / "stack")
    return tmp_path / "stack"


def test_our_files_are_in_the_commit_that_owns_them(with_overlay):
    def paths(commit: str) -> list[str]:
        return git(with_overlay, "show", "--format=", "--name-only", commit).split()

    assert paths("HEAD^") == ["tests/test_arena.py", "vllm/arena.py", "vllm/engine.py"]
    assert paths("HEAD") == ["vllm/engine.py"]


def test_our_files_are_in_no_patch(project, with_overlay):
    before = patch_files(project.base)
    export(project, with_overlay, force=True)

    assert patch_files(project.base) == before


def test_our_files_come_back_as_they_were_changed(project, with_overlay):
    before = patch_files(project.base)
    (with_overlay / "vllm/arena.py").write_text("arena = 2\n")
    (with_overlay / "tests/test_arena.py").unlink()
    git(with_overlay, "commit", "--all", "--fixup=:/Add a hook")
    git(
        with_overlay,
        *("-c", "sequence.editor=:", "rebase", "--interactive", "--autosquash"),
        "fork-base",
    )
    exported = export(project, with_overlay)

    assert (project.root / "vllm/arena.py").read_text() == "arena = 2\n"
    assert not (project.root / "tests/test_arena.py").exists()
    assert list(exported.removed) == ["tests/test_arena.py"]
    assert patch_files(project.base) == before


def test_our_files_come_from_the_commit(project, with_overlay):
    """The folder may lack them, or hold what git was told not to look at."""
    (with_overlay / "vllm/arena.py").write_text("arena = 2\n")
    (with_overlay / "tests/test_arena.py").write_text("tests\n")
    git(with_overlay, "commit", "--all", "--fixup=:/Add a hook")
    git(
        with_overlay,
        *("-c", "sequence.editor=:", "rebase", "--interactive", "--autosquash"),
        "fork-base",
    )
    git(with_overlay, "update-index", "--assume-unchanged", "vllm/arena.py")
    (with_overlay / "vllm/arena.py").write_text("arena = 3\n")
    git(with_overlay, "update-index", "--skip-worktree", "tests/test_arena.py")
    (with_overlay / "tests/test_arena.py").unlink()
    export(project, with_overlay)

    assert (project.root / "vllm/arena.py").read_text() == "arena = 2\n"
    assert (project.root / "tests/test_arena.py").read_text() == "tests\n"


def test_a_folder_in_place_of_our_file_is_not_lost(project, with_overlay):
    git(with_overlay, "rm", "--quiet", "vllm/arena.py")
    (with_overlay / "vllm/arena.py").mkdir()
    (with_overlay / "vllm/arena.py/a.py").write_text("a = 1\n")
    git(with_overlay, "add", "--all")
    git(with_overlay, "commit", "--amend", "--no-edit")

    with pytest.raises(StackError, match=r"would not give vllm/arena\.py/a\.py"):
        export(project, with_overlay)
    assert (project.root / "vllm/arena.py").read_text() == "arena = 1\n"


def test_a_file_that_becomes_ours_moves_from_its_patch(project, with_overlay):
    """As `lint` asks for, of a new file in a patch."""
    (with_overlay / "vllm/mine.py").write_text("mine = 1\n")
    git(with_overlay, "add", "vllm/mine.py")
    git(with_overlay, "commit", "--amend", "--no-edit")
    export(project, with_overlay)
    mine = '"misc-a-2nd-one.patch" = ["vllm/mine.py"]\n'
    project.write("patches/overlay.toml", OWNED + mine)
    export(project, with_overlay)

    assert (project.root / "vllm/mine.py").read_text() == "mine = 1\n"
    assert not any(b"mine.py" in text for text in patch_files(project.base).values())


def test_a_kill_loses_no_file_that_moves_from_its_patch(
    project, make_patch, killed_everywhere, writes_below
):
    """Nor does it leave a draft."""
    project.add_patch("core-add-a-hook.patch", make_patch())
    project.write("vllm/arena.py", "arena = 1\n")
    project.write("patches/overlay.toml", OWNED.replace(', "tests/test_arena.py"', ""))
    assert cli.main(project.root, ["apply"]) == 0
    stack = checkout.default_folder(project.root, project.base)
    (stack / "vllm/mine.py").write_text("mine = 1\n")
    git(stack, "add", "vllm/mine.py")
    git(stack, "commit", "--amend", "--no-edit")
    assert cli.main(project.root, ["export"]) == 0
    project.write(
        "patches/overlay.toml", OWNED.replace("tests/test_arena.py", "vllm/mine.py")
    )

    kills = 0
    for _ in killed_everywhere(
        project.root,
        writes_below(project.root),
        lambda: cli.main(project.root, ["export"]),
    ):
        kills += 1
        assert cli.main(project.root, ["export"]) == 0
        assert (project.root / "vllm/mine.py").read_text() == "mine = 1\n"
        assert len(list((project.root / "vllm").iterdir())) == 2
        patches = patch_files(project.base).values()
        assert not any(b"mine.py" in text for text in patches)
    assert kills > 5


def test_a_mode_of_our_file_is_refused(project, with_overlay):
    (with_overlay / "vllm/arena.py").chmod(0o755)
    git(with_overlay, "commit", "--all", "--fixup=:/Add a hook")
    git(
        with_overlay,
        *("-c", "sequence.editor=:", "rebase", "--interactive", "--autosquash"),
        "fork-base",
    )

    with pytest.raises(StackError, match=r"arena\.py makes a file executable"):
        export(project, with_overlay)


def test_a_commit_of_our_files_alone_is_no_patch(project, with_overlay):
    (with_overlay / "vllm/arena.py").write_text("arena = 2\n")
    git(with_overlay, "commit", "--all", "--message=[Core] Mine")

    with pytest.raises(
        StackError, match=r"\[Core\] Mine\) .* none of upstream's files"
    ):
        export(project, with_overlay)


@pytest.mark.parametrize("path", ["vllm/arena.py", "patches/1.2.3"])
def test_what_changed_in_the_repository_is_not_overwritten(
    project, with_overlay, make_patch, path
):
    (with_overlay / "vllm/arena.py").write_text("arena = 2\n")
    lines = (with_overlay / "vllm/engine.py").read_text().replace("line 9\n", "my 9\n")
    (with_overlay / "vllm/engine.py").write_text(lines)
    git(with_overlay, "commit", "--all", "--amend", "--no-edit")
    if path == "vllm/arena.py":
        theirs = project.write(path, "arena = 3\n")
    else:
        theirs = project.write(f"{path}/core-add-a-hook.patch", make_patch(new="3"))
    before = theirs.read_bytes()

    with pytest.raises(StackError, match=f"^{path} changed in the repository"):
        export(project, with_overlay)
    assert theirs.read_bytes() == before

    export(project, with_overlay, force=True)
    assert theirs.read_bytes() != before


def test_edit_stops_at_the_patch(project, with_overlay):
    before = patch_files(project.base)
    checkout.edit(with_overlay, "core-add-a-hook.patch")
    text = (with_overlay / "vllm/engine.py").read_text()
    (with_overlay / "vllm/engine.py").write_text(text.replace("hook", "better"))
    git(with_overlay, "commit", "--all", "--amend", "--no-edit")

    with pytest.raises(StackError, match="git rebase is under way .* --continue"):
        export(project, with_overlay)
    assert patch_files(project.base) == before

    git(with_overlay, "-c", "core.editor=:", "rebase", "--continue")
    export(project, with_overlay)
    after = patch_files(project.base)
    assert [name for name in after if after[name] != before[name]] == [
        "core-add-a-hook.patch"
    ]
    assert b"\n+better\n" in after["core-add-a-hook.patch"]


def test_a_checkout_is_made_anew_where_nothing_in_it_is_lost(stack):
    (stack / "vllm/__pycache__").mkdir()
    (stack / "vllm/__pycache__/engine.pyc").touch()
    git(stack, "checkout", "--quiet", "--detach", "HEAD~1")

    checkout.remove_if_untouched(stack)
    assert not stack.exists()


def commit_on_a_branch(stack: Path) -> None:
    git(stack, "checkout", "--quiet", "-b", "wip")
    git(stack, "commit", "--quiet", "--allow-empty", "--message=Mine")
    git(stack, "checkout", "--quiet", "stack")


def commit_and_look_elsewhere(stack: Path) -> None:
    git(stack, "commit", "--quiet", "--allow-empty", "--message=Mine")
    git(stack, "checkout", "--quiet", "--detach", "fork-applied")


def drop_a_commit(stack: Path) -> None:
    git(stack, "reset", "--quiet", "--hard", "HEAD~1")


def stash(stack: Path) -> None:
    (stack / "vllm/engine.py").write_text("mine\n")
    git(stack, "stash")


def ignored_file(stack: Path) -> None:
    (stack / ".git/info/exclude").write_text("notes/\n")
    (stack / "notes").mkdir()
    (stack / "notes/mine").touch()


def untracked_file_where_git_is_not_to_look(stack: Path) -> None:
    git(stack, "config", "status.showUntrackedFiles", "no")
    (stack / "mine").touch()


@pytest.mark.parametrize(
    ("do", "holds"),
    [
        (commit_on_a_branch, "has commits that are not exported"),
        (commit_and_look_elsewhere, "has commits that are not exported"),
        (drop_a_commit, "has dropped commits and not exported that"),
        (stash, "has a stash"),
        (ignored_file, "has the ignored file notes"),
        (lambda stack: (stack / "mine").touch(), "has the untracked file mine"),
        (untracked_file_where_git_is_not_to_look, "has the untracked file mine"),
        (
            lambda stack: (stack / "vllm/engine.py").write_text("mine\n"),
            "has changes that are not committed",
        ),
    ],
)
def test_a_checkout_that_holds_work_is_not_made_anew(stack, do, holds):
    do(stack)

    with pytest.raises(StackError, match=f"{holds}, which a checkout made anew"):
        checkout.remove_if_untouched(stack)
    assert stack.exists()


def test_a_checkout_of_another_base_is_not_exported(project, stack):
    git(stack, "config", "fork.base", "1.2.2")

    with pytest.raises(StackError, match=r"of vLLM 1\.2\.2, not of 1\.2\.3"):
        export(project, stack)
