# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The build backend: makes the fork's wheel from a pinned upstream wheel.

pip calls the functions below (PEP 517 and 660); `pyproject.toml` names this
file as the backend.
"""

import sys
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "scripts"))

# Before any import of the tooling, which older releases of Python cannot read.
if sys.version_info < (3, 11):  # noqa: UP036
    raise SystemExit(
        "The fork needs Python 3.11 or newer, this is "
        f"{sys.version_info[0]}.{sys.version_info[1]}."
    )


@contextmanager
def _plain_errors():
    from stack.errors import StackError

    try:
        yield
    except StackError as e:
        # pip shows what the backend printed: the sentence, without a traceback.
        raise SystemExit(f"error: {e}") from None


def _fork():
    from stack import pins, target
    from stack.fork import Fork

    return Fork.load(ROOT, pins.load_base(ROOT), target.detect())


def get_requires_for_build_wheel(config_settings=None):
    return []


get_requires_for_build_editable = get_requires_for_build_wheel


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    with _plain_errors():
        from stack import fetch, wheel

        fork = _fork()
        base = fetch.fetch(fork.distribution)
        return wheel.build(fork, base, Path(wheel_directory))


def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    with _plain_errors():
        from stack import editable, fetch, wheel

        fork = _fork()
        base = fetch.fetch(fork.distribution)
        tree = editable.tree_path(ROOT)
        editable.create(fork, base, tree)
        return wheel.build_editable(fork, base, tree, Path(wheel_directory))


def build_sdist(sdist_directory, config_settings=None):
    raise SystemExit(
        "error: The fork has no source distribution: it is built from a clone of "
        "its repository, with `pip wheel .` or `python -m build --wheel`."
    )


if __name__ == "__main__":
    raise SystemExit("setup.py is a build backend: run `pip install .` instead.")
