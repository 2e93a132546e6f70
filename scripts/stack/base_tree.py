# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The fork of another base than the installed one, to run in the same environment.

A folder that Python finds before the installed fork. From the base's CPU wheel it is
all of vLLM; where there is none, from the sdist, it lacks the compiled parts, which
the queue does without.
"""

import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from . import editable, fetch, lock, pins, target
from .errors import StackError
from .fork import Fork

OPTION = "--base"


@dataclass(frozen=True)
class BaseTree:
    base: pins.Base
    path: Path | None
    """None for the installed one."""
    is_complete: bool

    def use(self) -> None:
        """Let this process and those it starts import vLLM from the tree."""
        if self.path is not None:
            sys.path.insert(0, str(self.path))
            inherited = os.environ.get("PYTHONPATH")
            paths = [str(self.path), *([inherited] if inherited else [])]
            os.environ["PYTHONPATH"] = os.pathsep.join(paths)


def make(root: Path, version: str | None) -> BaseTree:
    """Return the tree of a base, made or brought up to date."""
    record = pins.load_base(root)
    base = pins.load_base(root, version)
    if base.version == record.version:
        return BaseTree(record, None, True)
    wanted = target.detect()
    if wanted.device != "cpu":
        raise StackError(
            f"{OPTION} runs another base with the CPU build of vLLM {record.version} "
            "only."
        )
    is_complete = (wanted.device, wanted.machine) in base.wheels
    if is_complete:
        fork = Fork.load(root, base, wanted)
    else:
        sdist = {(wanted.device, wanted.machine): base.sdist}
        fork = Fork.load(root, replace(base, wheels=sdist), wanted)
    path = root / "build" / f"base-{base.version}"
    file = fetch.fetch(fork.distribution)
    path.parent.mkdir(exist_ok=True)
    with lock.alone(path.parent, "another run that makes such a tree"):
        try:
            editable.sync(fork, file, path)
        except StackError:
            editable.create(fork, file, path)
    return BaseTree(base, path, is_complete)


def split_option(argv: list[str]) -> tuple[str | None, list[str]]:
    """Take `--base V` out of the arguments."""
    rest = list(argv)
    for i, arg in enumerate(rest):
        name, _, value = arg.partition("=")
        if name == OPTION:
            del rest[i]
            if not value:
                if "=" in arg or i == len(rest):
                    raise StackError(f"{OPTION} needs a version, as in 0.32.0.")
                value = rest.pop(i)
            if any(arg.partition("=")[0] == OPTION for arg in rest):
                raise StackError(f"{OPTION} can be given once.")
            return value, rest
    return None, rest
