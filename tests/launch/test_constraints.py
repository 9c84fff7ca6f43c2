"""The files of tested versions against setup.cfg, without a network; `launch/lock --check` resolves them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.launch.scripts import script

lock = script("lock")
platforms = {platform.name: platform for platform in lock.PLATFORMS}


def numbers(version: str) -> tuple[int, ...]:
    """The release, without its zeros at the end."""
    found = [int(part) for part in version.split("+")[0].split(".")]
    while found and found[-1] == 0:
        found.pop()
    return tuple(found)


def lowest(requirement: str) -> tuple[int, ...]:
    bound = re.search(r">=([0-9.]+)", requirement)
    assert bound is not None, requirement
    return numbers(bound[1])


@pytest.mark.parametrize("name", platforms)
def test_each_requirement_has_a_version_that_it_allows(name: str) -> None:
    platform = platforms[name]
    text = platform.path.read_text()
    assert not re.search(r"://|--|\bfile:|@ ", text), "no index and no place is named"
    for python in platform.pythons:
        versions = lock.read(platform.path, python)
        if name not in ("x86_64", "lowest"):
            cuda = ("nvidia-", "cuda-", "triton")
            assert [each for each in versions if each.startswith(cuda)] == [], "boards download no CUDA"
        for package, requirement in lock.requirements(*platform.extras).items():
            if "python_version" in requirement and python != "3.10":
                continue
            if package == "torch" and platform.torches:
                assert f"torch{lock.JETSON_TORCH}" in text.splitlines()
                versions["torch"] = platform.torches[0]
            assert numbers(versions[package]) >= lowest(requirement), f"Python {python}: {requirement}"


def test_each_file_has_its_platform_and_the_lowest_versions_are_the_bounds_themselves() -> None:
    assert {path.stem for path in lock.FOLDER.iterdir()} == platforms.keys()
    versions = lock.read(platforms["lowest"].path, "3.10")
    for package, requirement in lock.requirements(lock.PRODUCT).items():
        if package != "setuptools":  # only builds; setup.cfg does not name it
            assert numbers(versions[package]) == lowest(requirement), requirement


def test_a_file_that_was_made_is_read_again(tmp_path: Path) -> None:
    by_python = {
        "3.10": {"a": "1", "b": "1", "c": "1", "f": "1"},
        "3.11": {"a": "1", "b": "2", "c": "2", "f": "2"},
        "3.12": {"a": "1", "b": "2", "c": "3", "f": "1"},
    }
    assert "a==1" in list(lock.merged(by_python)), "one line where all are alike"
    path = tmp_path / "x.txt"
    path.write_text("# about\n" + "\n".join(lock.merged(by_python)) + "\ntorch>=2.7,<2.14\n")
    for python, versions in by_python.items():
        assert lock.read(path, python) == versions
    path.write_text("a>=1\n")
    with pytest.raises(lock.LockError, match=r"x\.txt: expected NAME==VERSION, got 'a>=1'; run launch/lock"):
        lock.read(path, "3.10")
