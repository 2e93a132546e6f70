# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
import shutil
import stat
from pathlib import Path
from zipfile import ZipFile

import pytest
from wheel.wheelfile import WheelFile

from stack import cli, fetch, wheel, wheel_diff
from stack.errors import StackError
from stack.target import Target


@pytest.fixture
def built(project, make_patch, tmp_path) -> Path:
    project.add_patch("core-add-a-hook.patch", make_patch())
    project.write("vllm/arena.py", "arena = 1\n")
    folder = tmp_path / "out"
    folder.mkdir()
    base_file = fetch.fetch(project.fork.distribution)
    return folder / wheel.build(project.fork, base_file, folder)


def compare(project, path: Path) -> dict[str, str | None]:
    base_file = fetch.fetch(project.fork.distribution)
    return {
        f"{d.kind} {d.path}": d.why
        for d in wheel_diff.compare(project.fork, base_file, path)
    }


def test_every_difference_is_accounted_for(project, built):
    info = "vllm-1.2.3+mark.1.cpu.dist-info"

    assert compare(project, built) == {
        "added vllm/arena.py": "the overlay",
        "changed vllm/engine.py": "core-add-a-hook.patch",
        "changed vllm/_version.py": "the version",
        f"added {info}/fork.json": "where the wheel comes from",
        f"changed {info}/METADATA": "name, version, requirements, extras",
        f"changed {info}/WHEEL": "the tags of the file's name",
        f"changed {info}/RECORD": "the files' hashes",
    }


def rebuilt(path: Path, change: dict[str, bytes | None]) -> Path:
    """Write the wheel anew, with some files of other content, added, or left out."""
    altered = path.with_name("altered") / path.name
    altered.parent.mkdir()
    with ZipFile(path) as old, WheelFile(altered, "w") as new:
        infos = {i.filename: i for i in old.infolist() if "RECORD" not in i.filename}
        contents = {name: old.read(name) for name in infos}
        for name, data in (contents | change).items():
            if data is not None:
                new.writestr(infos.get(name, name), data)
    return altered


INFO = "vllm-1.2.3+mark.1.cpu.dist-info"


@pytest.mark.parametrize(
    ("name", "data", "difference"),
    [
        ("vllm/stray.py", b"", "added vllm/stray.py"),
        ("vllm/other.py", b"altered\n", "changed vllm/other.py"),
        ("vllm/other.py", None, "removed vllm/other.py"),
        ("vllm/engine.py", b"altered\n", "changed vllm/engine.py"),
        ("vllm/arena.py", b"arena = 2\n", "added vllm/arena.py"),
        (f"{INFO}/entry_points.txt", b"", f"changed {INFO}/entry_points.txt"),
    ],
)
def test_what_is_not_intended_is_told(project, built, name, data, difference):
    found = compare(project, rebuilt(built, {name: data}))

    assert [d for d, why in found.items() if why is None] == [difference]


@pytest.mark.parametrize(
    ("file", "more"),
    [
        ("METADATA", b"License: x"),
        ("METADATA", b"Requires-Dist: stray"),
        ("METADATA", b"Provides-Extra: stray"),
        ("WHEEL", b"Tag: py3-none-any"),
    ],
)
def test_a_line_that_the_build_does_not_write_is_told(project, built, file, more):
    name = f"{INFO}/{file}"
    with ZipFile(built) as archive:
        data = archive.read(name)
    first, rest = data.split(b"\n", 1)
    found = compare(project, rebuilt(built, {name: b"\n".join([first, more, rest])}))

    assert [d for d, why in found.items() if why is None] == [f"changed {name}"]


def tampered(path: Path, name: str, mode: int, record: tuple[bytes, bytes]) -> Path:
    """Write the archive anew, with a file of another mode and a RECORD that is not
    the files'."""
    altered = path.with_name("tampered") / path.name
    altered.parent.mkdir()
    with ZipFile(path) as old, ZipFile(altered, "w") as new:
        for info in old.infolist():
            data = old.read(info)
            if info.filename == name:
                info.external_attr = mode << 16
            if info.filename.endswith("RECORD"):
                data = data.replace(*record)
            new.writestr(info, data)
    return altered


@pytest.mark.parametrize(
    ("name", "mode", "difference"),
    [
        ("vllm/other.py", stat.S_IFREG | 0o777, "changed vllm/other.py"),
        ("vllm/other.py", stat.S_IFLNK | 0o644, "changed vllm/other.py"),
        ("vllm/arena.py", stat.S_IFLNK | 0o644, "added vllm/arena.py"),
        ("vllm/arena.py", stat.S_IFREG | 0o4777, "added vllm/arena.py"),
        (f"{INFO}/fork.json", stat.S_IFREG | 0o777, f"added {INFO}/fork.json"),
    ],
)
def test_a_mode_that_the_base_has_not_is_told(project, built, name, mode, difference):
    found = compare(project, tampered(built, name, mode, (b"", b"")))

    assert [d for d, why in found.items() if why is None] == [difference]


def test_a_record_of_more_than_the_files_is_told(project, built):
    more = b"../../../bin/python,,\nvllm/arena.py,"
    record = (b"vllm/arena.py,", more)
    found = compare(project, tampered(built, "", 0, record))

    assert [d for d, why in found.items() if why is None] == [f"changed {INFO}/RECORD"]


def test_a_record_of_other_sizes_is_told(project, built):
    found = compare(project, tampered(built, "", 0, (b",10\n", b",11\n")))

    assert [d for d, why in found.items() if why is None] == [f"changed {INFO}/RECORD"]


def twice(path: Path) -> None:
    with pytest.warns(UserWarning), ZipFile(path, "a") as file:
        file.writestr("vllm/other.py", "evil = 1\n")


def prefixed(path: Path) -> None:
    path.write_bytes(b"evil" * 20 + path.read_bytes())


def overwritten(path: Path) -> None:
    with ZipFile(path) as file:
        info = file.getinfo("vllm/engine.py")
    data = bytearray(path.read_bytes())
    start = info.header_offset + 30 + len(info.filename)
    data[start : start + info.compress_size] = b"\xff" * info.compress_size
    path.write_bytes(data)


def encrypted(path: Path) -> None:
    data = path.read_bytes()
    # The flags of a local and of a central header.
    for mark, offset in ((b"PK\3\4", 6), (b"PK\1\2", 8)):
        at = data.index(mark) + offset
        data = data[:at] + b"\1" + data[at + 1 :]
    path.write_bytes(data)


@pytest.mark.parametrize("tamper", [twice, prefixed, overwritten, encrypted])
def test_a_zip_that_not_all_read_alike(project, built, tamper):
    tamper(built)

    with pytest.raises(StackError, match="is not a sound wheel"):
        compare(project, built)


def test_a_record_whose_hash_is_none(project, built):
    with pytest.raises(StackError, match="is not a sound wheel"):
        compare(project, tampered(built, "", 0, (b"sha256=", b"sha256=a")))


def test_the_verb_lists_and_fails(project, built, capsys):
    assert cli.main(project.root, ["wheel-diff", str(built)]) == 0
    assert "added    vllm/arena.py: the overlay" in capsys.readouterr().out

    stray = rebuilt(built, {"vllm/stray.py": b""})
    assert cli.main(project.root, ["wheel-diff", str(stray)]) == 1
    out, error = capsys.readouterr()
    assert "added    vllm/stray.py: NOT INTENDED" in out
    assert error.splitlines()[-1].startswith("error: 1 differences from")


def test_a_damaged_wheel(project, built):
    built.write_bytes(built.read_bytes()[:200])

    with pytest.raises(StackError, match="is not a sound wheel"):
        compare(project, built)


def test_a_name_says_what_a_wheel_is_for(built, tmp_path):
    assert wheel_diff.target_of(built) == Target("cpu", "x86_64")

    shutil.copy(built, tmp_path / "vllm.whl")
    with pytest.raises(StackError, match="is not named as a wheel is"):
        wheel_diff.target_of(tmp_path / "vllm.whl")
