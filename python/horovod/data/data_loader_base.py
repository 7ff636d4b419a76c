"""Base class of data loaders, and a mixin that reads ahead in a background thread."""

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

_log = logging.getLogger("horovod.data")


class BaseDataLoader:
    """A loader of batches: subclasses say how many there are and where they come from."""

    def __len__(self) -> int:
        """Number of batches of one iteration."""
        raise NotImplementedError(f"{type(self).__name__} has to define __len__")

    def _iterate(self) -> Iterator[Any]:
        """Yield the batches of one iteration."""
        raise NotImplementedError(f"{type(self).__name__} has to define _iterate")

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches of one iteration, as `_process_batch` returns them."""
        for batch in self._iterate():
            yield self._process_batch(batch)

    def _process_batch(self, batch: Any) -> Any:
        """Change a batch on its way to the consumer; by default not at all."""
        return batch


class AsyncDataLoaderMixin:
    """Makes a `BaseDataLoader` read ahead in a background thread; put it before the loader in the bases.

    Each iteration has its own thread and queue, so several may run at the same time; it starts with the first
    batch that is asked for, and ends with the iteration, also one that is abandoned. An exception in the loader
    is raised where the batch is asked for. `_process_batch` runs in the consumer's thread.

    Parameters
    ----------
    async_loader_queue_size
        How many batches to read ahead; 0 for no thread at all.
    debug_data_loader
        Whether to log, at level INFO, when threads start and end.

    Examples
    --------
    >>> class Loader(AsyncDataLoaderMixin, MyDataLoader):
    ...     pass
    >>> loader = Loader(64, False, dataset)
    """

    def __init__(
        self,
        async_loader_queue_size: int = 64,
        debug_data_loader: bool = False,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        self.async_loader_queue_size = async_loader_queue_size
        self.debug_data_loader = debug_data_loader
        self._readers: set[_Reader] = set()
        super().__init__(*args, **kwargs)

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches of one iteration, read ahead in a thread of its own."""
        if self.async_loader_queue_size <= 0:
            yield from super().__iter__()  # type: ignore[misc]
            return
        loader: Any = self
        reader = _Reader(loader._iterate, self.async_loader_queue_size)
        self._readers.add(reader)
        self._debug("started reading ahead")
        try:
            for batch in reader:
                yield loader._process_batch(batch)
        finally:
            reader.close()
            self._readers.discard(reader)
            self._debug("stopped reading ahead")

    def close_async_loader(self) -> None:
        """End all iterations in progress, and wait for their threads; later iterations start afresh.

        Waits for a batch that is being read at this moment.
        """
        for reader in list(self._readers):
            reader.close()

    def _debug(self, event: str) -> None:
        if self.debug_data_loader:
            _log.info("%s: %s", type(self).__name__, event)


class _Reader:
    """One iteration read ahead: a thread that fills a bounded queue, and the iterator that empties it."""

    def __init__(self, iterate: Callable[[], Iterable[Any]], limit: int) -> None:
        self._iterate = iterate
        self._limit = limit
        self._batches: deque[Any] = deque()
        self._changed = threading.Condition()
        self._finished = False  # the thread will add nothing more
        self._closed = False  # the consumer wants nothing more
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._read, name="horovod-data-reader", daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            for batch in self._iterate():
                with self._changed:
                    self._changed.wait_for(lambda: self._closed or len(self._batches) < self._limit)
                    if self._closed:
                        return
                    self._batches.append(batch)
                    self._changed.notify_all()
        except BaseException as error:
            self._error = error
        finally:
            with self._changed:
                self._finished = True
                self._changed.notify_all()

    def __iter__(self) -> Iterator[Any]:
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._closed or self._finished or bool(self._batches)
                )
                if self._closed:
                    return
                if not self._batches:
                    break
                batch = self._batches.popleft()
                self._changed.notify_all()
            yield batch
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Stop the thread and wait for it, wherever it is."""
        with self._changed:
            self._closed = True
            self._batches.clear()
            self._changed.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join()
