# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
import pytest

from stack import series
from stack.errors import StackError
from stack.series import Patch

MESSAGE = "From 0\nSubject: [PATCH] It\n\nWhy.\n---\n\n"


def test_what_is_no_text_is_named(project):
    project.add_patch("one.patch", "")
    (project.base.patches / "one.patch").write_bytes(b"\xff")

    with pytest.raises(StackError, match=r"one\.patch is no text in UTF-8"):
        series.load(project.base.patches)


def patch_of(diff: str, path: str = "a.py", kind: str = "") -> Patch:
    old, new = f"a/{path}", f"b/{path}"
    header = f"diff --git {old} {new}\n"
    if kind:
        header += f"{kind} file mode 100644\n"
    old = "/dev/null" if kind == "new" else old
    new = "/dev/null" if kind == "deleted" else new
    return Patch("it.patch", f"{MESSAGE}{header}--- {old}\n+++ {new}\n{diff}")


def apply(patch: Patch, text: bytes | None, path: str = "a.py"):
    return series.apply([patch], {path: text}.get)


def test_edits_follow_the_order_of_the_series(project, make_patch):
    project.add_patch("one.patch", make_patch(new="first"))
    project.add_patch("two.patch", make_patch(old="first", new="second"))

    edits = series.apply(project.patches, lambda path: project.upstream[path].encode())

    assert list(edits) == ["vllm/engine.py"]
    lines = edits["vllm/engine.py"].decode().splitlines()
    assert [line for line in lines if not line.startswith("line ")] == ["second"]
    assert lines[9] == "second"


def test_lines_that_stand_elsewhere_are_no_match(project, make_patch):
    project.add_patch("off.patch", make_patch(at=8))

    with pytest.raises(StackError, match=r"off\.patch does not apply .* lines at 8"):
        series.apply(project.patches, lambda path: project.upstream[path].encode())


def test_other_context_is_no_match(project, make_patch):
    project.add_patch("fuzz.patch", make_patch().replace(" line 13\n", " line 14\n"))

    with pytest.raises(StackError, match=r"fuzz\.patch does not apply"):
        series.apply(project.patches, lambda path: project.upstream[path].encode())


def test_carriage_returns_are_no_match():
    patch = patch_of("@@ -1 +1 @@\n-a\n+b\n")

    with pytest.raises(StackError, match="patch shows, but for carriage returns"):
        apply(patch, b"a\r\n")


def test_a_hunk_whose_new_lines_are_misnumbered():
    patch = patch_of("@@ -2 +3 @@\n-a\n+b\n")

    with pytest.raises(StackError, match="misnumbered"):
        apply(patch, b"x\na\n")


def test_a_hand_edited_hunk_header_is_not_a_valid_patch():
    patch = patch_of("@@ -1,5 +1,5 @@\n-a\n+b\n")

    with pytest.raises(StackError, match=r"it\.patch is not a valid patch"):
        apply(patch, b"a\n")


@pytest.mark.parametrize(
    "diff",
    [
        "@@ -1 +1,2 @@\n a\n+b\n+c\n",
        "@@ -1 +1,3 @@\n a\n+b\n",
        "@@ -1,2 +1,3 @@\n a\n+b\n c\n-d\n@@ -9 +10 @@\n-x\n+y\n",
        "@@ -1 @@\n-a\n+b\n",
    ],
)
def test_no_line_is_left_out_that_a_header_does_not_count(diff):
    with pytest.raises(StackError, match=r"is not a valid patch: its hunk @@ -1"):
        apply(patch_of(diff), b"a\nc\nd\n")


def test_a_patch_of_carriage_returns_is_told(make_patch):
    text = make_patch().replace("\n", "\r\n")

    with pytest.raises(StackError, match=r"^it\.patch has carriage returns"):
        apply(Patch("it.patch", text), b"")


@pytest.mark.parametrize(
    ("diff", "before", "after"),
    [
        ("@@ -1 +1,2 @@\n a\n+b\n", b"a\n", b"a\nb\n"),
        ("@@ -1,0 +2 @@\n+b\n", b"a\nc\n", b"a\nb\nc\n"),
        ("@@ -1,2 +1 @@\n a\n-b\n", b"a\nb\n", b"a\n"),
        ("@@ -1 +1 @@\n-a\n+b\n", b"a\nx\x0cy\n", b"b\nx\x0cy\n"),
        (
            "@@ -1 +1 @@\n-a\n\\ No newline at end of file\n+b\n",
            b"a",
            b"b\n",
        ),
        ("@@ -1 +1 @@\n-a\n+b\n\\ No newline at end of file\n", b"a\n", b"b"),
        ("@@ -1 +1 @@\n-a\n+b\n@@ -3 +3 @@\n-c\n+d\n", b"a\nx\nc\n", b"b\nx\nd\n"),
    ],
)
def test_the_kinds_of_hunks(diff, before, after):
    assert apply(patch_of(diff), before) == {"a.py": after}


def test_a_new_and_a_deleted_file():
    new = patch_of("@@ -0,0 +1 @@\n+a\n", kind="new")
    deleted = patch_of("@@ -1 +0,0 @@\n-a\n", kind="deleted")

    assert apply(new, None) == {"a.py": b"a\n"}
    assert apply(deleted, b"a\n") == {"a.py": None}


def test_a_new_file_that_the_base_has():
    new = patch_of("@@ -0,0 +1 @@\n+a\n", kind="new")

    with pytest.raises(StackError, match="already has a file"):
        apply(new, b"")


def test_an_edit_of_a_file_that_the_base_lacks():
    with pytest.raises(StackError, match="no such file"):
        apply(patch_of("@@ -1 +1 @@\n-a\n+b\n"), None)


def test_a_patch_that_changes_nothing_is_refused():
    with pytest.raises(StackError, match="changes no file"):
        series.apply([Patch("it.patch", MESSAGE)], lambda path: None)


def test_paths_that_are_not_wanted_are_left_out():
    patch = patch_of("@@ -1 +1 @@\n-a\n+b\n", path="tests/a.py")

    edits = series.apply([patch], lambda path: None, lambda path: False)

    assert edits == {}


def test_a_listed_patch_that_is_missing(project):
    project.write("patches/1.2.3/series", "gone.patch\n")

    with pytest.raises(StackError, match=r"gone\.patch"):
        series.load(project.base.patches)
