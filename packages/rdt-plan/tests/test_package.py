"""What holds for the package as a whole: its imports, its exports, its examples."""

import contextlib
import doctest
import importlib
import io
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import rdt_plan

MODULES = sorted(info.name for info in pkgutil.walk_packages(rdt_plan.__path__, prefix="rdt_plan."))

LIST_FOREIGN = """
import sys
before = set(sys.modules)
import rdt_plan
allowed = set(sys.stdlib_module_names) | {"rdt_plan"}
print(*sorted({name.partition(".")[0] for name in set(sys.modules) - before} - allowed))
print(*sorted({"socket", "threading", "asyncio"} & (set(sys.modules) - before)))
"""


def test_import_loads_the_standard_library_only() -> None:
    result = subprocess.run(
        [sys.executable, "-c", LIST_FOREIGN], capture_output=True, text=True, check=True
    )
    assert result.stdout.split("\n") == ["", "", ""]


def test_every_export_exists_once_and_sorted() -> None:
    assert len(set(rdt_plan.__all__)) == len(rdt_plan.__all__)
    missing = [name for name in rdt_plan.__all__ if not hasattr(rdt_plan, name)]
    assert missing == []


@pytest.mark.parametrize("module", MODULES)
def test_module_says_what_it_exports(module: str) -> None:
    loaded = importlib.import_module(module)
    assert loaded.__doc__
    assert [name for name in loaded.__all__ if not hasattr(loaded, name)] == []


@pytest.mark.parametrize("module", MODULES)
def test_examples(module: str) -> None:
    failed, _ = doctest.testmod(importlib.import_module(module))
    assert failed == 0


def test_some_examples_exist() -> None:
    attempted = [doctest.testmod(importlib.import_module(m)).attempted for m in MODULES]
    assert sum(attempted) > 30


def test_the_readme_runs_and_prints_what_it_says() -> None:
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    code, printed = re.findall(r"```(?:python|text)\n(.*?)```", readme, re.DOTALL)
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(compile(code, "README.md", "exec"), {})
    assert output.getvalue() == printed
