# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
import re
from pathlib import Path

import pytest

from stack import lint, pins
from stack.errors import StackError

ROOT = Path(__file__).resolve().parents[2]
NAME = "core-add-a-hook.patch"


def test_a_canonical_patch_is_in_order(project, make_patch):
    project.add_patch(NAME, make_patch())

    assert lint.problems(project.base.patches) == []


@pytest.mark.parametrize("version", pins.versions(ROOT))
def test_the_real_stacks_are_in_order(version):
    assert lint.problems(pins.load_base(ROOT, version).patches) == []


def test_our_real_files_belong_to_patches():
    assert lint.overlay_problems(ROOT) == []


@pytest.mark.parametrize(
    ("owners", "problem"),
    [
        (f'"{NAME}" = ["vllm/gone.py", "vllm/arena.py"]', "vllm/gone.py fits no file"),
        (f'"{NAME}" = []', "vllm/arena.py: .* names no patch that it belongs to"),
        ('"gone.patch" = ["vllm/arena.py"]', "gone.patch is no patch of the series"),
    ],
)
def test_ownership_that_does_not_fit(project, make_patch, owners, problem):
    project.add_patch(NAME, make_patch())
    project.write("vllm/arena.py", "")
    project.write("patches/overlay.toml", owners)

    (found,) = lint.overlay_problems(project.root)
    assert re.search(problem, found)


@pytest.mark.parametrize(
    "paths",
    [
        '"vllm"',
        "[3]",
        '[""]',
        '["../README.md"]',
        '["vllm/**x.py"]',
        '["/vllm/arena.py"]',
    ],
)
def test_ownership_that_is_no_list_of_paths(project, make_patch, paths):
    project.add_patch(NAME, make_patch())
    project.write("patches/overlay.toml", f'"{NAME}" = {paths}')

    with pytest.raises(StackError, match=f"has no list of paths, .* for {NAME}"):
        lint.overlay_problems(project.root)


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("From 0000", "From 1234", "commit 0"),
        ("--- a/", "index 12ab..34cd 100644\n--- a/", "index lines"),
        (" line 13\n", " line 13\n-- \n2.39.5\n", "signature"),
        (" line 13\n", " line 13\n\n", "exactly one line feed"),
        ("[PATCH]", "[PATCH 1/2]", r"begin with '\[PATCH\] '"),
        ("Add a hook", "Add hooks", r"is to be named core-add-hooks\.patch"),
        ("Date: Mon", "When: Mon", "no Date header"),
        ("Upstream-Status: not sent\n", "", "'Upstream-Status: ...'"),
        ("Remove-When: upstream has it", "Remove-When:", "'Remove-When: ...'"),
        ("Signed-off-by: A", "Seen-by: A", "'Signed-off-by: ...'"),
        ("The engine has to call us here.\n\n", "", "does not say why"),
        ("+hook\n", "+hook \n", r"line 10 of vllm/engine\.py ends with white space"),
        ("---\n vllm", "\n vllm", "no '---' line"),
        ("-7,7", "-7,8", "not a valid patch"),
        ("+hook\n", "+hook\n+more\n", "not a valid patch"),
        ("+7,7", "+8,7", r"the hunk at 7 of vllm/engine\.py is misnumbered"),
        ("+hook\n", "+line  10\n", "changes no code"),
        ("-line 10\n+hook\n", "-# line 10\n+# hook\n", "changes no code"),
        ("+hook\n", "+<<<<<<< HEAD\n", "markers of a conflict"),
        ("+hook\n", "+=======\n", "markers of a conflict"),
        (
            "--- a/",
            "old mode 100644\nnew mode 100755\n--- a/",
            "makes a file executable",
        ),
        ("-line 10\n", "-||||||| base\n", "markers of a conflict"),
        ("--- a/vllm/engine.py", "new file mode 100644\n--- /dev/null", "a new file"),
    ],
)
def test_each_fault_is_named(project, make_patch, old, new, problem):
    text = make_patch()
    assert old in text
    project.add_patch(NAME, text.replace(old, new, 1))

    found = lint.problems(project.base.patches)

    assert any(re.search(problem, sentence) for sentence in found), found


@pytest.mark.parametrize(
    ("path", "n_problems"), [("docs/engine.md", 0), ("CMakeLists.txt", 1)]
)
def test_a_headings_underline_is_no_marker(project, make_patch, path, n_problems):
    text = make_patch().replace("+hook\n", "+=======\n")
    project.add_patch(NAME, text.replace("vllm/engine.py", path))

    assert len(lint.problems(project.base.patches)) == n_problems


def test_a_layout_beside_a_hook_is_told(project, make_patch):
    text = make_patch().replace(" line 12\n", "-line 12\n+line  12\n")
    project.add_patch(NAME, text)

    (problem,) = lint.problems(project.base.patches)
    assert "the hunk at 7 of vllm/engine.py changes no code" in problem


def test_two_hunks_that_overlap(project, make_patch):
    text = make_patch()
    hunk = text[text.index("@@ -7") :]
    project.add_patch(NAME, text + hunk.replace("-7,7 +7,7", "-9,7 +9,7"))

    (problem,) = lint.problems(project.base.patches)
    assert "the hunk at 9 of vllm/engine.py is misnumbered" in problem


def test_carriage_returns_are_one_problem(project, make_patch):
    project.add_patch(NAME, make_patch().replace("\n", "\r\n"))

    (problem,) = lint.problems(project.base.patches)
    assert "has carriage returns at the ends of its lines" in problem


def test_a_blank_line_alone_is_no_hook(project, make_patch):
    text = make_patch().replace("-line 10\n+hook\n", " line 10\n+\n")
    project.add_patch(NAME, text.replace("+7,7", "+7,8"))

    (problem,) = lint.problems(project.base.patches)
    assert "changes only blank lines" in problem


def test_many_added_lines_need_a_reason(project, make_patch):
    added = "".join(f"+{n}\n" for n in range(41))
    text = make_patch().replace("+hook\n", added).replace("+7,7", "+7,47")
    project.add_patch(NAME, text)

    (problem,) = lint.problems(project.base.patches)
    assert "adds 41 lines to vllm/engine.py" in problem

    reason = "Size-Reason: a table\nSigned-off-by"
    project.write(f"patches/1.2.3/{NAME}", text.replace("Signed-off-by", reason))
    assert lint.problems(project.base.patches) == []


def test_a_patch_that_is_not_listed(project, make_patch):
    project.write(f"patches/1.2.3/{NAME}", make_patch())

    assert lint.problems(project.base.patches) == [
        f"1.2.3/{NAME}: not listed in the series."
    ]


def test_a_patch_that_is_listed_twice(project, make_patch):
    project.add_patch(NAME, make_patch())
    project.write("patches/1.2.3/series", f"{NAME}\n{NAME}\n")

    assert f"1.2.3/{NAME}: listed twice in the series." in lint.problems(
        project.base.patches
    )
