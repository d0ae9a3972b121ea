"""Attention kinds and feature maps from outside the project: what plugins register, and how plugins
are loaded.

A plugin is a module, or a .py file, that calls `register_attention` or `register_feature_map`; see
linpix/plugins.py. A checkpoint has the names of its kind and its feature map, and never that of a
module: only the user chooses which code runs.
"""

import importlib.util
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypeVar

What = Literal["attention", "feature_map"]
Registered = TypeVar("Registered", bound=Callable[..., Any])

# for processes that this one starts, too
VARIABLE = "LINPIX_PLUGIN"
# a kind's name is also that of a backend of comparisons
_RESERVED = ("stateful-softmax", "lsh-1", "lsh-4")
_registered: dict[What, dict[str, Any]] = {"attention": {}, "feature_map": {}}
_loaded: set[str] = set()


def register(what: What, name: str, made: Registered, built_in: tuple[str, ...]) -> Registered:
    """Register a kind or a feature map under a name; returns it. Raises ValueError if the name is
    taken or malformed.
    """
    if not re.fullmatch("[a-z][a-z0-9-]*", name):
        raise ValueError(
            f"{what} must have a name of lower-case letters, digits and hyphens, got {name!r}"
        )
    if name in (*built_in, *_RESERVED, *_registered[what]):
        raise ValueError(f"{what} {name!r} exists already; give yours another name")
    _registered[what][name] = made
    return made


def names_of(what: What) -> tuple[str, ...]:
    """The names that plugins have registered."""
    load(os.environ.get(VARIABLE, ""))
    return tuple(_registered[what])


def look_up(what: What, name: object, built_in: tuple[str, ...]) -> Any:
    """What is registered under a name that is not built in. Raises ValueError with the cure."""
    known = names_of(what)
    if name not in known:
        raise ValueError(
            f"{what} must be one of {', '.join((*built_in, *known))}, got {name!r:.80}; if a plugin"
            f" registers this name, give that plugin by --plugin or {VARIABLE}"
        )
    return _registered[what][str(name)]


def features_of(name: str, dim: int) -> int:
    """Size of a query or key of this size after a registered feature map."""
    import torch  # which the settings of commands do not need

    with torch.device("cpu"):
        size: int = look_up("feature_map", name, ())(torch.zeros(1, dim)).shape[-1]
    return size


def absolute(plugins: str) -> str:
    """The same plugins, comma-separated, for processes with other folders."""
    found = []
    for plugin in filter(None, (part.strip() for part in plugins.split(","))):
        found.append(os.path.abspath(plugin) if _is_file(plugin) else plugin)
    return ",".join(found)


def load(plugins: str) -> None:
    """Import plugins, comma-separated, unless they are loaded already; processes that this one
    starts then load them too. Raises ValueError with the cure.
    """
    found = absolute(plugins)
    for plugin in filter(None, found.split(",")):
        if plugin not in _loaded:
            _load(plugin)
    if found:
        os.environ[VARIABLE] = found


def _load(plugin: str) -> None:
    before = {what: dict(names) for what, names in _registered.items()}
    imported_before = plugin in sys.modules  # by the user's own program
    _loaded.add(plugin)  # at once: what it imports may look up names
    try:
        _import(plugin)
        if _registered == before and not imported_before:
            raise ValueError(
                "it registers nothing; call register_attention or register_feature_map in it"
            )
    except (Exception, SystemExit) as error:  # a script without a main guard may exit
        _registered.update(before)
        _loaded.remove(plugin)
        why = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        raise ValueError(f"plugin {plugin}{_line_of(error, plugin)}: {why}") from error


def _import(plugin: str) -> None:
    if not _is_file(plugin):
        if importlib.util.find_spec(plugin.split(".")[0]) is None:
            raise ValueError(
                "there is no such module; install it, or give the path of a file, such as ./my.py"
            )
        importlib.import_module(plugin)
        return
    if not Path(plugin).is_file():
        raise ValueError("there is no such file; check the path")
    spec = importlib.util.spec_from_file_location(f"linpix_plugin_{len(_loaded)}", plugin)
    if spec is None or spec.loader is None:
        raise ValueError("it is not a Python file; give a .py file, or the name of a module")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)


def _is_file(plugin: str) -> bool:
    return plugin.endswith(".py") or os.sep in plugin


def _line_of(error: BaseException, plugin: str) -> str:
    """Where in the plugin's file an error was raised, such as ", line 7"; empty if not in it."""
    found, at = "", error.__traceback__
    while at is not None:
        if at.tb_frame.f_code.co_filename == plugin:
            found = f", line {at.tb_lineno}"
        at = at.tb_next
    return found
