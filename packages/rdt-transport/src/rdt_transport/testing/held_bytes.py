"""How much memory hangs on an object."""

import gc
import sys
from types import FunctionType, ModuleType

__all__ = ["held_bytes"]


def held_bytes(root: object) -> int:
    """Bytes of all objects that are reached from ``root``, each once; code does not count."""
    seen = {id(root)}
    todo = [root]
    total = 0
    while todo:
        each = todo.pop()
        total += sys.getsizeof(each)
        for found in gc.get_referents(each):
            if id(found) not in seen and not isinstance(found, (type, ModuleType, FunctionType)):
                seen.add(id(found))
                todo.append(found)
    return total
