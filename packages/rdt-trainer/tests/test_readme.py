"""What needs a server cannot run here; but no snippet uses a name that it does not bring."""

import ast
import builtins
import re
from pathlib import Path

import pytest

README = (Path(__file__).parents[1] / "README.md").read_text()
SNIPPETS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.mark.parametrize("code", SNIPPETS)
def test_a_snippet_brings_every_name_that_it_uses(code: str) -> None:
    tree = ast.parse(code)
    imports = [each for each in tree.body if isinstance(each, ast.Import | ast.ImportFrom)]
    found: dict[str, object] = dict(vars(builtins))
    exec(compile(ast.Module(imports, type_ignores=[]), "README.md", "exec"), found)  # they exist
    used: set[str] = set()
    made = set(found)
    for node in ast.walk(tree):
        match node:
            case ast.Name(name, ast.Load()):
                used.add(name)
            case ast.Name(name) | ast.arg(name) | ast.FunctionDef(name) | ast.ClassDef(name):
                made.add(name)
    assert used <= made, used - made


def test_there_are_snippets() -> None:
    assert len(SNIPPETS) >= 5
