"""Run one file of an engine without the engine.

A patched file of vLLM or FlashInfer is executed as the module it is. What it imports of its own
package, and that is not given here as something real, is a stand-in which accepts whatever a module
does while it is imported: be a base class, a decorator, an annotation, a registry. Nothing of that
is looked at by a test; what a test calls is given to it by name.
"""

import importlib.abc
import importlib.machinery
import linecache
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PACKAGES = ("vllm", "flashinfer")


class StandIn:
    """Something that a module uses while it is imported."""

    def __init__(self, name: str) -> None:
        self.__name__ = self.__qualname__ = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # A decorator gives back what it decorates
        alone = len(args) == 1 and not kwargs and isinstance(args[0], type | types.FunctionType)
        return args[0] if alone else self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return StandIn(f"{self.__name__}.{name}")

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        return ()

    def __getitem__(self, item: Any) -> Any:
        return self

    def __or__(self, other: Any) -> Any:
        return self

    __ror__ = __or__

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __bool__(self) -> bool:
        return False

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None: ...


class StandInModule(types.ModuleType):
    """A module that has every name."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return StandIn(f"{self.__name__}.{name}")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Find a stand-in for every module of the packages."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] not in PACKAGES:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return StandInModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None: ...


@contextmanager
def stand_ins(real: Mapping[str, types.ModuleType] | None = None) -> Iterator[None]:
    """Let imports from the packages find stand-ins, or what is given as real."""
    finder = _Finder()
    before = {name: one for name, one in sys.modules.items() if _ours(name)}
    for name in before:
        del sys.modules[name]
    sys.modules.update(real or {})
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if _ours(name)]:
            del sys.modules[name]
        sys.modules.update(before)


def _ours(name: str) -> bool:
    """Tell whether a module is of the packages that are stood in for."""
    return name.partition(".")[0] in PACKAGES


def load(
    path: str,
    text: str,
    real: Mapping[str, types.ModuleType] | None = None,
    file: Path | None = None,
) -> types.ModuleType:
    """Execute a file's text as the module it is.

    `file` is where the text also lies on disk; a kernel's compiler reads its source from there.
    """
    name = path.removesuffix(".py").replace("/", ".")
    module = types.ModuleType(name)
    module.__package__ = name.rpartition(".")[0]
    module.__file__ = str(file or path)
    if file is None:
        linecache.cache[path] = (len(text), None, text.splitlines(keepends=True), path)
    with stand_ins({**(real or {}), name: module}):
        exec(compile(text, module.__file__, "exec", dont_inherit=True), module.__dict__)
    return module
