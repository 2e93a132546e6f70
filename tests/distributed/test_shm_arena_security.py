# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What other users of the machine can do to an arena: nothing."""

import io
import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.distributed.arena_testing import MIB, make_arenas
from vllm.distributed.device_communicators.shm_arena import segment
from vllm.distributed.device_communicators.shm_tensor_arena import ShmTensorArena

NOBODY = 65534


def denied_to_nobody(action: Callable[[], object]) -> bool:
    """Whether another user is refused this, in a process of his."""
    pid = os.fork()
    if pid == 0:
        code = 2
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            action()
            code = 1
        except PermissionError:
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@pytest.mark.skipif(os.getuid() != 0, reason="only root can act as another user")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_another_user_can_neither_open_nor_remove_it():
    writer, (reader,) = make_arenas()
    name = writer.shared_memory.name
    path = Path("/dev/shm", name)
    descriptors = [
        link
        for link in Path(f"/proc/{os.getpid()}/fd").iterdir()
        if name in (os.readlink(link) if link.is_symlink() else "")
    ]
    assert descriptors
    assert denied_to_nobody(lambda: os.open(path, os.O_RDONLY))
    assert denied_to_nobody(lambda: os.open(path, os.O_WRONLY))
    assert denied_to_nobody(path.unlink)
    assert denied_to_nobody(lambda: os.open(descriptors[0], os.O_RDONLY))
    assert denied_to_nobody(lambda: os.open(f"/proc/{os.getppid()}/mem", os.O_RDONLY))
    # Nor was that for lack of the thing.
    assert path.exists()
    writer.on_barrier()
    reader.on_barrier()
    assert not path.exists()


@pytest.fixture(params=["file", "link"])
def somebody_elses(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[Path]:
    """A file, or a link to one, where the next arena is to be."""
    monkeypatch.setattr(segment.secrets, "token_hex", lambda n: "00" * n)
    path = Path("/dev/shm", "vllm_arena_" + "00" * 16)
    target = tmp_path / "target" if request.param == "link" else path
    target.write_bytes(b"theirs")
    if request.param == "link":
        path.symlink_to(target)
    yield target
    path.unlink()


def test_what_somebody_has_put_there_is_not_used(somebody_elses: Path):
    """Even if he had guessed the name."""
    with pytest.raises(FileExistsError):
        ShmTensorArena(1, MIB, 1)
    assert somebody_elses.read_bytes() == b"theirs"


def test_reader_follows_no_link(tmp_path: Path):
    writer = ShmTensorArena(1, MIB, 1)
    path = Path("/dev/shm", writer.shared_memory.name)
    target = tmp_path / "target"
    target.write_bytes(bytes(writer.shared_memory.size))
    path.unlink()
    path.symlink_to(target)
    assert ShmTensorArena.attach(writer.handle(), 0) is None
    assert target.read_bytes() == bytes(writer.shared_memory.size)


def test_handle_carries_nothing_that_runs():
    class OnlyData(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> None:
            raise AssertionError(f"the handle refers to {module}.{name}")

    handle = ShmTensorArena(2, MIB, 3).handle()
    assert OnlyData(io.BytesIO(pickle.dumps(handle))).load() == handle
    assert handle[:3] == (2, MIB, 3)
