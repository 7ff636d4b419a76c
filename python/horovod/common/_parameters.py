"""The tensors of a model, as scripts hand them over, with the names by which they travel."""

from collections.abc import Iterable, MutableMapping
from typing import Any, TypeVar

T = TypeVar("T")


def named_values(
    params: Any, tensor: type[T], *no_collections: type
) -> tuple[list[tuple[str | None, T]], dict[str, Any]]:
    """Tensors with their names, None where there is none; and, of a dict, the values that are no tensors, but None.

    Parameters
    ----------
    params
        A dict, in the order of its keys, or an iterable of `(name, tensor)` pairs or of tensors.
    tensor
        The class of tensors.
    no_collections
        Further classes whose objects may not be given, though something can be iterated over.

    Raises
    ------
    ValueError
        `params` is none of the above.
    """
    named = _named(params, (tensor, *no_collections, str, bytes))
    tensors = [(name, value) for name, value in named if isinstance(value, tensor)]
    objects = {
        name: value for name, value in named if value is not None and not isinstance(value, tensor)
    }
    if objects and not isinstance(params, MutableMapping):
        wrong = next(iter(objects.values()))
        raise ValueError(f"invalid params of type: {type(wrong).__name__} among the tensors")
    return tensors, objects


def _named(params: Any, no_collections: tuple[type, ...]) -> list[tuple[Any, Any]]:
    if isinstance(params, MutableMapping):
        return sorted(params.items())
    if not isinstance(params, Iterable) or isinstance(params, no_collections):
        raise ValueError(
            f"invalid params of type: {type(params).__name__}; pass a dict or pairs of names and tensors, such as "
            "model.state_dict() or model.named_parameters()"
        )
    named: list[tuple[Any, Any]] = []
    for item in params:
        if not isinstance(item, tuple):
            named.append((None, item))
        elif len(item) == 2 and isinstance(item[0], str):
            named.append(item)
        else:
            raise ValueError(f"invalid params of type: tuple of {len(item)}, not (name, tensor)")
    return named
