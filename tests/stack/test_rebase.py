# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
import hashlib
import subprocess
from pathlib import Path

import pytest

from stack import cli, pins, rebase, series, verify
from stack.errors import StackError

TWO = {
    "core-add-a-hook.patch": (5, "[Core] Add a hook"),
    "misc-a-2nd-one.patch": (15, "[Misc] A 2nd one"),
}


def git(folder: Path, *args: str) -> str:
    identity = ("-c", "user.name=B Person", "-c", "user.email=b@example.org")
    return subprocess.run(
        ["git", *identity, *args],
        cwd=folder,
        check=True,
        capture_output=True,
        text=True,
    ).stdout


def contents(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


class Rebase:
    """A repository with two patches, and the verb on it."""

    def __init__(self, project):
        self.project = project
        self.root = project.root
        self.folder = rebase.folder_of(self.root, "1.3.0")
        self.engine = project.upstream["vllm/engine.py"]
        git(self.root, "init", "--quiet")
        (self.root / ".gitignore").write_text("/build/\n")

    def commit(self) -> None:
        git(self.root, "add", "--all")
        git(self.root, "commit", "--quiet", "--message=Change")

    def release(self, engine: str) -> None:
        self.project.release(
            "1.3.0", self.project.upstream | {"vllm/engine.py": engine}
        )

    def start(self, version: str = "1.3.0"):
        return self.advance(rebase.start(self.root, self.project.base, version))

    def resume(self, problems: tuple[str, ...] = ()):
        return self.advance(rebase.resume(self.root), problems)

    def advance(self, repository, problems: tuple[str, ...] = ()):
        self.state = rebase.advance(self.root, repository)
        return rebase.finish(self.root, repository, lambda base: list(problems))

    def solve(self, old: str, new: str) -> None:
        """Take our side of the conflicts, with a text replaced."""
        path = self.folder / "vllm/engine.py"
        lines, side = [], ""
        for line in path.read_text().splitlines():
            marker = line[:7]
            if marker in ("<<<<<<<", "|||||||", "=======", ">>>>>>>"):
                side = "" if marker == ">>>>>>>" else marker
            elif side in ("", "======="):
                lines.append(line.replace(old, new))
        path.write_text("\n".join(lines) + "\n")

    def ported(self) -> str:
        """Return the engine of 1.3.0 with the stack."""
        base = pins.load_base(self.root, "1.3.0")
        files = self.project.upstream | {"vllm/engine.py": self.released}
        edits = series.apply(
            series.load(base.patches), lambda path: files[path].encode()
        )
        return (edits["vllm/engine.py"] or b"").decode()


@pytest.fixture
def two(project, make_patch) -> Rebase:
    for name, (line, subject) in TWO.items():
        project.add_patch(name, make_patch(line, f"hook {line}", subject))
    return Rebase(project)


@pytest.fixture
def moved(two) -> Rebase:
    """1.3.0 has a line more at the top."""
    two.released = "top\n" + two.engine
    two.release(two.released)
    two.commit()
    return two


@pytest.fixture
def conflicting(two) -> Rebase:
    """1.3.0 has another line where the first patch has its hook."""
    two.released = two.engine.replace("line 5\n", "other 5\n")
    two.release(two.released)
    two.commit()
    return two


def test_a_stack_moves_with_its_lines(moved):
    assert moved.start() == []

    base = pins.load_base(moved.root, "1.3.0")
    sdist = moved.project.index / "vllm-1.3.0.tar.gz"
    assert base.sdist.sha256 == hashlib.sha256(sdist.read_bytes()).hexdigest()
    assert [patch.name for patch in series.load(base.patches)] == list(TWO)
    assert moved.ported() == moved.released.replace("line 5\n", "hook 5\n").replace(
        "line 15\n", "hook 15\n"
    )
    assert "A Person <a.person@example.org>" in series.load(base.patches)[0].message
    assert not moved.folder.exists()


def test_a_conflict_stops_with_the_patch_and_changes_nothing(conflicting):
    before = contents(conflicting.root / "patches")

    with pytest.raises(
        StackError, match=r"^core-add-a-hook\.patch conflicts in vllm/engine\.py\."
    ):
        conflicting.start()
    text = (conflicting.folder / "vllm/engine.py").read_text()
    assert "<<<<<<< " in text and "other 5\n" in text and "hook 5\n" in text
    assert contents(conflicting.root / "patches") == before

    with pytest.raises(StackError, match=r"core-add-a-hook\.patch conflicts"):
        conflicting.resume()
    assert (conflicting.folder / "vllm/engine.py").read_text() == text


def test_markers_that_were_added_are_no_solution(conflicting):
    with pytest.raises(rebase.Conflict):
        conflicting.start()
    git(conflicting.folder, "add", "--all")

    with pytest.raises(
        rebase.Conflict, match=r"add-a-hook\.patch conflicts in vllm/engine\.py\."
    ):
        conflicting.resume()

    # A solution that left a part of them.
    conflicting.solve("hook 5", "hook 5\n=======")
    git(conflicting.folder, "add", "--all")
    with pytest.raises(rebase.Conflict):
        conflicting.resume()


def test_markers_in_a_commit_do_not_become_a_patch(moved):
    before = contents(moved.root / "patches")
    repository = rebase.start(moved.root, moved.project.base, "1.3.0")
    moved.advance(repository, ("it is broken.",))
    (moved.folder / "vllm/other.py").write_text("<<<<<<< HEAD\nother\n")
    git(moved.folder, "commit", "--all", "--message=[Core] Mend it")

    with pytest.raises(StackError, match="has the markers of a conflict"):
        moved.resume()
    assert contents(moved.root / "patches") == before


def test_a_solved_conflict_goes_on(conflicting):
    with pytest.raises(rebase.Conflict):
        conflicting.start()
    conflicting.solve("hook 5", "hook other 5")

    assert conflicting.resume() == []
    assert "\nhook other 5\n" in conflicting.ported()
    assert "\nhook 15\n" in conflicting.ported()


def test_a_rebase_is_given_up(conflicting):
    before = contents(conflicting.root / "patches")
    with pytest.raises(rebase.Conflict):
        conflicting.start()
    rebase.abort(conflicting.root)

    assert not conflicting.folder.exists()
    assert contents(conflicting.root / "patches") == before
    with pytest.raises(StackError, match="No rebase is under way"):
        rebase.resume(conflicting.root)


@pytest.mark.parametrize("kind", ["folder", "file", "link"])
def test_what_is_no_rebase_is_left_alone(moved, kind, tmp_path):
    mine = moved.root / "build/rebase-1.3.0"
    mine.parent.mkdir()
    if kind == "folder":
        mine.mkdir()
        (mine / "notes").touch()
    elif kind == "file":
        mine.touch()
    else:
        mine.symlink_to(tmp_path)

    for verb in (rebase.abort, rebase.resume):
        with pytest.raises(StackError, match=r"No rebase .* is none: remove it"):
            verb(moved.root)
    with pytest.raises(StackError, match=r"is in the way, and no rebase"):
        moved.start()
    assert mine.is_symlink() if kind == "link" else mine.exists()
    assert kind != "folder" or (mine / "notes").exists()


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"target": 1}'])
def test_a_damaged_rebase_is_given_up(conflicting, text):
    with pytest.raises(rebase.Conflict):
        conflicting.start()
    (conflicting.folder / ".git/fork-rebase.json").write_text(text)

    with pytest.raises(StackError, match="is damaged, .* rebase --abort"):
        conflicting.resume()
    rebase.abort(conflicting.root)
    assert not conflicting.folder.exists()


def test_a_lock_of_a_git_that_was_killed(conflicting):
    with pytest.raises(rebase.Conflict):
        conflicting.start()
    conflicting.solve("hook 5", "hook other 5")
    lock = conflicting.folder / ".git/index.lock"
    lock.touch()

    with pytest.raises(StackError, match=f"was killed there: .* remove {lock}"):
        conflicting.resume()
    lock.unlink()
    assert conflicting.resume() == []


@pytest.fixture
def solved(conflicting, monkeypatch) -> Rebase:
    """The conflict is solved in the folder, and that is all."""
    monkeypatch.setattr(verify, "problems", lambda root, base: [])
    with pytest.raises(rebase.Conflict):
        conflicting.start()
    conflicting.solve("hook 5", "hook other 5")
    return conflicting


def test_what_was_solved_survives_a_kill(solved, killed_everywhere, writes_below):
    root = solved.root
    writes = writes_below(root / "patches")

    def wanted(event: str, args: tuple) -> bool:
        if event == "subprocess.Popen":
            verbs = {"checkout", "read-tree", "commit", "commit-tree", "cherry-pick"}
            return not verbs.isdisjoint(args[1])
        return writes(event, args) or event == "shutil.rmtree"

    kills = 0
    for _ in killed_everywhere(
        root, wanted, lambda: cli.main(root, ["rebase", "--continue"])
    ):
        kills += 1
        # The last finds all of it done.
        if rebase.folders(root):
            assert cli.main(root, ["rebase", "--continue"]) == 0
        assert list(contents(root / "patches/1.3.0")) == list(
            contents(root / "patches/1.2.3")
        )
        assert "\nhook other 5\n" in solved.ported()
        assert "\nhook 15\n" in solved.ported()
    assert kills > 10
    assert cli.main(root, ["lint"]) == 0
    assert list((root / "build").iterdir()) == []


def test_giving_up_tells_what_a_killed_run_has_written(
    solved, killed_everywhere, capsys
):
    root = solved.root
    pinned = root / "patches/upstream.toml"

    def wanted(event: str, args: tuple) -> bool:
        return event == "os.rename" and str(args[1]) == str(pinned)

    for _ in killed_everywhere(
        root, wanted, lambda: cli.main(root, ["rebase", "--continue"])
    ):
        assert cli.main(root, ["rebase", "--abort"]) == 0
        assert "Given up; not committed: patches/1.3.0." in capsys.readouterr().out
        break
    assert not solved.folder.exists()
    assert pins.versions(root) == ["1.2.3"]


@pytest.fixture
def ported(conflicting) -> Rebase:
    """The conflict is solved and the new stack committed."""
    with pytest.raises(rebase.Conflict):
        conflicting.start()
    conflicting.solve("hook 5", "hook other 5")
    conflicting.resume()
    conflicting.commit()
    return conflicting


def change(rebase: Rebase, make_patch, name: str, new: str) -> None:
    line, subject = TWO[name]
    rebase.project.write(f"patches/1.2.3/{name}", make_patch(line, new, subject))
    rebase.commit()


def test_a_conflict_that_was_solved_stays_solved(ported, make_patch):
    change(ported, make_patch, "misc-a-2nd-one.patch", "better 15")

    assert ported.start() == []
    assert "\nhook other 5\n" in ported.ported()
    assert "\nbetter 15\n" in ported.ported()


def test_a_new_conflict_is_solved_once_for_all_patches(ported, make_patch):
    change(ported, make_patch, "core-add-a-hook.patch", "better 5")
    with pytest.raises(rebase.Conflict, match=r"^core-add-a-hook\.patch"):
        ported.start()
    ported.solve("better 5", "better other 5")

    assert ported.resume() == []
    assert "\nbetter other 5\n" in ported.ported()
    assert "\nhook 15\n" in ported.ported()


def test_without_the_history_the_stack_is_replayed(ported, make_patch):
    """The change since then is not known; all of it is merged again."""
    text = (ported.root / "patches/1.3.0/series").read_text()
    ported.project.write("patches/1.3.0/series", text.replace("stack ", "stack f", 1))
    ported.commit()

    with pytest.raises(rebase.Conflict):
        ported.start()


def test_a_conflict_may_be_solved_by_changing_nothing(ported, make_patch):
    """The patches behind it meet the same conflict, and git solves it alike."""
    change(ported, make_patch, "core-add-a-hook.patch", "better 5")
    before = ported.ported()
    with pytest.raises(rebase.Conflict):
        ported.start()
    git(ported.folder, "checkout", "--ours", "vllm/engine.py")
    git(ported.folder, "add", "vllm/engine.py")

    assert ported.resume() == []
    assert ported.ported() == before


def test_a_patch_that_only_the_release_had_is_kept_as_a_copy(
    ported, make_patch, capsys
):
    """It goes where the history of the stack is not known."""
    own = ported.project.root / "patches/1.3.0/core-mend-it.patch"
    text = make_patch(1, "mended", "[Core] Mend it").replace(
        "vllm/engine.py", "vllm/other.py"
    )
    own.write_text(text)
    listing = own.with_name("series")
    listing.write_text(
        listing.read_text().replace("stack ", "stack f", 1) + f"{own.name}\n"
    )
    ported.commit()
    with pytest.raises(rebase.Conflict):
        ported.start()
    ported.solve("hook 5", "hook other 5")

    assert ported.resume() == []
    assert not own.exists()
    copy = ported.root / "build/removed/patches/1.3.0" / own.name
    assert copy.read_text() == text
    assert f"removed patches/1.3.0/{own.name}" in capsys.readouterr().out


def test_what_changed_meanwhile_is_not_undone(ported, make_patch):
    change(ported, make_patch, "core-add-a-hook.patch", "better 5")
    with pytest.raises(rebase.Conflict):
        ported.start()
    path = ported.root / "patches/1.3.0/misc-a-2nd-one.patch"
    path.write_text(path.read_text().replace("hook 15", "fixed 15"))
    ported.commit()
    ported.solve("better 5", "better other 5")

    with pytest.raises(StackError, match="has changed since the rebase began"):
        ported.resume()
    assert "\nhook other 5\n" in ported.ported()
    assert "\nfixed 15\n" in ported.ported()


def test_what_is_under_way_is_not_lost(conflicting):
    with pytest.raises(rebase.Conflict):
        conflicting.start()
    before = contents(conflicting.folder)

    with pytest.raises(StackError, match=r"A rebase to 1\.3\.0 is under way"):
        conflicting.start()
    assert contents(conflicting.folder) == before


def test_a_stack_that_does_not_hold_is_not_written(moved):
    before = contents(moved.root / "patches")
    repository = rebase.start(moved.root, moved.project.base, "1.3.0")

    assert moved.advance(repository, ("it is broken.",)) == ["it is broken."]
    assert contents(moved.root / "patches") == before

    # Mended by a patch that only this release has.
    (moved.folder / "vllm/other.py").write_text("mended\n")
    git(moved.folder, "commit", "--all", "--message=[Core] Mend it")
    assert moved.resume() == []
    own = series.load(moved.root / "patches/1.3.0")
    assert [patch.name for patch in own] == [*TWO, "core-mend-it.patch"]


def test_only_the_branch_becomes_the_stack(moved):
    before = contents(moved.root / "patches")
    repository = rebase.start(moved.root, moved.project.base, "1.3.0")
    moved.advance(repository, ("it is broken.",))
    git(moved.folder, "checkout", "--quiet", "--detach", "HEAD~1")

    with pytest.raises(StackError, match="not on the branch stack"):
        moved.resume()
    assert contents(moved.root / "patches") == before


def test_an_update_keeps_what_is_the_releases_own(moved, make_patch):
    repository = rebase.start(moved.root, moved.project.base, "1.3.0")
    moved.advance(repository, ("it is broken.",))
    (moved.folder / "vllm/other.py").write_text("mended\n")
    git(moved.folder, "commit", "--all", "--message=[Core] Mend it")
    moved.resume()
    moved.commit()
    own = (moved.root / "patches/1.3.0/core-mend-it.patch").read_bytes()

    # One patch gone, one changed, one new.
    moved.project.write("patches/1.2.3/series", "")
    (moved.root / "patches/1.2.3/misc-a-2nd-one.patch").unlink()
    for name, line, new, subject in (
        ("core-add-a-hook.patch", 5, "hook 5 b", "[Core] Add a hook"),
        ("misc-a-3rd-one.patch", 12, "hook 12", "[Misc] A 3rd one"),
    ):
        moved.project.add_patch(name, make_patch(line, new, subject))
    moved.commit()
    assert moved.start() == []

    names = [patch.name for patch in series.load(moved.root / "patches/1.3.0")]
    assert sorted(names) == [
        "core-add-a-hook.patch",
        "core-mend-it.patch",
        "misc-a-3rd-one.patch",
    ]
    assert (moved.root / "patches/1.3.0/core-mend-it.patch").read_bytes() == own
    ported = moved.ported()
    assert "\nhook 5 b\n" in ported and "\nhook 12\n" in ported
    assert "\nline 15\n" in ported


def test_what_the_release_has_already_is_left_out(two):
    two.released = two.engine.replace("line 5\n", "hook 5\n")
    two.release(two.released)
    two.commit()

    assert two.start() == []
    assert two.state.dropped == ["core-add-a-hook.patch"]
    names = [patch.name for patch in series.load(two.root / "patches/1.3.0")]
    assert names == ["misc-a-2nd-one.patch"]


def test_a_file_of_ours_that_the_release_ships_is_replaced(moved):
    moved.project.write("vllm/other.py", "ours\n")
    moved.start()

    assert pins.load_base(moved.root, "1.3.0").replaces == {"vllm/other.py"}


@pytest.mark.parametrize("version", ["1.3", "1.3.0.0"])
def test_a_release_has_one_name(moved, version):
    moved.start(version)
    moved.commit()
    assert pins.versions(moved.root) == ["1.2.3", "1.3.0"]

    moved.start(version)
    assert pins.versions(moved.root) == ["1.2.3", "1.3.0"]
    assert not (moved.root / "patches" / version).exists()


@pytest.mark.parametrize(
    ("version", "reason"),
    [
        (
            "9.9.9",
            r"No package index has .* vLLM 9\.9\.9; .* 1\.2\.3, 1\.3\.0",
        ),
        ("newest", "'newest' is no version of vLLM"),
        ("1.2.3", "cannot be rebased onto itself"),
        ("1.2.3.0", "cannot be rebased onto itself"),
    ],
)
def test_a_release_that_cannot_be(moved, version, reason):
    with pytest.raises(StackError, match=reason):
        moved.start(version)
    assert not (moved.root / "build").exists()


def test_a_release_whose_sdist_is_damaged(moved):
    (sdist,) = moved.project.index.glob("*1.3.0.tar.gz")
    sdist.write_bytes(sdist.read_bytes()[:-200])

    with pytest.raises(StackError, match="is no sound source distribution"):
        moved.start()


@pytest.mark.parametrize(
    ("engine", "lacking"),
    [
        ("def other():\n    return 1\n", r"run of vllm/engine\.py\."),
        (None, r"vllm/engine\.py\."),
    ],
)
def test_a_release_without_what_is_hooked(project, make_patch, engine, lacking):
    """The function that the patch changes, or its file, is not there."""
    body = "".join(f"    line_{n} = 1\n" for n in range(2, 21))
    project.upstream["vllm/engine.py"] = f"def run():\n{body}"
    project.release("1.2.3", project.upstream)
    project.pin()
    lines = make_patch().replace(" line ", "     line_").replace("-line ", "-    line_")
    lines = lines.replace("+hook", "+    hook = 1").splitlines()
    start = next(n for n, line in enumerate(lines) if line.startswith("@@")) + 1
    lines[start:] = [x if " = 1" in x else f"{x} = 1" for x in lines[start:]]
    project.add_patch("core-add-a-hook.patch", "\n".join(lines) + "\n")
    files = project.upstream | {"vllm/engine.py": engine}
    project.release("1.3.0", {k: v for k, v in files.items() if v is not None})

    with pytest.raises(
        StackError, match=rf"1\.3\.0, which lacks what it hooks into: {lacking}"
    ):
        rebase.start(project.root, project.base, "1.3.0")
    assert not (project.root / "build").exists()


def test_a_helper_that_a_release_lacks_is_told_before_the_merge(conflicting, capsys):
    project = conflicting.project
    files = project.upstream | {"vllm/engine.py": conflicting.released}
    project.release("1.3.0", files)
    project.upstream["vllm/other.py"] = "def helper(n):\n    return n\n"
    project.release("1.2.3", project.upstream)
    project.pin()
    project.write("vllm/arena.py", "from vllm.other import helper\n")
    conflicting.commit()

    with pytest.raises(rebase.Conflict):
        conflicting.start()
    assert "vLLM 1.3.0: vllm/other.py: helper(n) is not there." in (
        capsys.readouterr().err
    )


def test_an_index_that_cannot_be_reached(moved, monkeypatch):
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    # No server listens there.
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")

    with pytest.raises(StackError, match="index"):
        moved.start()
    assert not (moved.root / "build").exists()


def test_changes_that_would_be_overwritten(moved):
    moved.project.write("patches/1.3.0/series", "# mine\n")

    with pytest.raises(StackError, match=r"patches/1\.3\.0 has changes"):
        moved.start()
    assert not (moved.root / "build").exists()


@pytest.mark.parametrize("verb", ["apply", "export", "lint", "verify"])
def test_an_empty_version_is_no_default(moved, capsys, verb):
    assert cli.main(moved.root, [verb, "--base", ""]) == 1
    assert "pins no base ''" in capsys.readouterr().err


def test_the_command_line_says_how_to_go_on(conflicting, capsys):
    code = cli.main(conflicting.root, ["rebase", "--to", "1.3.0"])

    assert code == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: core-add-a-hook.patch conflicts in")
    assert "rebase --continue" in error and "rebase --abort" in error

    assert cli.main(conflicting.root, ["rebase", "--abort"]) == 0
