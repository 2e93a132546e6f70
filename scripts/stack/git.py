# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""git, without what the user's or the machine's configuration would change."""

import os
import subprocess
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
)


class Git:
    def __init__(self, folder: Path):
        self.folder = folder

    def __call__(
        self, *args: str, stdin: str | None = None, env: dict[str, str] | None = None
    ) -> str:
        """Run git in the folder and return what it prints."""
        command = ["git", *(o for s in SETTINGS for o in ("-c", s)), *args]
        clean = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
        clean |= {
            "GIT_CONFIG_GLOBAL": os.devnull,
            "GIT_CONFIG_NOSYSTEM": "1",
            "LC_ALL": "C.UTF-8",
        }
        try:
            # Bytes: text mode would change the CRs that a patch may hold.
            done = subprocess.run(
                command,
                cwd=self.folder,
                env=clean | (env or {}),
                input=None if stdin is None else stdin.encode(),
                capture_output=True,
            )
        except OSError as e:
            raise StackError(f"git cannot be run in {self.folder}: {e}.") from e
        if done.returncode:
            why = done.stderr.decode(errors="replace").strip().splitlines()
            raise StackError(
                f"git {args[0]} failed in {self.folder}: "
                f"{why[0] if why else 'no reason given'}"
            )
        return done.stdout.decode()
