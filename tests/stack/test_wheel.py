# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
import json
import re
from dataclasses import replace
from pathlib import Path
from zipfile import ZipFile

import pytest
from wheel.wheelfile import WheelFile

from stack import fetch, pins, wheel, wheel_diff
from stack.errors import StackError
from stack.fork import Fork
from stack.target import Target, detect

ROOT = Path(__file__).resolve().parents[2]


def build(fork: Fork, folder: Path) -> WheelFile:
    folder.mkdir(exist_ok=True)
    return WheelFile(folder / wheel.build(fork, fetch.fetch(fork.distribution), folder))


def contents(archive: ZipFile) -> dict[str, int]:
    """Return what an archive holds: names, without dist-info, and checksums."""
    return {
        info.filename: info.CRC
        for info in archive.infolist()
        if ".dist-info/" not in info.filename
    }


def metadata(archive: WheelFile) -> str:
    return archive.read(f"{archive.dist_info_path}/METADATA").decode()


@pytest.fixture
def built(project, make_patch, tmp_path):
    project.add_patch("hook.patch", make_patch())
    project.write("vllm/arena/__init__.py", "arena = 1\n")
    return build(project.fork, tmp_path / "out")


def test_only_what_is_meant_differs_from_the_base(project, built):
    with ZipFile(project.index / project.fork.distribution.file) as base:
        before = contents(base)
    after = contents(built)

    assert after.keys() - before.keys() == {"vllm/arena/__init__.py"}
    assert before.keys() <= after.keys()
    assert {name for name in before if before[name] != after[name]} == {
        "vllm/engine.py",
        "vllm/_version.py",
    }
    assert b"\nhook\n" in built.read("vllm/engine.py")


def test_name_version_and_requirements(built):
    name = "vllm-1.2.3+mark.1.cpu"

    assert Path(built.filename).name == f"{name}-cp38-abi3-manylinux_2_28_x86_64.whl"
    assert f"{name}.dist-info/entry_points.txt" in built.namelist()
    assert metadata(built) == (
        "Metadata-Version: 2.4\n"
        "Name: vllm\n"
        "Version: 1.2.3+mark.1.cpu\n"
        'Requires-Dist: torch==2.0.0; platform_machine == "x86_64"\n'
        'Requires-Dist: torchvision; (platform_machine != "riscv64") '
        'and extra == "vision"\n'
        'Requires-Dist: torchcodec>=0.14; extra == "video"\n'
        "Requires-Dist: numpy\n"
        "Provides-Extra: video\n"
        "Provides-Extra: vision\n"
        "Provides-Extra: audio\n"
        "\n"
        "Made of torch==2.0.0+cpu.\n"
    )
    assert built.read(f"{name}.dist-info/WHEEL").decode() == (
        "Wheel-Version: 1.0\nTag: cp38-abi3-manylinux_2_28_x86_64\n"
    )


def test_the_cuda_wheel_requires_what_the_base_does(project, tmp_path):
    text = metadata(build(replace(project.fork, version="1.2.3+mark.1"), tmp_path))

    assert "\nRequires-Dist: torchcodec>=0.14\n" in text
    assert "\nProvides-Extra: vision\n" in text, "the README's command names it"


def test_the_package_reports_the_forks_version(built):
    namespace: dict = {}
    exec(built.read("vllm/_version.py"), namespace)

    assert namespace["__version__"] == "1.2.3+mark.1.cpu"
    assert namespace["version_tuple"] == (1, 2, 3, "mark.1.cpu")


def test_where_it_comes_from_is_written_inside(project, built):
    facts = json.loads(built.read(f"{built.dist_info_path}/fork.json"))

    assert facts["base"] == {
        "file": project.fork.distribution.file,
        "sha256": project.fork.distribution.sha256,
    }
    before = project.fork.provenance()
    project.write("vllm/arena/__init__.py", "arena = 2\n")
    overlay_changed = json.loads(project.fork.provenance())
    assert facts == json.loads(before)
    assert overlay_changed["overlay_sha256"] != facts["overlay_sha256"]
    assert overlay_changed["stack_sha256"] == facts["stack_sha256"]


def test_the_same_input_gives_the_same_bytes(project, built, tmp_path):
    again = build(project.fork, tmp_path / "again")

    assert Path(again.filename).read_bytes() == Path(built.filename).read_bytes()


def test_a_patch_that_does_not_apply_leaves_no_wheel(project, make_patch, tmp_path):
    project.add_patch("off.patch", make_patch(at=8))

    with pytest.raises(StackError, match=r"off\.patch"):
        build(project.fork, tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def test_an_overlay_file_that_upstream_has_is_refused(project, tmp_path):
    project.write("vllm/other.py", "mine\n")

    with pytest.raises(StackError, match=r"vllm/other\.py is a file of vLLM 1\.2\.3"):
        build(project.fork, tmp_path / "out")


def test_the_real_wheel(tmp_path):
    fork = Fork.load(ROOT, pins.load_base(ROOT), Target("cpu", detect().machine))
    built = build(fork, tmp_path)

    # Reading checks each file against its hash in RECORD.
    assert all(built.read(name) is not None for name in built.namelist())
    record = built.read(built.record_path).decode()
    assert len(record.splitlines()) == len(built.namelist())
    differences = wheel_diff.compare(
        fork, fetch.fetch(fork.distribution), Path(built.filename)
    )
    assert [d for d in differences if d.why is None] == []
    text = metadata(built)
    assert re.search(r"(?m)^Name: vllm$", text)
    assert re.search(rf"(?m)^Version: {re.escape(fork.version)}$", text)
    assert re.search(r"(?m)^Requires-Dist: torch==2\.13\.0;", text)
    assert "+cpu" not in text.partition("\n\n")[0]
    companions = re.findall(r"(?m)^Requires-Dist: torch(?:vision|audio|codec).*", text)
    assert len(companions) == 3
    assert all(" and extra == " in line for line in companions)
    entry_points = built.read(f"{built.dist_info_path}/entry_points.txt").decode()
    assert "vllm = vllm.entrypoints.cli.main:main" in entry_points


@pytest.mark.parametrize(
    "settings",
    ["", "[tool.vllm-fork]\n", '[tool.vllm-fork]\ntag = "no tag"\n', "[", "tool = 1\n"],
)
def test_without_a_usable_tag_it_says_so(project, settings):
    project.write("pyproject.toml", settings)

    with pytest.raises(StackError, match=r"pyproject\.toml gives no usable tag"):
        _ = project.fork


def test_a_tag_that_marks_a_cpu_build_is_refused(project):
    project.write("pyproject.toml", '[tool.vllm-fork]\ntag = "cpu.1"\n')

    with pytest.raises(StackError, match="has 'cpu' in it"):
        _ = project.fork


def test_a_link_to_nowhere_is_refused(project):
    project.write("vllm/arena.py", "").unlink()
    (project.root / "vllm/arena.py").symlink_to("gone.py")

    with pytest.raises(StackError, match=r"vllm/arena\.py is no file, or a link"):
        _ = project.fork


@pytest.mark.parametrize(
    "more", ["[base.newest.sdist]", '[base."1.2.3"]\ncpu = 3', "base = 3"]
)
def test_pins_that_are_none(project, more):
    pins_file = project.root / "patches/upstream.toml"
    text = pins_file.read_text()
    if more == "base = 3":
        text = "default = '1.2.3'"
    elif "cpu" in more:
        text = text.replace('[base."1.2.3".cpu', '[unused."1.2.3".cpu')
    pins_file.write_text(f"{more}\n{text}" if more == "base = 3" else f"{text}\n{more}")

    with pytest.raises(StackError, match=r"patches/upstream\.toml cannot be used"):
        pins.versions(project.root)


def test_a_base_file_that_the_overlay_replaces(project, tmp_path):
    pins_file = project.root / "patches/upstream.toml"
    text = pins_file.read_text()
    entry = '[base."1.2.3"]\nreplaces = ["vllm/other.py"]\n[base."1.2.3".sdist]'
    pins_file.write_text(text.replace('[base."1.2.3".sdist]', entry))

    with pytest.raises(StackError, match="but only one of the two has it"):
        build(project.fork, tmp_path / "out")

    project.write("vllm/other.py", "mine\n")
    built = build(project.fork, tmp_path / "out")
    assert built.read("vllm/other.py") == b"mine\n"
    assert built.namelist().count("vllm/other.py") == 1
