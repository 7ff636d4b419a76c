"""Saving and loading of estimators and models, alone and within ML pipelines."""

from __future__ import annotations

import base64
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
import pyspark
from pyspark.ml.util import (
    DefaultParamsReader,
    DefaultParamsWriter,
    MLReadable,
    MLReader,
    MLWritable,
    MLWriter,
)

# They belong to the session that made them.
_NOT_SAVED = ("store", "backend")


def encode(value: Any) -> str:
    """An object as text."""
    return base64.b64encode(cloudpickle.dumps(value)).decode()


def decode(text: str) -> Any:
    """The object of such a text."""
    return cloudpickle.loads(base64.b64decode(text))


def require_picklable(what: str, values: dict[str, Any]) -> None:
    """Raise TypeError that names the first value which cannot be pickled."""
    for name, value in values.items():
        try:
            cloudpickle.dumps(value)
        except Exception as error:
            raise TypeError(
                f"{what}: {name} cannot be sent to the ranks: {type(error).__name__}: {error}; "
                "make open files, locks and connections inside the function that uses them"
            ) from error


def _for_metadata(session: Any) -> Any:
    """Argument of Spark's functions for metadata: before Spark 4 the context, which sessions of Spark Connect lack."""
    return session if int(pyspark.__version__.partition(".")[0]) >= 4 else session.sparkContext


class ParamsWriter(MLWriter):
    """Writes parameters as JSON, each value pickled."""

    def __init__(self, instance: Any) -> None:
        super().__init__()
        self.instance = instance

    def saveImpl(self, path: str) -> None:
        """Write to a folder that Spark can write."""
        values = {param.name: value for param, value in self.instance._paramMap.items()}
        saved = {
            name: None if name in _NOT_SAVED or value is None else encode(self._plain(name, value))
            for name, value in values.items()
        }
        spark = _for_metadata(self.sparkSession)
        DefaultParamsWriter.saveMetadata(self.instance, path, spark, paramMap=saved)

    def _plain(self, name: str, value: Any) -> Any:
        return self.instance.to_plain(name, value)


class ParamsReader(MLReader):
    """Reads what `ParamsWriter` has written. The file can run code: load only what you trust."""

    def __init__(self, cls: Any) -> None:
        super().__init__()
        self.cls = cls

    def load(self, path: str) -> Any:
        """A new instance, with the parameters and the uid as saved."""
        metadata = DefaultParamsReader.loadMetadata(path, _for_metadata(self.sparkSession))
        instance = self.cls()
        instance._resetUid(metadata["uid"])
        for name, text in metadata["paramMap"].items():
            value = None if text is None else instance.from_plain(name, decode(text))
            instance._set(**{name: value})
        return instance


class Saved(MLReadable, MLWritable):
    """An estimator or model that can be saved and loaded."""

    def write(self) -> ParamsWriter:
        """The writer of this instance."""
        return ParamsWriter(self)

    def save(self, path: str) -> None:
        """Write to a folder that does not exist yet; `write().overwrite().save(path)` takes any."""
        self.write().save(path)

    @classmethod
    def read(cls) -> ParamsReader:
        """The reader of this class."""
        return ParamsReader(cls)

    @classmethod
    def load(cls, path: str) -> Any:
        """An instance that was saved."""
        return cls.read().load(path)

    def to_plain(self, name: str, value: Any) -> Any:
        """A parameter's value as something that pickles."""
        del name
        return value

    def from_plain(self, name: str, value: Any) -> Any:
        """The value of what `to_plain` returned."""
        del name
        return value
