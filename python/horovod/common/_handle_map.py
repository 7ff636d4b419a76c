"""Handles whose results nobody has taken yet, as a collection."""

from collections.abc import Collection, Iterator

from horovod import _core


class HandleMap(Collection[int]):
    """Handles of operations whose results nobody has taken yet; the results themselves are the core's."""

    def __len__(self) -> int:
        return len(_core.handles())

    def __iter__(self) -> Iterator[int]:
        return iter(_core.handles())

    def __contains__(self, handle: object) -> bool:
        return handle in _core.handles()
