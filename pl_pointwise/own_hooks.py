"""What a class does in a hook of Lightning's, out of reach of an override without ``super()``.

A method says which hook it is a part of::

    @part_of("on_train_start")
    def _check_data(self) -> None: ...

Parts run once for each call: the base module's (run.py), those of base classes, the class's own;
then, or with ``after=True`` before, the hook itself as subclasses override it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import Any, TypeVar

Method = TypeVar("Method", bound=Callable[..., Any])


def part_of(*hooks: str, after: bool = False) -> Callable[[Method], Method]:
    """Makes a method a part of hooks, in every call of them."""

    def mark(method: Method) -> Method:
        method.part_of_hooks = [(hook, after) for hook in hooks]  # type: ignore[attr-defined]
        return method

    return mark


@cache  # Some hooks are called in every step.
def parts_of(cls: type) -> tuple[tuple[tuple[str, bool], str], ...]:
    """Hook, whether after it, and method's name of every part, those of base classes first."""
    values = [each for base in reversed(cls.__mro__) for each in vars(base).items()]
    return tuple((p, name) for name, value in values for p in getattr(value, "part_of_hooks", ()))


def wrap_hooks(cls: type, run: type) -> None:
    """Wraps every hook in which ``cls`` or ``run``, the class of its ``_run``, has a part."""
    for (name, _), _ in [*parts_of(run), *parts_of(cls)]:
        hook = getattr(cls, name)
        if not hasattr(hook, "has_own_part"):
            setattr(cls, name, _with_parts(name, hook))


def _with_parts(name: str, hook: Callable[..., Any]) -> Callable[..., Any]:
    """The hook with all its parts, once, whether or not an override calls ``super()``."""

    @wraps(hook)
    def whole(self: Any, *args: Any, **named: Any) -> Any:
        running = self._run.hooks_running
        if name in running:  # Called by an override of this very hook.
            return hook(self, *args, **named)
        running.add(name)

        def call(after: bool) -> None:
            for owner in (self._run, self):
                kind: Any = type(owner)
                for part, method in parts_of(kind):
                    if part == (name, after):
                        getattr(owner, method)(*args, **named)

        try:
            call(after=False)
            result = hook(self, *args, **named)
            call(after=True)
            return result
        finally:
            running.discard(name)

    whole.has_own_part = True  # type: ignore[attr-defined]
    return whole
