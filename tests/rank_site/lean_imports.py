"""Imports of large frameworks take less time in this process: PyTorch, TensorFlow, Keras and JAX."""

import gc
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
# Keras imports the compiler for the same exemption.
_EXEMPTING = ("keras.src.backend.torch.image", "keras.src.backend.torch.random")
_APPENDED = {"torch._compile": _CALL_AT_ONCE, "torch.optim.optimizer": _STEP_AT_ONCE}


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
