# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The stack on another release.

A repository in `build/rebase-V` holds both bases and replays the stack, patch by
patch, as three-way merges. Nothing else is touched before all of it is verified.

The first time a patch is merged onto the release as a cherry-pick would do it.
Later, when the release has a stack already, what is merged is the change of each
patch since that stack was made: a conflict that was solved once stays solved.
What the stack was made of then is looked up in this repository's history.
"""

import json
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from . import (
    checkout,
    fetch,
    interfaces,
    overlay,
    patchform,
    pins,
    releases,
    sdist,
    series,
)
from .errors import StackError
from .git import Git
from .overlay import Overlay
from .pins import Base, Distribution
from .series import Patch

# In .git of the repository: what is still to do.
STATE = "fork-rebase.json"

# No files of ours take part: the release may have some of the same name.
NO_OVERLAY = Overlay(Path(), {})


@dataclass
class Step:
    """One patch: the change from `base` to `theirs`, merged into `ours`."""

    patch: str
    message: str
    """The commit whose message and author the result gets."""
    base: str
    theirs: str
    ours: str = ""
    """"" is the result of the step before."""


@dataclass
class State:
    source: series.Source
    target: Base
    steps: list[Step]
    head: str
    """The result of the last step that is done."""
    ported: str
    """The hash of the stack that the release has already, or ""."""
    stopped: bool = False
    """Whether the first step waits for the user."""
    dropped: list[str] = field(default_factory=list)

    def save(self, git: Git) -> None:
        target = {
            "version": self.target.version,
            "sdist": asdict(self.target.sdist),
            "wheels": [[*key, asdict(w)] for key, w in self.target.wheels.items()],
            "replaces": sorted(self.target.replaces),
        }
        data = asdict(replace(self, target=None)) | {"target": target}  # type: ignore[arg-type]
        checkout.write(git.folder / ".git" / STATE, json.dumps(data).encode())

    @classmethod
    def load(cls, root: Path, git: Git) -> "State":
        try:
            return cls._of(root, json.loads((git.folder / ".git" / STATE).read_text()))
        except (ValueError, KeyError, TypeError, AttributeError):
            raise StackError(
                f"{git.folder / '.git' / STATE} is damaged, so the rebase cannot go "
                "on: `scripts/fork rebase --abort` gives it up."
            ) from None

    @classmethod
    def _of(cls, root: Path, data: dict[str, Any]) -> "State":
        target = data.pop("target")
        return cls(
            series.Source(**data.pop("source")),
            Base(
                target["version"],
                Distribution(**target["sdist"]),
                {(d, m): Distribution(**pin) for d, m, pin in target["wheels"]},
                root / "patches" / target["version"],
                frozenset(target["replaces"]),
            ),
            [Step(**step) for step in data.pop("steps")],
            **data,
        )


class Conflict(StackError):
    """A step that waits for the user."""


def folder_of(root: Path, version: str) -> Path:
    return root / "build" / f"rebase-{version}"


def start(root: Path, source: Base, version: str) -> Git:
    """Prepare the rebase of the source's stack onto the release.

    Returns:
        The repository for `advance`.

    """
    under_way = [path.name.removeprefix("rebase-") for path in folders(root)]
    if under_way:
        raise StackError(
            f"A rebase to {under_way[0]} is under way: finish it with "
            "`scripts/fork rebase --continue`, or give it up with `--abort`."
        )
    version = pins.pinned_name(root, version) or version
    if version == source.version:
        raise StackError(f"The stack of {version} cannot be rebased onto itself.")
    target = _target(root, version)
    _refuse_dirty(root, target.patches, root / "patches" / "upstream.toml")
    is_new = not target.patches.is_dir()
    if is_new and (lacking := _lacking(source, target)):
        raise StackError(
            f"The stack cannot be carried to vLLM {target.version}, which lacks what "
            f"it hooks into: {', '.join(lacking)}."
        )
    for problem in _other_helpers(root, source, target) if is_new else ():
        print(f"vLLM {target.version}: {problem}", file=sys.stderr)
    folder = folder_of(root, target.version)
    if folder.exists() or folder.is_symlink():
        raise StackError(f"{folder} is in the way, and no rebase: remove it.")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with checkout.scratch(folder.parent) as scratch:
        git = Git(scratch / "tree")
        git.folder.mkdir()
        git("init", "--quiet", f"--initial-branch={checkout.BRANCH}")
        _prepare(root, git, source, target).save(git)
        # Fails where another run has put something there meanwhile.
        git.folder.rename(folder)
    return Git(folder)


def resume(root: Path) -> Git:
    """Return the repository of the rebase that is under way."""
    return Git(_under_way(root)[0])


def abort(root: Path) -> list[str]:
    """Give up.

    Returns:
        What a run that was killed at its end may have written: paths that are not
        committed.

    """
    written = []
    for folder in _under_way(root):
        written += _dirty(
            root,
            root / "patches" / folder.name.removeprefix("rebase-"),
            root / "patches" / "upstream.toml",
        )
        _remove(folder)
    return written


def _under_way(root: Path) -> list[Path]:
    if found := folders(root):
        return found
    others = [str(path) for path in sorted((root / "build").glob("rebase-*"))]
    hint = f" {', '.join(others)} is none: remove it yourself." if others else ""
    raise StackError(f"No rebase is under way.{hint}")


def advance(root: Path, git: Git) -> State:
    """Do the steps that are left.

    Raises:
        Conflict: If one waits for the user. Nothing is lost by calling again.

    """
    state = State.load(root, git)
    while state.steps:
        step = state.steps[0]
        if not state.stopped:
            _merge(git, state, step)
        _require_solved(git, step, state.head)
        tree = git("write-tree").strip()
        if tree == git("rev-parse", f"{state.head}^{{tree}}").strip():
            state.dropped.append(step.patch)
        else:
            state.head = _commit(git, tree, state.head, step.message)
        state.steps.pop(0)
        state.stopped = False
        if not state.steps:
            # From here on the user may add and amend commits.
            git("checkout", "--quiet", "--force", "-B", checkout.BRANCH, state.head)
        state.save(git)
    return state


def finish(root: Path, git: Git, verify: Callable[[Base], list[str]]) -> list[str]:
    """Verify the new stack and, if it holds, make it the release's.

    Returns:
        The problems, one sentence each. If there are any, nothing has changed.

    """
    state = State.load(root, git)
    if under_way := git.operation():
        raise StackError(f"A git {under_way} is under way in {git.folder}.")
    checkout.require_branch(git)
    if git("status", "--porcelain", "--untracked-files=no"):
        raise StackError(f"{git.folder} has changes that are not committed.")
    patches = checkout.patches_of(git, checkout.BASE_TAG, NO_OVERLAY)
    with tempfile.TemporaryDirectory(dir=git.folder / ".git") as scratch:
        draft = replace(state.target, patches=Path(scratch, state.target.version))
        checkout.replace_patches(draft.patches, patches, state.source)
        problems = verify(draft)
    if problems:
        return problems
    if not _holds(state.target.patches, patches, state.source):
        _refuse_dirty(root, state.target.patches)
        if _hash(state.target.patches) != state.ported:
            raise StackError(
                f"patches/{state.target.version} has changed since the rebase began, "
                "and its result would undo that: `scripts/fork rebase --abort`, and "
                "begin anew."
            )
        for name in sorted(p.name for p in state.target.patches.glob("*.patch")):
            if name not in patches:
                path = f"patches/{state.target.version}/{name}"
                copy = checkout.keep(root, path)
                print(f"removed {path}; a copy is kept in {copy}")
        checkout.replace_patches(state.target.patches, patches, state.source)
    # Last: a base without its patches would trouble every verb.
    if state.target.version not in pins.versions(root):
        pins.add_base(root, state.target)
    _remove(git.folder)
    return []


def _remove(folder: Path) -> None:
    """At once: a part of it, after a kill, would be no rebase that can go on."""
    with checkout.scratch(folder.parent) as scratch:
        folder.rename(scratch / "tree")


def _holds(folder: Path, patches: dict[str, str], source: series.Source) -> bool:
    """Tell whether an earlier run, killed since, has written the patches."""
    if not folder.is_dir() or series.source(folder) != source:
        return False
    return [(p.name, p.text) for p in series.load(folder)] == list(patches.items())


def _commit(git: Git, tree: str, parent: str, like: str) -> str:
    """Return a commit of the tree, by the author and with the message of another.

    The files in the folder stay as they are: they may hold what the user has solved,
    which a run that is killed here must find again.
    """
    _, _, message = git.raw("cat-file", "commit", like).partition(b"\n\n")
    author = git("log", "-1", "--format=%an%n%ae%n@%ad", "--date=raw", like)
    names = ("GIT_AUTHOR_NAME", "GIT_AUTHOR_EMAIL", "GIT_AUTHOR_DATE")
    return git(
        *("commit-tree", tree, "-p", parent),
        stdin=message,
        env=checkout.TOOL | dict(zip(names, author.splitlines())),
    ).strip()


def folders(root: Path) -> list[Path]:
    """Return the folders of rebases under way; others of such a name are not ours."""
    return [
        path
        for path in sorted((root / "build").glob("rebase-*"))
        if not path.is_symlink() and (path / ".git" / STATE).is_file()
    ]


def _target(root: Path, version: str) -> Base:
    if version in pins.versions(root):
        return pins.load_base(root, version)
    target = releases.find(root, version)
    if target.version in pins.versions(root):
        return pins.load_base(root, target.version)
    ours = overlay.package_files(root)
    found = sdist.members(fetch.fetch(target.sdist), ours.__contains__)
    return replace(target, replaces=frozenset(name for name, *_ in found))


def _lacking(source: Base, target: Base) -> list[str]:
    patches = series.load(source.patches)
    paths = series.touched(patches)
    base = sdist.reader(fetch.fetch(source.sdist), paths)
    other = sdist.reader(fetch.fetch(target.sdist), paths)
    return interfaces.lacking(paths, base, series.apply(patches, base).get, other)


def _other_helpers(root: Path, source: Base, target: Base) -> list[str]:
    """Return what our modules call and the release has not, or has otherwise.

    No reason to refuse: a patch that only the release's stack has can add it.
    """
    ours = overlay.package_files(root)
    paths = interfaces.imports(ours)
    base = sdist.reader(fetch.fetch(source.sdist), paths)
    other = sdist.reader(fetch.fetch(target.sdist), paths)
    try:
        return list(interfaces.missing(interfaces.imported(ours, base), other))
    except StackError:
        # A release may be written for a Python newer than this one.
        return []


def _dirty(root: Path, *paths: Path) -> list[str]:
    """Return which of the paths have changes that are not committed."""
    if not (root / ".git").exists():
        return []
    return [
        path.relative_to(root).as_posix()
        for path in paths
        if Git(root)("status", "--porcelain", "--", str(path.relative_to(root)))
    ]


def _refuse_dirty(root: Path, *paths: Path) -> None:
    if dirty := _dirty(root, *paths):
        raise StackError(
            f"{' and '.join(dirty)} has changes that are not committed, and the rebase "
            "would write over them: commit them first."
        )


def _prepare(root: Path, git: Git, source: Base, target: Base) -> State:
    new = series.load(source.patches)
    ported = series.load(target.patches) if target.patches.is_dir() else []
    made_of = series.source(target.patches)
    old = None
    if made_of and made_of.version == source.version:
        old = _from_history(root, source, made_of, new)
        if old is None:
            print(
                f"What patches/{target.version} was made of is not in the history of "
                "this repository: all patches are merged anew.",
                file=sys.stderr,
            )
    wanted = None
    if old is not None:
        # What the patches touch is enough where no file can have moved.
        wanted = series.touched([*new, *old, *ported]).__contains__
    commits = {}
    for name, base, patches in (
        ("new", source, new),
        ("old", source, old or []),
        ("ported", target, ported if old is not None else []),
    ):
        commits[name] = _commits(git, name, base, patches, wanted)
    git("tag", checkout.BASE_TAG, commits["ported"][0])
    if old is None:
        steps = [
            Step(patch.name, commits["new"][k + 1], *commits["new"][k : k + 2])
            for k, patch in enumerate(new)
        ]
    else:
        steps = _update_steps(commits, new, old, ported)
    return State(
        # A stack that was rebased itself is as old as what it was made of.
        series.source(source.patches)
        or series.Source(source.version, series.stack_hash(new)),
        target,
        steps,
        head=commits["ported"][0],
        ported=_hash(target.patches),
    )


def _hash(folder: Path) -> str:
    return series.stack_hash(series.load(folder)) if folder.is_dir() else ""


def _commits(
    git: Git,
    name: str,
    base: Base,
    patches: Iterable[Patch],
    wanted: Callable[[str], bool] | None,
) -> list[str]:
    """Make a branch of the base and the patches; return its commits."""
    sdist = fetch.fetch(base.sdist)
    checkout.import_base(git, base, sdist, name, wanted or (lambda path: True))
    git("checkout", "--quiet", "--force", name)
    start = git("rev-parse", "HEAD").strip()
    checkout.add_patches(git, patches, NO_OVERLAY)
    return [start, *git("rev-list", "--reverse", f"{start}..HEAD").split()]


def _update_steps(
    commits: dict[str, list[str]],
    new: list[Patch],
    old: list[Patch],
    ported: list[Patch],
) -> list[Step]:
    """Return the steps that bring a release's stack up to date.

    A patch that only the release's stack has follows the one it followed.
    """
    old_names = [patch.name for patch in old]
    steps: list[Step] = []
    taken = 0  # of the ported patches, those that are accounted for

    def take_own() -> None:
        nonlocal taken
        while taken < len(ported) and ported[taken].name not in old_names:
            base, theirs = commits["ported"][taken : taken + 2]
            steps.append(Step(ported[taken].name, theirs, base, theirs))
            taken += 1

    take_own()
    reached = 0  # of the old patches, up to the last that the new ones so far have
    for k, patch in enumerate(new, start=1):
        message = commits["new"][k]
        if patch.name in old_names:
            at = old_names.index(patch.name)
            reached = max(reached, at + 1)
            counterpart = [p.name for p in ported]
            if (
                patch.name in counterpart
                and patch.commit_message == old[at].commit_message
            ):
                message = commits["ported"][counterpart.index(patch.name) + 1]
        before = old_names[:reached]
        for i, own in enumerate(ported):
            if own.name in before:
                taken = max(taken, i + 1)
        steps.append(
            Step(
                patch.name,
                message,
                base=commits["old"][reached],
                theirs=commits["new"][k],
                ours=commits["ported"][taken],
            )
        )
        take_own()
    # What is left was dropped from the stack, or is the release's own.
    for i, own in enumerate(ported[taken:], start=taken):
        if own.name not in old_names:
            base, theirs = commits["ported"][i : i + 2]
            steps.append(Step(own.name, theirs, base, theirs))
    return steps


def _from_history(
    root: Path, source: Base, made_of: series.Source, new: list[Patch]
) -> list[Patch] | None:
    """Return the source's stack as it was when the release's was made of it.

    None if this repository's history does not have it.
    """
    if series.stack_hash(new) == made_of.stack_sha256:
        return new
    if not (root / ".git").exists():
        return None
    git = Git(root)
    folder = f"patches/{source.version}"
    for commit in git("rev-list", "HEAD", "--", folder).split():
        listing = git.blob(commit, f"{folder}/series")
        if listing is None:
            continue
        patches = []
        for name in series.names(listing.decode(errors="replace")):
            text = git.blob(commit, f"{folder}/{name}") or b""
            patches.append(Patch(name, text.decode(errors="replace")))
        if series.stack_hash(patches) == made_of.stack_sha256:
            return patches
    return None


def _merge(git: Git, state: State, step: Step) -> None:
    git("checkout", "--quiet", "--force", "--detach", step.ours or state.head)
    # A commit of exactly this change, for git to pick.
    subject = git("log", "-1", "--format=%s", step.message).strip()
    pick = git(
        *("commit-tree", f"{step.theirs}^{{tree}}", "-p", step.base, "-m", subject),
        env=checkout.TOOL,
    ).strip()
    if git.get("diff", "--name-only", step.base, pick):
        state.stopped = True
        try:
            git("cherry-pick", "--no-commit", pick, env=checkout.TOOL)
        except StackError as e:
            # A conflict, also one that was solved before and leaves nothing to do.
            is_conflict = (
                _unmerged(git)
                or git.get("diff", "--cached", "--name-only")
                or "could not apply" in str(e)
            )
            if not is_conflict:
                raise
        state.save(git)


def _unmerged(git: Git) -> list[str]:
    listing = git("diff", "--name-only", "--diff-filter=U", "-z")
    return sorted({path for path in listing.split("\0") if path})


def _require_solved(git: Git, step: Step, head: str) -> None:
    left = _marked(git, step.ours or head)
    for path in _unmerged(git):
        file = git.folder / path
        stages = git("ls-files", "--unmerged", "--", path).split("\n")
        both_have_it = {line[48:49] for line in stages if line} >= {"2", "3"}
        if not both_have_it or not file.is_file():
            left.append(path)
    if left:
        paths = ", ".join(sorted(set(left)))
        raise Conflict(
            f"{step.patch} conflicts in {paths}. Solve it in {git.folder}, "
            "`git add` what is solved, then `scripts/fork rebase --continue`; "
            "`scripts/fork rebase --abort` gives up."
        )
    # An update merges the changes of all patches so far, each time: what was
    # solved for one must be for those after it.
    git("rerere")
    git("add", "--update")


def _marked(git: Git, before: str) -> list[str]:
    """Return the files that have markers now; `git add` takes them as well."""
    changed = git("diff", "--name-only", "--no-renames", "-z", before)
    found = []
    for path in sorted({path for path in changed.split("\0") if path}):
        diff = git.raw("diff", "--unified=0", before, "--", f":(literal){path}")
        if patchform.has_markers(diff.decode(errors="replace")):
            found.append(path)
    return found
