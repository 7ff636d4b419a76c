"""Imports of large frameworks take less time in this process: PyTorch, TensorFlow, Keras and JAX. One rank compiles a
program of JAX for all."""

import gc
import importlib
import importlib.machinery
import sys

# Modules, and whether later garbage collections skip their objects.
_SPARED = {"torch": True, "torch._dynamo": False, "tensorflow": True, "jax": True, "keras": False}


# The first optimizer and its first step import PyTorch's compiler, only to exempt functions from compilation. This
# import takes as long as all others together. Until something else imports the compiler, no function needs the
# exemption.
_CALL_AT_ONCE = """
import sys as _sys

def _unless_imported(real, fn):
    @functools.wraps(fn)
    def inner(*args, **kwargs):
        if "torch._dynamo" in _sys.modules:
            return real(*args, **kwargs)
        return fn(*args, **kwargs)
    return inner

_real = _disable_dynamo

def _disable_dynamo(fn=None, recursive=True):
    if fn is None:
        return functools.partial(_disable_dynamo, recursive=recursive)
    return _unless_imported(_real(fn, recursive), fn)

disable = _disable_dynamo
"""
_STEP_AT_ONCE = """
import sys as _sys

_real = _use_grad_for_differentiable

def _use_grad_for_differentiable(func):
    in_graph = _real(func)

    @functools.wraps(func)
    def step(self, *args, **kwargs):
        if "torch._dynamo" in _sys.modules:
            return in_graph(self, *args, **kwargs)
        with torch.set_grad_enabled(self.defaults["differentiable"]):
            return func(self, *args, **kwargs)

    return step
"""
# Ranks need a program at the same time. The first one compiles it and writes it into JAX's cache; the others read it.
_COMPILE_ONCE = """
import fcntl as _fcntl
import os as _os

_compile = _compile_and_write_cache

def _compile_and_write_cache(
    backend, computation, executable_devices, compile_options, host_callbacks, module_name, cache_key
):
    words = (backend, computation, executable_devices, compile_options, host_callbacks, module_name, cache_key)
    folder = config.compilation_cache_dir.value
    if not folder:
        return _compile(*words)
    try:
        lock = open(_os.path.join(folder, cache_key + ".lock"), "a")
    except OSError:  # a full disk, or a folder of another user: JAX itself only warns
        return _compile(*words)
    with lock:
        _fcntl.flock(lock, _fcntl.LOCK_EX)
        found, _ = _cache_read(
            module_name, cache_key, compile_options, backend, executable_devices
        )
        return found or _compile(*words)
"""
# A reader sees the whole program or none, also if the rank that writes it is killed.
_WHOLE_PROGRAMS = """
import os as _os

def _put_whole(self, key, value):
    path = _os.path.join(_os.fspath(self.path), key + _CACHE_SUFFIX)
    part = f"{path}.{_os.getpid()}"
    with open(part, "wb") as file:
        file.write(value)
    _os.replace(part, path)

LRUCache.put = _put_whole
"""
# Keras imports the compiler for the same exemption.
_EXEMPTING = ("keras.src.backend.torch.image", "keras.src.backend.torch.random")
_APPENDED = {
    "torch._compile": _CALL_AT_ONCE,
    "torch.optim.optimizer": _STEP_AT_ONCE,
    "jax._src.compiler": _COMPILE_ONCE,
    "jax._src.lru_cache": _WHOLE_PROGRAMS,
}


def _with(spec, text):
    """The module with `text` at its end, under its file's name: by that the compiler recognises the functions."""
    if spec is not None and spec.loader is not None:
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            exec(compile(text, module.__file__, "exec"), module.__dict__)

        spec.loader.exec_module = exec_module
    return spec


def _without_the_compiler(spec):
    """The module with `disable` of `torch._compile` in place of the compiler's."""
    if spec is not None and spec.loader is not None:
        source = spec.loader.get_source(spec.name)
        source = source.replace("import torch._dynamo as dynamo", "import torch._compile as dynamo")

        def exec_module(module):
            exec(compile(source, module.__file__, "exec"), module.__dict__)

        spec.loader.exec_module = exec_module
    return spec


# This module takes a fifth of the time of PyTorch's import. It computes shapes for tensors without data, mostly for the
# compiler. It is executed when one of its names is used or when the compiler is imported.
_ON_DEMAND = "torch._meta_registrations"


def _on_demand(spec):
    """The module, which stays empty until one of its names is used."""
    if spec is not None and spec.loader is not None:
        execute = spec.loader.exec_module

        def exec_module(module):
            def load(name):
                if name.startswith("__"):
                    raise AttributeError(name)
                if module.__dict__.pop("__getattr__", None):
                    execute(module)
                return getattr(module, name)

            module.__getattr__ = load
            # `torch.Generator` needs this now; the module's own imports would have done it.
            torch = sys.modules["torch"]
            if set_metaclass := getattr(torch._C, "_set_generator_metaclass", None):
                set_metaclass(
                    importlib.import_module("torch._custom_class_base").CustomClassBaseMeta
                )

        spec.loader.exec_module = exec_module
    return spec


# Optional imports of framework modules that no test uses. They take a third of the time that TensorFlow's import takes.
_MISSING_TO = {
    "jax": ("tensorflow.lite.", "keras.src.callbacks.orbax_checkpoint"),
    "matplotlib": "keras.src.visualization.",
    "pandas": "keras.src.trainers.",
    "sklearn": "keras.src.wrappers.",
}


def _is_missing(name):
    frame = sys._getframe(2)
    while frame and frame.f_globals.get("__name__", "").startswith("importlib"):
        frame = frame.f_back
    return frame is not None and frame.f_globals.get("__name__", "").startswith(_MISSING_TO[name])


class _WithoutCollections:
    """Imports large modules without garbage collections, which saves a quarter to a half of the time.

    Most of their objects live as long as the process, so later collections skip them too. Objects of PyTorch's compiler
    are collected: otherwise libraries below it print warnings at exit.
    """

    def find_spec(self, name, path=None, target=None):
        if name in _MISSING_TO and _is_missing(name):
            raise ModuleNotFoundError(f"{name} is optional here, and left out in tests", name=name)
        if name in _APPENDED:
            return _with(
                importlib.machinery.PathFinder.find_spec(name, path, target), _APPENDED[name]
            )
        if name in _EXEMPTING:
            return _without_the_compiler(
                importlib.machinery.PathFinder.find_spec(name, path, target)
            )
        if name == _ON_DEMAND:
            return _on_demand(importlib.machinery.PathFinder.find_spec(name, path, target))
        if name == "torch._dynamo" and _ON_DEMAND in sys.modules:
            # Any name of the module executes it.
            _ = sys.modules[_ON_DEMAND].utils
        if name not in _SPARED:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module):
            is_enabled = gc.isenabled()
            gc.disable()
            try:
                execute(module)
            finally:
                if _SPARED[name]:
                    gc.freeze()
                if is_enabled:
                    gc.enable()

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, _WithoutCollections())
