"""The architecture's page names files that exist."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "architecture.md").read_text()


def test_every_file_and_folder_that_is_named_exists() -> None:
    named = set(re.findall(r"`(\w+/[\w/]+(?:\.py|/))`", PAGE))
    assert len(named) > 40
    for path in named:
        package = path.partition("/")[0]
        place = ROOT / path if package in ("tests", "examples") else _source(package) / path
        assert place.exists(), path


def test_a_file_without_its_package_is_in_the_one_named_before() -> None:
    for line in PAGE.splitlines():
        package = ""
        for folder, name in re.findall(r"`(?:(\w+/(?:\w+/)*))?(\w+\.py)`", line):
            package = folder.partition("/")[0] or package
            if package and package not in ("tests", "examples"):
                assert list((_source(package) / package).rglob(name)), (package, name)


def _source(package: str) -> Path:
    return ROOT / "packages" / package.replace("_", "-") / "src"
