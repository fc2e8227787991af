"""Run a function right after a named module has been imported, wherever that import happens.

The launcher and the CPU backend both have to touch Megatron modules before the user's script uses them, without
importing Megatron themselves: the script decides what is imported and when.
"""

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType


def after_import(module_name: str, callback: Callable[[ModuleType], None]) -> None:
    """Call `callback(module)` once `module_name` has been executed; at once where it is loaded already.

    Callbacks of one module run in the order of registration, before the importing statement goes on.
    """
    module = sys.modules.get(module_name)
    if module is not None:
        callback(module)
        return
    finder = next((f for f in sys.meta_path if isinstance(f, _Finder)), None)
    if finder is None:
        finder = _Finder()
        sys.meta_path.insert(0, finder)
    finder.callbacks.setdefault(module_name, []).append(callback)


class _Finder(importlib.abc.MetaPathFinder):
    """Hands a watched module to the ordinary finders and wraps the loader that they return."""

    def __init__(self):
        self.callbacks: dict[str, list[Callable[[ModuleType], None]]] = {}

    def find_spec(self, fullname, path=None, target=None):
        callbacks = self.callbacks.pop(fullname, None)
        if callbacks is None:
            return None
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            self.callbacks[fullname] = callbacks
            return None
        spec.loader = _Loader(spec.loader, callbacks)
        return spec


class _Loader(importlib.abc.Loader):
    def __init__(self, wrapped, callbacks):
        self._wrapped = wrapped
        self._callbacks = callbacks

    def create_module(self, spec):
        return self._wrapped.create_module(spec)

    def exec_module(self, module):
        module.__spec__.loader = module.__loader__ = self._wrapped
        self._wrapped.exec_module(module)
        for callback in self._callbacks:
            callback(module)
