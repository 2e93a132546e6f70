# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""git, without what the user's or the machine's configuration would change."""

import os
import re
import subprocess
from functools import cache
from pathlib import Path

from .errors import StackError

# Line ends and attributes decide what a diff looks like; signing or hooks
# would ask questions or add lines.
SETTINGS = (
    "core.autocrlf=false",
    "core.attributesFile=/dev/null",
    "core.hooksPath=/dev/null",
    "core.quotePath=true",
    "commit.gpgSign=false",
    "i18n.commitEncoding=UTF-8",
    "i18n.logOutputEncoding=UTF-8",
    "advice.mergeConflict=false",
    "diff.suppressBlankEmpty=false",
    "diff.orderFile=/dev/null",
    "format.coverLetter=false",
    "format.from=false",
    "format.signOff=false",
    "merge.conflictStyle=diff3",
    "rerere.enabled=true",
    "rerere.autoUpdate=true",
    # A checkout is made again at will: speed is worth more than safety.
    "core.fsync=none",
    "core.compression=1",
    "gc.auto=0",
    # Whoever turns it off for speed would not be told of files that would be lost.
    "status.showUntrackedFiles=normal",
)

# What git leaves in .git while an operation waits for the user, and its name.
_UNDER_WAY = {
    "rebase-merge": "rebase",
    "rebase-apply": "am",
    "CHERRY_PICK_HEAD": "cherry-pick",
    "REVERT_HEAD": "revert",
    "MERGE_HEAD": "merge",
}


# What the user says of files and folders, and not of how git works: whose he trusts (in
# a container, a mounted repository is another user's), and what he never commits.
USERS = ("safe.directory", "core.excludesFile")


@cache
def _users() -> list[str]:
    found = []
    for key in USERS:
        command = ["git", "config", "--type=path", "--get-all", key]
        done = subprocess.run(command, cwd="/", capture_output=True, text=True)
        found += [f"{key}={value}" for value in done.stdout.splitlines()]
    return found


class Git:
    def __init__(self, folder: Path):
        self.folder = folder

    def __call__(
        self,
        *args: str,
        stdin: bytes | None = None,
        env: dict[str, str] | None = None,
    ) -> str:
        """Run git in the folder and return what it prints."""
        try:
            return self.raw(*args, stdin=stdin, env=env).decode()
        except UnicodeDecodeError:
            raise StackError(
                f"git {args[0]} in {self.folder} gives what is not UTF-8."
            ) from None

    def raw(
        self,
        *args: str,
        stdin: bytes | None = None,
        env: dict[str, str] | None = None,
    ) -> bytes:
        """Run git in the folder and return the bytes it prints."""
        settings = (*SETTINGS, *_users())
        command = ["git", *(o for s in settings for o in ("-c", s)), *args]
        clean = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
        clean |= {
            "GIT_CONFIG_GLOBAL": os.devnull,
            "GIT_CONFIG_NOSYSTEM": "1",
            "LC_ALL": "C.UTF-8",
        }
        try:
            done = subprocess.run(
                command,
                cwd=self.folder,
                env=clean | (env or {}),
                input=stdin,
                capture_output=True,
            )
        except OSError as e:
            raise StackError(f"git cannot be run in {self.folder}: {e}.") from e
        if done.returncode:
            why = done.stderr.decode(errors="replace").strip().splitlines()
            if lock := re.search(r"Unable to create '(.*\.lock)'", "".join(why[:1])):
                raise StackError(
                    f"Another git works in {self.folder}, or one was killed there: if "
                    f"none does, remove {lock[1]}."
                )
            raise StackError(
                f"git {args[0]} failed in {self.folder}: "
                f"{why[0] if why else 'no reason given'}"
            )
        return done.stdout

    def get(self, *args: str) -> str:
        """Return what git prints, without line ends; "" where it fails."""
        try:
            return self(*args).strip()
        except StackError:
            return ""

    def operation(self) -> str | None:
        """Return the name of the git operation that waits for the user."""
        for file, name in _UNDER_WAY.items():
            if (self.folder / ".git" / file).exists():
                return name
        return None

    def changed_paths(self, commit: str) -> list[str]:
        listing = self(
            *("diff-tree", "--no-commit-id", "--name-only", "--no-renames"),
            *("-r", "-z", commit),
        )
        return [path for path in listing.split("\0") if path]

    def blob(self, commit: str, path: str) -> bytes | None:
        """Return the file's content in the commit, None where it has none."""
        if not self.get("ls-tree", commit, "--", path):
            return None
        return self.raw("show", f"{commit}:{path}")
