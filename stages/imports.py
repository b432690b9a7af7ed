"""Import paths: turns the names of a pipeline file into Python objects.

Responsible for `pkg.mod:attr` and `pkg.mod.attr`, for engines, policies, adapters and torch modules alike.
Leaves to its callers what the object has to be able to do. Imports the user's code and runs nothing of it.
Says no with `ImportPathError`, which names the path and the part of it that is missing.
"""

from importlib import import_module
from typing import Any


class ImportPathError(ValueError):
    """An import path that leads nowhere. The message names the path and what is missing."""


def load_symbol(path: str) -> Any:
    """The object at `pkg.mod:attr` or `pkg.mod.attr`; behind the colon, `Outer.inner` is allowed.

    An exception raised *inside* the user's module is not caught: its traceback says more than we could.
    """
    module_name, colon, attribute = path.partition(":")
    if not colon:
        module_name, _, attribute = path.rpartition(".")
    names = attribute.split(".")
    if not all(part.isidentifier() for part in (*module_name.split("."), *names)):
        raise ImportPathError(f"{path!r} is not an import path; write it as package.module:Name")
    try:
        found: Any = import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module exists, but something that it needs does not
        raise ImportPathError(f"{path!r}: there is no module {error.name!r} on this process' import path") from None
    for name in names:
        try:
            found = getattr(found, name)
        except AttributeError:
            raise ImportPathError(f"{path!r}: {module_name!r} has no {attribute!r}") from None
    return found
