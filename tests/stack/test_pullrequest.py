# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
from pathlib import Path

import pytest

from stack import fetch, pins, pullrequest
from stack.errors import StackError
from stack.overlay import Overlay
from stack.pullrequest import Identity

ROOT = Path(__file__).resolve().parents[2]
ARENA = "[Core] Add a shared-memory tensor arena to MessageQueue"
SENDER = Identity("S Ender", "s.ender@example.org")


def create(base, overlay, folder: Path, run_tests: bool = False) -> list[str]:
    sdist = fetch.fetch(base.sdist)
    return pullrequest.create(base, sdist, folder, overlay, SENDER, run_tests)


def test_the_real_series_passes_upstreams_checks(tmp_path):
    base = pins.load_base(ROOT)

    assert create(base, Overlay.load(ROOT), tmp_path / "mails") == []

    cover, *mails = sorted((tmp_path / "mails").iterdir())
    for mail in mails:
        message = mail.read_text().partition("\ndiff --git ")[0]
        assert f"\nSigned-off-by: {SENDER.name} <{SENDER.email}>\n" in message
        assert "Upstream-Status" not in message and "Remove-When" not in message
    (arena,) = (m.read_text() for m in mails if "Add-a-shared-memory-tensor" in m.name)
    assert "+++ b/vllm/distributed/device_communicators/shm_tensor_arena.py" in arena
    # All of a file that one of them changes.
    (flag,) = (m.read_text() for m in mails if "Add-enable-shm" in m.name)
    edits = flag.split("\ndiff --git a/")
    (executor,) = (e for e in edits if e.startswith("vllm/v1/executor/multiproc"))
    assert executor.count("\n@@ -1,") == executor.count("\n@@ ") == 1
    text = cover.read_text()
    assert text.count(f"] {ARENA}\n") == 1
    assert "pytest -v -s tests/distributed/test_shm_tensor_arena.py" in text
    assert "- check_test_tethering.py: passes" in text
    assert "- ruff check: passes" in text


@pytest.fixture
def small(project, make_patch, request):
    last = getattr(request, "param", "LINE_20 = 1\n")
    lines = [f"LINE_{n} = 1\n" for n in range(1, 20)]
    project.upstream["vllm/engine.py"] = "".join(lines) + last
    project.release("1.2.3", project.upstream)
    project.pin()
    project.write(
        "patches/overlay.toml", '"core-add-a-hook.patch" = ["vllm/arena.py"]\n'
    )
    text = make_patch().replace(" line ", " LINE_").replace("-line ", "-LINE_")
    text = text.replace("+hook\n", "+HOOK = 1\n")
    lines = text.splitlines()
    start = next(n for n, line in enumerate(lines) if line.startswith("@@")) + 1
    lines[start:] = [f"{x} = 1" if " = 1" not in x else x for x in lines[start:]]
    project.add_patch("core-add-a-hook.patch", "\n".join(lines) + "\n")
    return project


def test_what_a_check_objects_to_is_told(small, tmp_path):
    small.write("vllm/arena.py", "import os\n")

    (problem,) = create(small.base, small.overlay, tmp_path / "mails")
    assert problem.startswith("ruff check: ")
    assert "vllm/arena.py" in problem and "os" in problem
    assert "- ruff check: fails" in next((tmp_path / "mails").glob("0000*")).read_text()


@pytest.mark.parametrize("small", ["LINE_20=1\n"], indirect=True)
def test_how_upstream_formats_a_file_is_not_objected_to(small, tmp_path):
    small.write("vllm/arena.py", "X = 1\n")
    assert create(small.base, small.overlay, tmp_path / "mails") == []

    small.write("vllm/arena.py", "X=1\n")
    (problem,) = create(small.base, small.overlay, tmp_path / "others")
    assert problem.startswith("ruff format: ")
    assert "vllm/arena.py" in problem and "vllm/engine.py" not in problem


@pytest.mark.parametrize(
    ("passes", "outcome"), [(True, "1 passed in"), (False, "1 failed in")]
)
def test_the_tests_result_is_in_the_cover_letter(small, tmp_path, passes, outcome):
    owned = '"core-add-a-hook.patch" = ["tests/test_arena.py"]\n'
    small.write("patches/overlay.toml", owned)
    small.write("tests/test_arena.py", f"def test_it():\n    assert {passes}\n")

    problems = create(small.base, small.overlay, tmp_path / "mails", run_tests=True)
    cover = next((tmp_path / "mails").glob("0000*")).read_text()
    assert outcome in cover
    assert [p for p in problems if p.startswith("the tests: ")] == (
        [] if passes else [next(p for p in problems if outcome in p)]
    )


def test_less_context(small, tmp_path):
    small.write("vllm/arena.py", "ARENA = 1\n")
    sdist = fetch.fetch(small.base.sdist)
    folder = tmp_path / "mails"
    pullrequest.create(small.base, sdist, folder, small.overlay, SENDER, False, 2)

    _, mail = sorted(folder.iterdir())
    assert "\n@@ -8,5 +8,5 @@" in mail.read_text()


def test_a_relative_folder(small, tmp_path, monkeypatch):
    small.write("vllm/arena.py", "ARENA = 1\n")
    monkeypatch.chdir(tmp_path)

    create(small.base, small.overlay, Path("out/mails"))
    assert len(list((tmp_path / "out/mails").iterdir())) == 2


def test_nothing_is_overwritten(small, tmp_path):
    small.write("vllm/arena.py", "ARENA = 1\n")
    (tmp_path / "mails").mkdir()
    (tmp_path / "mails/mine").touch()

    with pytest.raises(StackError, match="is in the way"):
        create(small.base, small.overlay, tmp_path / "mails")


@pytest.fixture
def home(tmp_path, monkeypatch):
    for name in ("HOME", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")
    for name in ("NAME", "EMAIL"):
        monkeypatch.delenv(f"GIT_COMMITTER_{name}", raising=False)
    monkeypatch.delenv("EMAIL", raising=False)
    return tmp_path


def test_the_sign_off_needs_an_identity(home):
    with pytest.raises(StackError, match="git does not say who you are"):
        Identity.of_user(home)

    (home / ".gitconfig").write_text("[user]\nname = S Ender\nemail = s@e.org\n")
    assert Identity.of_user(home) == Identity("S Ender", "s@e.org")


def test_the_identity_is_gits(home, monkeypatch):
    """As git takes it: here the environment comes before the files."""
    (home / ".gitconfig").write_text("[user]\nname = S Ender\nemail = s@e.org\n")
    monkeypatch.setenv("GIT_COMMITTER_NAME", "C Ommitter")
    monkeypatch.setenv("GIT_DIR", str(home / "elsewhere"))

    assert Identity.of_user(home) == Identity("C Ommitter", "s@e.org")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"[user]\nname = S\xf8lve\nemail = s@e.org\n", "is not UTF-8"),
        (b"[user\n", "bad config"),
    ],
)
def test_an_identity_that_is_no_text(home, text, reason):
    (home / ".gitconfig").write_bytes(text)

    with pytest.raises(StackError, match=reason):
        Identity.of_user(home)
