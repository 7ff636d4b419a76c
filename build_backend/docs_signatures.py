"""A griffe extension: public names that are bound when a module is imported get the signatures of their functions.

griffe reads sources and imports nothing. To griffe `init = basics.init` is a value, and so the reference would show no
arguments. Here such a name becomes the method of the object's class, and `__doc__ = Base.__doc__` becomes a text.
"""

from __future__ import annotations

import ast
import re
from typing import Any

import griffe


class BoundNames(griffe.Extension):
    """Replaces bound methods by functions, and copies texts of base classes."""

    def on_package(self, *, pkg: griffe.Module, loader: Any, **_: Any) -> None:
        """All modules are read, and imports are not followed yet."""
        for module in _modules(pkg):
            for name, member in list(module.members.items()):
                if isinstance(member, griffe.Attribute) and (
                    function := _bound_method(module, member)
                ):
                    module.set_member(name, function)
                if isinstance(member, griffe.Class) and not member.docstring:
                    member.docstring = _copied_docstring(member)
        _name_parameters_singly(pkg)


def _modules(module: griffe.Module) -> list[griffe.Module]:
    found = [module]
    for member in module.members.values():
        if isinstance(member, griffe.Module):
            found += _modules(member)
    return found


def _bound_method(module: griffe.Module, member: griffe.Attribute) -> griffe.Function | None:
    """The function of `name = instance.method`, where `instance = Class(...)`."""
    match ast.parse(str(member.value), mode="eval").body if member.value else None:
        case ast.Attribute(value=ast.Name(id=instance), attr=method):
            pass
        case _:
            return None
    try:
        holder = _target(module[instance])
        call = ast.parse(str(holder.value), mode="eval").body
        found = _target(_target(holder.module[call.func.id]).all_members[method])  # type: ignore[attr-defined]
    except (AttributeError, KeyError, SyntaxError, griffe.AliasResolutionError):
        return None
    if not isinstance(found, griffe.Function):
        return None
    first, *others = found.parameters
    parameters = others if first.name == "self" else [first, *others]
    function = griffe.Function(
        member.name,
        parameters=griffe.Parameters(*parameters),
        returns=found.returns,
        docstring=found.docstring,
        lineno=member.lineno,
        endlineno=member.endlineno,
        parent=module,
    )
    function.labels |= found.labels - {"staticmethod", "classmethod"}
    return function


def _name_parameters_singly(parent: griffe.Module | griffe.Class) -> None:
    """Several names above one text become an entry each: griffe gives them all the type and default of one."""
    for member in parent.members.values():
        if isinstance(member, griffe.Alias):
            continue
        if member.docstring:
            member.docstring.value = _SEVERAL.sub(_singly, member.docstring.value)
        if isinstance(member, (griffe.Module, griffe.Class)):
            _name_parameters_singly(member)


# Names at the beginning of a line, and the indented lines below.
_SEVERAL = re.compile(
    r"^(?P<names>\*{0,2}\w+(?:, \*{0,2}\w+)+)\n(?P<text>(?:(?:[ ]+.*)?\n)*[ ]+.*)$", re.MULTILINE
)


def _singly(entry: re.Match[str]) -> str:
    return "\n".join(f"{name}\n{entry['text']}" for name in entry["names"].split(", "))


def _copied_docstring(cls: griffe.Class) -> griffe.Docstring | None:
    """The text of `__doc__ = module.Base.__doc__`."""
    value = str(cls.members["__doc__"].value) if "__doc__" in cls.members else ""
    if not value.endswith(".__doc__"):
        return None
    *modules, base, _ = value.split(".")
    holder = cls.module
    for module in modules:
        holder = _target(holder[module])
    found = _target(holder[base]).docstring
    return found and griffe.Docstring(
        found.value, parent=cls, parser=found.parser, parser_options=found.parser_options
    )


def _target(found: Any) -> Any:
    return found.final_target if isinstance(found, griffe.Alias) else found


def _module(package: griffe.Module, module: str) -> Any:
    found: Any = package
    for name in module.split(".")[1:]:
        found = found[name]
    return found


def public_names(package: griffe.Module, module: str) -> list[str]:
    """The names of a module's `__all__`, sorted."""
    exports = _module(package, module).exports
    if not exports:
        raise SystemExit(f"{module} has no __all__: expected one, or the names in the comment")
    return sorted({str(getattr(name, "name", name)) for name in exports}, key=str.lower)


def is_same(package: griffe.Module, module: str, other: str, name: str) -> bool:
    """Whether both modules have the same object by this name."""
    theirs = _module(package, other).members.get(name)
    return theirs is not None and _target(_module(package, module)[name]) is _target(theirs)


def problems(package: griffe.Module, module: str, names: list[str]) -> list[str]:
    """Public names that the reference could not explain."""
    found = []
    for name in names:
        try:
            member = _target(_module(package, module)[name])
        except (KeyError, griffe.AliasResolutionError) as error:
            found.append(f"{module}.{name}: not found in the sources ({error})")
            continue
        if member.is_module:
            continue
        if member.is_attribute and not member.docstring:
            found.append(f"{module}.{name}: a value without a text; expected a docstring behind it")
        elif not member.docstring:
            found.append(f"{module}.{name}: no docstring")
    return found


def parameters(package: griffe.Module, module: str, names: list[str]) -> dict[str, list[str]]:
    """The parameters of a module's functions and classes, as the reference shows them."""
    found = {}
    for name in names:
        member = _target(_module(package, module)[name])
        if isinstance(member, (griffe.Function, griffe.Class)):
            shown = [parameter.name for parameter in member.parameters]
            found[name] = [parameter for parameter in shown if parameter != "self"]
    return found
