"""One of each of a package's errors, and what becomes of it on its way between processes."""

import inspect
import pickle
from types import ModuleType

__all__ = ["assert_carried", "errors_of"]


def errors_of(module: ModuleType) -> list[BaseException]:
    """An instance of each error that ``module`` exports, and of each imported subclass of them.

    Made with all that it takes: an optional attribute is lost as easily as any other.
    """
    kinds: dict[type[BaseException], None] = {}
    waiting = [getattr(module, name) for name in module.__all__]
    while waiting:
        kinds[kind := waiting.pop()] = None
        waiting += kind.__subclasses__()
    made = [_made(kind) for kind in kinds]
    return sorted(made, key=lambda error: type(error).__name__)


def assert_carried(error: BaseException) -> None:
    """Check that nothing is lost where another process raises it: Ray and multiprocessing pickle.

    That it is of the same type, with the same message, attributes and notes.
    """
    error.add_note("a note")
    found = pickle.loads(pickle.dumps(error))
    assert type(found) is type(error)
    assert str(found) == str(error)
    assert found.args == error.args
    assert vars(found) == vars(error)


def _made(kind: type[BaseException]) -> BaseException:
    if not inspect.isfunction(kind.__init__):  # an exception's own, of words
        return kind("what happened; what to do")
    parameters = inspect.signature(kind).parameters.items()
    return kind(**{name: _argument(name, str(each.annotation)) for name, each in parameters})


def _argument(name: str, annotation: str) -> object:
    if "Sequence" in annotation:
        return ("one", "another")
    return 7 if "int" in annotation else f"the {name}"
