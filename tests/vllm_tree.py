"""Another vLLM's weight transfer, read from its files, in place of the installed one's.

``RDT_VLLM_TREE`` names the folder ``vllm`` of an unpacked wheel. Of that only
``distributed/weight_transfer`` is used, which needs little of the rest, and that little from the
installed vLLM. So a contract is held against a version that cannot be installed here:

    pip download vllm==0.33.* --no-deps && unzip -q vllm-*.whl -d TREE
    RDT_VLLM_TREE=TREE/vllm hatch run pytest tests/test_vllm_api.py
"""

import importlib
import os
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

PACKAGE = "vllm.distributed.weight_transfer"


def use_tree() -> None:
    """Does nothing where the variable is not set; call it before anything imports the package."""
    if (folder := os.environ.get("RDT_VLLM_TREE")) is None:
        return
    parent = importlib.import_module("vllm.distributed")
    for name in [each for each in sys.modules if each.startswith(PACKAGE)]:
        del sys.modules[name]
    place = Path(folder) / "distributed" / "weight_transfer"
    spec = spec_from_file_location(
        PACKAGE, place / "__init__.py", submodule_search_locations=[str(place)]
    )
    assert spec is not None and spec.loader is not None, place
    module = sys.modules[PACKAGE] = module_from_spec(spec)
    spec.loader.exec_module(module)
    parent.weight_transfer = module
