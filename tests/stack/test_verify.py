# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from stack import checkout, fetch, pins, releases, series, verify
from stack.overlay import Overlay

ROOT = Path(__file__).resolve().parents[2]
ARENA = "vllm.distributed.device_communicators.shm_tensor_arena"
QUEUE = "vllm/distributed/device_communicators/shm_broadcast.py"


@pytest.mark.parametrize("version", pins.versions(ROOT))
def test_the_real_stacks_hold(version):
    assert verify.problems(ROOT, pins.load_base(ROOT, version)) == []


def test_the_real_stacks_are_of_one_age():
    """A change of the base of record's stack is carried to the others."""
    record = pins.load_base(ROOT)
    current = series.Source(
        record.version, series.stack_hash(series.load(record.patches))
    )
    behind = [
        version
        for version in pins.versions(ROOT)
        if version != record.version
        and series.source(ROOT / "patches" / version) != current
    ]

    assert behind == [], "`scripts/fork rebase --to` each of them"


@pytest.fixture
def real(tmp_path):
    """The base of record with its stack, to change in a checkout of its queue."""
    record = pins.load_base(ROOT)
    folder = tmp_path / "checkout"
    touched = series.touched(series.load(record.patches))
    nothing = Overlay(ROOT, {})
    checkout.create(
        record, fetch.fetch(record.sdist), folder, nothing, touched.__contains__
    )
    git = checkout.opened(folder)

    def commit(change: Callable[[str], str]) -> pins.Base:
        path = folder / QUEUE
        path.write_text(change(path.read_text()))
        git("commit", "--all", "--message=[Core] Break it", env=checkout.TOOL)
        patches = checkout.patches_of(git, checkout.BASE_TAG, nothing)
        checkout.replace_patches(tmp_path / record.version, patches, None)
        return replace(record, patches=tmp_path / record.version)

    return commit


def test_what_the_flag_changes_although_it_is_off_is_found(real):
    base = real(
        lambda text: text.replace(
            "        dispatch_table[torch.Tensor] = _reduce_tensor\n",
            f"        import {ARENA}\n",
        )
    )

    found = verify.problems(ROOT, base)
    start = f"vLLM {base.version}: "
    assert f"{start}{ARENA} is imported with the flag off." in found
    assert (
        f"{start}with the flag off a small tensor is not sent as the base sends it."
        in found
    )


class Api:
    """A made-up base whose functions are Python's, and a patch of one."""

    BEFORE = "def call(a, b=1):\n    return a\n\n\ndef other():\n    pass\n"

    def __init__(self, project, tmp_path):
        self.project = project
        self.folder = tmp_path / "api"
        project.upstream["vllm/api.py"] = self.BEFORE
        for version in ("1.2.3", "1.3.0"):
            project.release(version, project.upstream)
        project.pin()

    def commit(self, text: str, subject: str = "[Core] Add a hook") -> pins.Base:
        """Make the base's stack one patch that gives the file the text."""
        base = self.project.base
        sdist = fetch.fetch(base.sdist)
        checkout.create(base, sdist, self.folder, self.project.overlay)
        (self.folder / "vllm/api.py").write_text(text)
        git = checkout.opened(self.folder)
        git("commit", "--all", f"--message={subject}", env=checkout.TOOL)
        checkout.export(base, self.folder, self.project.overlay)
        return base


@pytest.fixture
def api(project, tmp_path) -> Api:
    return Api(project, tmp_path)


def test_a_stack_that_holds(api):
    base = api.commit(api.BEFORE.replace("pass", "call(1)"))

    assert verify.problems(api.project.root, base) == []


def test_a_module_that_cannot_be_imported(api):
    base = api.commit(api.BEFORE + "import gone\n")

    (problem,) = verify.problems(api.project.root, base)
    assert problem.startswith("vLLM 1.2.3: vllm/api.py cannot be imported:")
    assert "No module named 'gone'" in problem


def test_a_module_that_is_deleted_is_missed(api):
    """By a module that the patches change; the base's tree has it still."""
    project = api.project
    project.upstream["vllm/user.py"] = "import vllm.other\n"
    project.release("1.2.3", project.upstream)
    project.pin()
    checkout.create(
        project.base, fetch.fetch(project.base.sdist), api.folder, project.overlay
    )
    git = checkout.opened(api.folder)
    (api.folder / "vllm/other.py").unlink()
    (api.folder / "vllm/user.py").write_text("import vllm.other\nuser = 1\n")
    git("commit", "--all", "--message=[Core] It", env=checkout.TOOL)
    checkout.export(project.base, api.folder, project.overlay)

    (problem,) = verify.problems(project.root, project.base)
    assert "vllm/user.py cannot be imported" in problem
    assert "'vllm.other', which a patch deletes" in problem


def test_a_patch_that_is_not_python(api):
    base = api.commit(api.BEFORE + "call(\n")

    (problem,) = verify.problems(api.project.root, base)
    assert problem.startswith("vLLM 1.2.3: ")
    assert "SyntaxError" in problem or "not valid Python" in problem


def test_a_summary_that_was_edited_by_hand(api):
    base = api.commit(api.BEFORE.replace("pass", "call(1)"))
    path = base.patches / "core-add-a-hook.patch"
    path.write_text(path.read_text().replace("1 insertion(+)", "2 insertions(+)"))

    (problem,) = verify.problems(api.project.root, base)
    assert "core-add-a-hook.patch is not what a checkout of it exports" in problem


def test_a_patch_that_does_not_apply(api):
    api.commit(api.BEFORE.replace("pass", "call(1)"))
    api.project.upstream["vllm/api.py"] = "#\n" + api.BEFORE
    api.project.release("1.2.3", api.project.upstream)
    api.project.pin()

    (problem,) = verify.problems(api.project.root, api.project.base)
    assert "1.2.3: core-add-a-hook.patch does not apply to vllm/api.py" in problem


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("other()", "other(new)", "other is (new), where () is relied on"),
        ("def other", "def another", "other() is not there"),
        # The overlay calls it.
        ("b=1", "b=2", "call is (a, b=2), where (a, b=1) is relied on"),
    ],
)
def test_a_function_that_is_not_as_it_was(api, old, new, problem):
    project = api.project
    project.write("vllm/arena.py", "from vllm.api import call\n\ncall(1)\n")
    api.commit(api.BEFORE.replace("pass", "call(1)"))
    text = project.upstream["vllm/api.py"].replace(old, new)
    project.release("1.3.0", project.upstream | {"vllm/api.py": text})
    target = releases.find(project.root, "1.3.0")
    patch = (project.base.patches / "core-add-a-hook.patch").read_text()
    checkout.replace_patches(
        target.patches, {"core-add-a-hook.patch": patch.replace(old, new)}, None
    )

    (found,) = verify.problems(project.root, target)
    assert found == f"vLLM 1.3.0: vllm/api.py: {problem}."
