# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
import pytest

from stack import fetch
from stack.errors import StackError


def test_a_pinned_file_is_fetched_once(project):
    path = fetch.fetch(project.base.sdist)
    (project.index / path.name).unlink()

    assert fetch.fetch(project.base.sdist) == path
    assert fetch.sha256(path) == project.base.sdist.sha256


def test_a_file_of_another_hash_is_refused_and_not_kept(project):
    with (project.index / project.base.sdist.file).open("ab") as file:
        file.write(b"more")

    with pytest.raises(StackError, match="is not the pinned file: its sha256 is"):
        fetch.fetch(project.base.sdist)
    assert [path for path in fetch.cache_dir().rglob("*") if path.is_file()] == []


def test_a_cached_file_that_was_altered_is_fetched_again(project):
    path = fetch.fetch(project.base.sdist)
    path.write_bytes(b"altered")

    assert fetch.sha256(fetch.fetch(project.base.sdist)) == project.base.sdist.sha256


def test_a_file_that_no_index_has(project):
    (project.index / project.base.sdist.file).unlink()

    with pytest.raises(StackError, match="is on none of the package indexes"):
        fetch.fetch(project.base.sdist)


def test_pips_files_and_environment_choose_the_index(tmp_path, monkeypatch):
    config = tmp_path / "pip.conf"
    config.write_text(
        "[global]\nindex-url = https://one.invalid/simple\n"
        "extra-index-url = https://two.invalid/simple\n"
    )
    monkeypatch.setenv("PIP_CONFIG_FILE", str(config))
    for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "https://three.invalid/simple")

    urls = [source["url"] for source in fetch.package_finder().sources]

    assert "https://one.invalid/simple" in urls
    assert "https://three.invalid/simple" in urls
    assert "https://two.invalid/simple" not in urls


def test_an_additional_index_does_not_replace_the_default(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    monkeypatch.delenv("PIP_INDEX_URL", raising=False)
    monkeypatch.delenv("PIP_EXTRA_INDEX_URL", raising=False)
    default = fetch.package_finder().sources
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "https://two.invalid/simple")

    sources = fetch.package_finder().sources

    assert default == sources[: len(default)]
    assert len(sources) == len(default) + 1
