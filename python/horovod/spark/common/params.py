"""Parameters of estimators and models, with their getters and setters."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, ClassVar

from pyspark.ml.param import Param, Params

_NO_EFFECT = {
    "shuffle_buffer_size": "rows are mixed within a fixed amount of memory",
    "reader_pool_type": "data is read by one thread per rank, without petastorm",
    "train_reader_num_workers": "data is read by one thread per rank",
    "val_reader_num_workers": "data is read by one thread per rank",
    "data_module": "data is read by the estimator's own reader",
    "continuous_cols": "all of feature_cols are read alike",
    "categorical_cols": "all of feature_cols are read alike",
    "transformation_edit_fields": "columns are what transformation_fn returns",
    "transformation_removed_fields": "columns are what transformation_fn returns",
}
# Accessors that are not `get` and the name in CamelCase.
_SPECIAL = {
    "shuffle_buffer_size": "ShufflingBufferSize",
    "train_reader_num_workers": "TrainReaderNumWorker",
    "val_reader_num_workers": "ValReaderNumWorker",
    "inmemory_cache_all": "InMemoryCacheAll",
    "num_gpus": "NumGPUs",
    "mp_start_method": "MpStartMethod",
    "label_cols": "LabelCols",
    "_metadata": "_metadata",
    "_floatx": "_floatx",
    "outputCols": "OutputCols",
}


def _accessor(name: str) -> str:
    if name in _SPECIAL:
        return _SPECIAL[name]
    return "".join(word[:1].upper() + word[1:] for word in name.split("_"))


class TableOfParams(Params):
    """Parameters that each class lists in `PARAMS`, name to default; those of its bases included."""

    PARAMS: ClassVar[dict[str, Any]] = {}
    # Name to reason, of parameters that only this class does not use.
    NO_EFFECT: ClassVar[dict[str, str]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name in cls.__dict__.get("PARAMS", {}):
            if name not in cls.__dict__:
                setattr(cls, name, Param(Params._dummy(), name, name.strip("_").replace("_", " ")))
            suffix = _accessor(name)
            for verb, make in (("get", _getter), ("set", _setter)):
                if verb + suffix not in cls.__dict__:
                    setattr(cls, verb + suffix, make(name))

    def __init__(self, **given: Any) -> None:
        super().__init__()
        self._setDefault(**self.defaults())
        self.setParams(**given)

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        """Names and defaults of all parameters."""
        found: dict[str, Any] = {}
        for base in reversed(cls.__mro__):
            found.update(base.__dict__.get("PARAMS", {}))
        return {
            name: value.copy() if isinstance(value, list | dict) else value
            for name, value in found.items()
        }

    def setParams(self, **given: Any) -> Any:
        """Set several parameters by name."""
        known = self.defaults()
        unknown = [name for name in given if name not in known]
        if unknown:
            raise TypeError(
                f"{type(self).__name__}: unknown parameter {', '.join(unknown)}; known: {', '.join(sorted(known))}"
            )
        for name, value in given.items():
            getattr(self, "set" + _accessor(name))(value)
        return self

    def value_of(self, name: str) -> Any:
        """The value of a parameter, or its default."""
        return self.getOrDefault(self.getParam(name))

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...


def _getter(name: str) -> Any:
    def get(self: Any) -> Any:
        return self.getOrDefault(self.getParam(name))

    get.__doc__ = f"What `{name}` is set to."
    return get


def _setter(name: str) -> Any:
    def set_value(self: Any, value: Any) -> Any:
        reason = {**_NO_EFFECT, **self.NO_EFFECT}.get(name)
        if reason is not None and value is not None and value != self.defaults()[name]:
            warnings.warn(f"{name} is accepted, with no effect: {reason}", stacklevel=2)
        if name in _CHECKS and value is not None:
            _CHECKS[name](name, value)
        self._set(**{name: value})
        return self

    set_value.__doc__ = f"Set `{name}`."
    return set_value


def _positive(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name}: expected a whole number from 1, got {value!r}")


def _start_method(name: str, value: Any) -> None:
    if value not in ("fork", "spawn", "forkserver"):
        raise ValueError(f"{name}: expected 'fork', 'spawn' or 'forkserver', got {value!r}")


_CHECKS = {
    "num_proc": _positive,
    "batch_size": _positive,
    "val_batch_size": _positive,
    "epochs": _positive,
    "partitions_per_process": _positive,
    "backward_passes_per_step": _positive,
    "train_steps_per_epoch": _positive,
    "validation_steps_per_epoch": _positive,
    "mp_start_method": _start_method,
}


class EstimatorParams(TableOfParams):
    """Parameters of the estimators of all frameworks."""

    PARAMS: ClassVar[dict[str, Any]] = {
        "num_proc": None,
        "backend": None,
        "store": None,
        "model": None,
        "optimizer": None,
        "loss": None,
        "loss_weights": None,
        "metrics": [],
        "gradient_compression": None,
        "compress_sparse_cols": False,
        "sample_weight_col": None,
        "feature_cols": None,
        "label_cols": None,
        "continuous_cols": None,
        "categorical_cols": None,
        "validation": None,
        "callbacks": [],
        "batch_size": 32,
        "val_batch_size": None,
        "epochs": 1,
        "verbose": 1,
        "random_seed": None,
        "shuffle_buffer_size": None,
        "shuffle": True,
        "partitions_per_process": 10,
        "run_id": None,
        "train_steps_per_epoch": None,
        "validation_steps_per_epoch": None,
        "transformation_fn": None,
        "transformation_edit_fields": None,
        "transformation_removed_fields": None,
        "train_reader_num_workers": 2,
        "val_reader_num_workers": 2,
        "reader_pool_type": "thread",
        "label_shapes": None,
        "inmemory_cache_all": False,
        "use_gpu": True,
        "mp_start_method": None,
        "data_module": None,
    }


class ModelParams(TableOfParams):
    """Parameters of the models of all frameworks."""

    PARAMS: ClassVar[dict[str, Any]] = {
        "history": None,
        "model": None,
        "feature_columns": None,
        "label_columns": None,
        "run_id": None,
        "_metadata": None,
        "outputCols": None,
    }

    def setLabelColoumns(self, value: Any) -> Any:
        """Set `label_columns`, by the name that scripts know."""
        return self.setLabelColumns(value)

    def getOutputCols(self) -> list[str]:
        """Names of the columns that `transform` adds."""
        names: list[str] | None = self.value_of("outputCols")
        return list(names) if names else [f"{name}__output" for name in self.getLabelColumns()]
