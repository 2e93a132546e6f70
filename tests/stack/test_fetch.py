# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
import pytest
from unearth import Link

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

    reason = r"its sha256 is \w+, patches/upstream\.toml has"
    with pytest.raises(StackError, match=reason):
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


@pytest.mark.parametrize("text", ["quiet = 1\n", "no-index = true\n"])
def test_pips_settings_hold_when_it_is_quiet_or_offline(tmp_path, monkeypatch, text):
    """Nothing may come from an index that the user has not chosen."""
    config = tmp_path / "pip.conf"
    config.write_text(f"[global]\nindex-url = https://one.invalid/simple\n{text}")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(config))
    for name in ("INDEX_URL", "EXTRA_INDEX_URL", "FIND_LINKS", "NO_INDEX", "QUIET"):
        monkeypatch.delenv(f"PIP_{name}", raising=False)
    fetch._pip_settings.cache_clear()

    if "no-index" in text:
        with pytest.raises(StackError, match="configured to use no index"):
            fetch.packages("vllm")
    else:
        (source,) = fetch.package_finder().sources
        assert source["url"] == "https://one.invalid/simple"


def test_an_index_whose_hash_is_not_the_files(project):
    file = project.index / project.base.sdist.file
    link = Link(f"{file.as_uri()}#md5={'0' * 32}")

    with pytest.raises(StackError, match=r"its md5 is \w+, the index itself has 000"):
        fetch.download(link, project.root)


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
