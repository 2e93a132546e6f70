# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Check that the given files begin with vLLM's two SPDX lines."""

import sys
from pathlib import Path

HEADER = [
    "# SPDX-License-Identifier: Apache-2.0",
    "# SPDX-FileCopyrightText: Copyright contributors to the vLLM project",
]


def has_header(text: str) -> bool:
    # A shebang or a directive for shellcheck may have to come first.
    lines = [
        line
        for line in text.splitlines()
        if not line.startswith(("#!", "# shellcheck "))
    ]
    return lines[:2] == HEADER


def main() -> int:
    bad = [name for name in sys.argv[1:] if not has_header(Path(name).read_text())]
    for name in bad:
        print(f"{name}: does not begin with the SPDX lines.")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
