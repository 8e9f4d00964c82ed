"""The table of what may import what, read from the sources themselves."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ROOT / "packages"

# package: what it may import besides the standard library and itself
ALLOWED = {
    "rdt_plan": set(),
    "rdt_bake": {"rdt_plan", "torch"},
    "rdt_transport": {"rdt_plan", "torch", "nixl", "ray", "triton"},
    "rdt_trainer": {
        "rdt_plan",
        "rdt_transport",
        "torch",
        "httpx",
        "ray",
        "rich",
        "transformers",
        "typer",
    },
    "rdt_vllm": {"rdt_plan", "rdt_bake", "rdt_transport", "torch", "vllm", "cloudpickle"},
}
# what a package's public testing kit may need on top
TESTING = {
    "rdt_plan": {"hypothesis"},
    "rdt_transport": {"hypothesis"},
    "rdt_vllm": {"transformers", "safetensors", "psutil"},
}

# a heavy import has one door: the only file, by name, that may use it. A testing kit stands outside
# of what it tests, and drives it as a user does.
DOORS = {
    "nixl": {"agent.py"},
    "ray": {"_ray_agent.py", "_ray_direct.py", "_ray_offices.py", "ray_client.py", "ray_host.py"},
    "rich": {"command.py", "display.py"},
    "transformers": {"transformers_names.py"},
    "triton": {"triton_copies.py"},
    "typer": {"command.py"},
    "vllm": {"_vllm.py", "vllm_api.py"},
}

# vLLM's own trainer interface over ours: the one module that may import what its package may not
VLLM_API = PACKAGES / "rdt-trainer" / "src" / "rdt_trainer" / "vllm_api.py"

FILES = sorted(PACKAGES.glob("*/src/*/**/*.py"))


def imports(tree: ast.Module) -> Iterator[str]:
    """The top-level name of every import, wherever in the file it stands."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield (node.module or "").partition(".")[0]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            if isinstance(node.args[0], ast.Constant):
                yield node.args[0].value.partition(".")[0]


@pytest.mark.parametrize("package", sorted(ALLOWED))
def test_a_package_imports_only_what_lies_below_it(package: str) -> None:
    folder = PACKAGES / package.replace("_", "-") / "src" / package
    files = sorted(folder.rglob("*.py"))
    assert files, folder
    for file in files:
        allowed = ALLOWED[package] | {package} | sys.stdlib_module_names
        if "testing" in file.relative_to(folder).parts:
            allowed |= TESTING.get(package, set())
        if file == VLLM_API:
            allowed.add("vllm")
        found = set(imports(ast.parse(file.read_text())))
        assert found <= allowed, f"{file}: {sorted(found - allowed)}"


@pytest.mark.parametrize("name", sorted(DOORS))
def test_a_heavy_import_has_one_door(name: str) -> None:
    users = {
        file.name
        for file in FILES
        if "testing" not in file.parts and name in set(imports(ast.parse(file.read_text())))
    }
    assert users == DOORS[name]


def test_nothing_imports_the_module_that_imports_vllm() -> None:
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import | ast.ImportFrom):
                assert VLLM_API.stem not in ast.unparse(node), file


def test_the_trainer_leaves_vllm_out_of_its_process() -> None:
    """Every module of it but that one, imported into a fresh process."""
    folder = VLLM_API.parent
    files = [file for file in folder.rglob("*.py") if file != VLLM_API]
    names = [".".join(file.relative_to(folder.parent).with_suffix("").parts) for file in files]
    assert len(names) > 30
    script = (
        "import importlib, sys\n"
        f"for name in {[name.removesuffix('.__init__') for name in names]}:\n"
        "    importlib.import_module(name)\n"
        "print(sorted(name for name in sys.modules if name.partition('.')[0] == 'vllm'))"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout.strip()) == (0, "[]"), ended.stderr


def test_only_events_touches_cuda() -> None:
    users = {
        file.name
        for file in FILES
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Attribute) and ast.unparse(node).startswith("torch.cuda")
    }
    assert users <= {"events.py"}


def test_no_module_is_long() -> None:
    long = {str(file): n for file in FILES if (n := len(file.read_text().splitlines())) > 300}
    assert not long


def test_every_module_says_what_it_is_and_exports() -> None:
    for file in FILES:
        tree = ast.parse(file.read_text())
        if tree.body and file.name != "__init__.py":
            assert ast.get_docstring(tree), file
            assigned = {ast.unparse(n.targets[0]) for n in tree.body if isinstance(n, ast.Assign)}
            assert "__all__" in assigned, file


def test_the_rule_notices_a_forbidden_import() -> None:
    tree = ast.parse("def f():\n    from vllm.config import VllmConfig\n")
    assert set(imports(tree)) == {"vllm"}
