"""What a class does in a hook of Lightning's, out of reach of an override without ``super()``.

A class names the methods that do its own part of a hook::

    own_hooks = {"on_train_start": "_check_data"}

They run once for each call of the hook, those of base classes first, then the hook itself as
subclasses override it; those in ``own_hooks_after`` run after it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any


def wrap_hooks(cls: type) -> None:
    """Wraps every hook in which ``cls`` or a base class has a part of its own."""
    names = [*_own_parts(cls, "own_hooks"), *_own_parts(cls, "own_hooks_after")]
    for name in dict.fromkeys(names):
        hook = getattr(cls, name)
        if not hasattr(hook, "has_own_part"):
            setattr(cls, name, _with_own_parts(name, hook))


def _own_parts(cls: type, attribute: str) -> dict[str, list[str]]:
    """The methods by hook, those of base classes first."""
    parts: dict[str, list[str]] = {}
    for base in reversed(cls.__mro__):
        for hook, method in vars(base).get(attribute, {}).items():
            parts.setdefault(hook, []).append(method)
    return parts


def _with_own_parts(name: str, hook: Callable[..., Any]) -> Callable[..., Any]:
    """The hook with all own parts, once, whether or not an override calls ``super()``."""

    @wraps(hook)
    def whole(self: Any, *args: Any, **named: Any) -> Any:
        if name in self._hooks_running:  # Called by an override of this very hook.
            return hook(self, *args, **named)
        self._hooks_running.add(name)
        try:
            for method in _own_parts(type(self), "own_hooks").get(name, ()):
                getattr(self, method)(*args, **named)
            result = hook(self, *args, **named)
            for method in _own_parts(type(self), "own_hooks_after").get(name, ()):
                getattr(self, method)(*args, **named)
            return result
        finally:
            self._hooks_running.discard(name)

    whole.has_own_part = True  # type: ignore[attr-defined]
    return whole
