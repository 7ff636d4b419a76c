"""Ranks of tests that are forked from a process that has imported their frameworks.

A rank of a job with `forked=True` (tests/harness.py) starts as usual. Then `sitecustomize` calls `run_in_a_fork`, which
sends its arguments, variables, folder and standard streams to a server: `python forked_ranks.py LISTENER`. For each set
of frameworks and of their settings the server has one process that has imported them. That process forks a watcher,
which forks the rank. The process that the launcher has started passes signals on, and ends as the rank ends. If it ends
first, the watcher kills the rank. A rank with options of Python, other variables or no framework runs its program
itself.
"""

import atexit
import builtins
import contextlib
import ctypes
import gc
import importlib
import importlib.machinery
import json
import os
import re
import runpy
import select
import signal
import socket
import sys
import tempfile
import types

# Matches `import torch` and `import horovod.torch`.
_IMPORTS = re.compile(
    r"^(?:import|from) (?:horovod\.)?(tensorflow|torch|keras|jax)\b", re.MULTILINE
)
# Matches an assignment to a variable that a framework reads while it is imported.
_SETS = re.compile(r"environ(\.setdefault)?\W+((?:JAX|KERAS|TF|XLA)_\w+)")
# Beginnings of variables that no framework reads while it is imported. Keras reads a file in HOME: the server has an
# empty one.
_NOT_READ_AT_IMPORT = (
    "CUDA_VISIBLE_DEVICES",
    *("HOROVOD_", "HVD_TEST_", "GPU_DOUBLE", "HOME", "TMPDIR", "PWD", "PYTHONDONTWRITEBYTECODE"),
    *("RAYON_NUM_THREADS", "TF_NUM_INTRAOP_THREADS"),
)
# Beginnings of those that a framework reads. Ranks that differ in these are forked from different processes. Any other
# difference is unusual: TF_USE_LEGACY_KERAS has TensorFlow start a thread while it is imported.
_READ_AT_IMPORT = {
    "torch": (),
    "jax": ("JAX_", "TF_CPP_MIN_LOG_LEVEL", "XLA_FLAGS"),
    "tensorflow": ("KERAS_BACKEND", "TF_CPP_MIN_LOG_LEVEL", "XLA_FLAGS"),
    "keras": ("JAX_", "KERAS_BACKEND", "TF_CPP_MIN_LOG_LEVEL", "XLA_FLAGS"),
}
_FORWARDED = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR2)
_NAMESPACES = ("user", "mnt")
_BEGUN = b"begun"
_MESSAGE_BYTES_MAX = 1 << 17
# Each of these processes has some hundred megabytes.
_FRAMEWORKS_MAX = 6
# The last variable of the server. In a forked rank its place has the rank's variables, so that `/proc` shows them.
_ENVIRON_ROOM = "HVD_TEST_ROOM"
_ENVIRON_ROOM_BYTES = 1 << 16
_LIBC = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG = 1


# -- in the process that the launcher has started


def run_in_a_fork():
    """If a forked process can run this rank's program, end as it ends; else return."""
    path = os.environ.pop("HVD_TEST_FORKS")
    words = sys.orig_argv[1:]
    has_options = not words or (words[0].startswith("-") and words[0] != "-m")
    frameworks = [] if has_options else _frameworks(words)
    if not frameworks:
        return
    received = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:

        def forward(number, _frame):
            received.append(number)
            with contextlib.suppress(OSError):
                server.send(bytes([number]))

        usual = {number: signal.signal(number, forward) for number in _FORWARDED}
        try:
            if _request_fork(server, path, {"frameworks": frameworks, "words": words}):
                _end_like_rank(server)
        finally:
            for number, handler in usual.items():
                signal.signal(number, handler)
    for number in received:
        os.kill(os.getpid(), number)


def _frameworks(words):
    """Those that the program imports; none where it sets variables that frameworks read when they are imported."""
    texts = [f"import {words[1]}"] if words[0] == "-m" else []
    for word in words:
        if word.endswith(".py"):
            with contextlib.suppress(OSError), open(word, encoding="utf-8") as file:
                texts.append(file.read())
    sets = [found for text in texts for found in _SETS.findall(text)]
    if any(name not in os.environ or not is_default for is_default, name in sets):
        return []
    return sorted({name for text in texts for name in _IMPORTS.findall(text)})


def _request_fork(server, path, request):
    """Whether a forked process runs the program. A server that cannot be reached runs none."""
    umask = os.umask(0)
    os.umask(umask)
    request |= {
        "executable": sys.executable,
        "folder": os.getcwd(),
        "umask": umask,
        "processors": sorted(os.sched_getaffinity(0)),
        "variables": dict(os.environ),
    }
    with contextlib.ExitStack() as opened:
        files = [opened.enter_context(open(f"/proc/self/ns/{name}")) for name in _NAMESPACES]
        fds = [0, 1, 2, *(file.fileno() for file in files)]
        # The request is the first message: a signal that comes before it is forwarded after it.
        signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)
        try:
            server.connect(path)
            socket.send_fds(server, [json.dumps(request).encode()], fds)
        except OSError:
            return False
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED)
        with contextlib.suppress(OSError):
            return server.recv(_MESSAGE_BYTES_MAX) == _BEGUN
    return False


def _end_like_rank(server):
    status = b""
    with contextlib.suppress(OSError):
        status = server.recv(_MESSAGE_BYTES_MAX)
    if not status:
        os.write(2, b"the process that this rank was forked from has ended\n")
        os._exit(1)
    code = os.waitstatus_to_exitcode(int(status))
    if code >= 0:
        os._exit(code)
    if code != -signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
    signal.pause()


# -- in the server


def dispatch_requests(listener):
    """Pass each request to a process with its frameworks until standard input ends. Return in forked ranks alone."""
    processes = {}
    while 0 not in select.select([listener, 0], [], [])[0]:
        rank, _ = listener.accept()
        message, fds, *_ = socket.recv_fds(rank, _MESSAGE_BYTES_MAX, 3 + len(_NAMESPACES))
        fds = [rank.detach(), *fds]
        try:
            request = json.loads(message)
        except ValueError:  # the rank has ended before it sent its request
            request = {}
        if key := _key_of_process(request):
            process = processes.pop(key, None)
            if process is None:
                if len(processes) == _FRAMEWORKS_MAX:
                    processes.pop(next(iter(processes))).close()
                process, other_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                if os.fork() == 0:
                    for one in (listener, process, *processes.values()):
                        one.close()
                    _close(fds)
                    return _fork_ranks(request, other_end)
                other_end.close()
            # The last one is the one that was used last.
            processes[key] = process
            with contextlib.suppress(OSError):
                socket.send_fds(process, [message], fds)
        _close(fds)
    for process in processes.values():
        process.close()
    with contextlib.suppress(ChildProcessError):
        while True:
            os.wait()
    os._exit(0)


def _key_of_process(request):
    """Says which process a rank is forked from; empty if from none."""
    if request.get("executable") != sys.executable:
        return ""
    frameworks, settings = request["frameworks"], _differing(request)
    if not all(name.startswith(sum(_READ_AT_IMPORT.values(), ())) for name in settings):
        return ""
    read = sum((_READ_AT_IMPORT[framework] for framework in frameworks), ())
    return json.dumps([frameworks, {k: v for k, v in settings.items() if k.startswith(read)}])


def _differing(request):
    """The rank's variables that are not the server's."""
    variables = request["variables"]
    names = sorted({*os.environ, *variables} - {_ENVIRON_ROOM})
    wanted = {
        name: variables.get(name) for name in names if not name.startswith(_NOT_READ_AT_IMPORT)
    }
    return {name: value for name, value in wanted.items() if value != os.environ.get(name)}


def _fork_ranks(request, channel):
    """Import the frameworks, then fork a rank for each request. Return in the ranks alone."""
    _die_with_parent()
    for name, value in _differing(request).items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
    earlier, imported, variables = set(sys.modules), [], dict(os.environ)
    atexit.register(_keep_modules, imported)
    for name in request["frameworks"]:
        importlib.import_module(name)
    imported.extend(name for name in sys.modules if name not in earlier)
    # Frameworks set some, and folders for temporary files are the rank's own.
    set_here = {
        name: value
        for name, value in os.environ.items()
        if variables.get(name) != value and not value.startswith(tempfile.gettempdir())
    }
    gc.collect()
    gc.freeze()
    # A forked process would lack the other threads.
    while len(os.listdir("/proc/self/task")) == 1:
        message, fds, *_ = socket.recv_fds(channel, _MESSAGE_BYTES_MAX, 4 + len(_NAMESPACES))
        if not message:
            break
        if os.fork() == 0:
            channel.close()
            _die_with_parent()
            pid = os.fork()
            if pid == 0:
                request = json.loads(message)
                request["variables"] = {**set_here, **request["variables"]}
                return request, fds
            _close(fds[1:])
            _watch(pid, fds[0], json.loads(message)["variables"])
        _close(fds)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
    with contextlib.suppress(ChildProcessError):
        while True:
            os.wait()
    os._exit(0)


def _watch(pid, connection, variables):
    """Pass signals on to a rank and tell how it ended; kill it if nobody is there to be told."""
    end = os.pidfd_open(pid)
    sources = [connection, end]
    while end not in select.select(sources, [], [])[0]:
        numbers = b""
        with contextlib.suppress(ConnectionResetError):
            numbers = os.read(connection, 64)
        if not numbers:
            numbers, sources = [signal.SIGKILL], [end]
        for number in numbers:
            try:
                os.killpg(pid, number)
            except ProcessLookupError:  # it has no group yet
                os.kill(pid, number)
    _, status, used = os.wait4(pid, 0)
    # No process of the test's waits for this rank, so its processor time is noted (tests/harness.py).
    with contextlib.suppress(OSError), open(variables["HVD_TEST_FORKED_S"], "a") as file:
        file.write(f"{used.ru_utime + used.ru_stime}\n")
    with contextlib.suppress(OSError):
        os.write(connection, str(status).encode())
        # Closed before its last signals are read, the connection would be reset, and the status lost.
        while os.read(connection, 64):
            pass
    os._exit(0)


# -- in the rank


def run(request, fds):
    """Become as the process that the launcher has started, and run the program."""
    _die_with_parent()
    os.setsid()
    connection, *streams = fds[:4]
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    for name, fd in zip(_NAMESPACES, fds[4:], strict=True):
        is_here = os.path.samestat(os.fstat(fd), os.stat(f"/proc/self/ns/{name}"))
        if not is_here and _LIBC.setns(fd, 0) != 0:
            raise OSError(ctypes.get_errno(), "setns")
    os.chdir(request["folder"])
    os.umask(request["umask"])
    os.sched_setaffinity(0, request["processors"])
    _set_variables(request["variables"])
    os.write(connection, _BEGUN)
    _close(fds)
    _forget_what_processes_do_not_share()
    # The frameworks' libraries do not clean up, which would copy most of this process's memory. Those that the program
    # loads have done so before.
    _LIBC.on_exit(_LIBC._exit, None)
    _run_program(request["words"])


def _keep_modules(names):
    """The last function at exit: the interpreter does not take these modules apart, because that copies memory."""
    kept = [sys.modules.pop(name) for name in names if name in sys.modules]
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))


def _set_variables(variables):
    os.environ.clear()
    os.environ.update(variables)
    sys.dont_write_bytecode = "PYTHONDONTWRITEBYTECODE" in variables
    fields = open("/proc/self/stat").read().rpartition(")")[2].split()  # noqa: SIM115
    begin, end = int(fields[47]), int(fields[48])
    begin += ctypes.string_at(begin, end - begin).rindex(f"{_ENVIRON_ROOM}=".encode())
    text = b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in variables.items())
    text += f"{_ENVIRON_ROOM}=".encode()
    if begin + len(text) >= end:
        raise OSError(f"more than {_ENVIRON_ROOM_BYTES} bytes of variables")
    ctypes.memmove(begin, text, len(text))


def _forget_what_processes_do_not_share():
    # The seed of hashes stays: forked ranks walk a set of strings in one order, started ranks in several.
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()
    tempfile.tempdir = None
    importlib.reload(sys.modules["sitecustomize"])


def _run_program(words):
    sys.orig_argv[1:] = words
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    names = vars(main)
    names |= {"__annotations__": {}, "__builtins__": builtins, "__cached__": None}
    if words[0] == "-m":
        sys.path[0] = os.getcwd()
        sys.argv[:] = ["-m", *words[2:]]
        runpy._run_module_as_main(words[1])
    else:
        sys.path[0] = os.path.dirname(os.path.realpath(words[0]))
        sys.argv[:] = words
        names["__file__"] = words[0]
        names["__loader__"] = importlib.machinery.SourceFileLoader("__main__", words[0])
        with open(words[0], "rb") as file:
            code = compile(file.read(), words[0], "exec")
        exec(code, names)


def _close(fds):
    for fd in fds:
        os.close(fd)


def _die_with_parent():
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    if _ENVIRON_ROOM not in os.environ:
        # The last variable, for a dictionary keeps its order.
        with_room = {**os.environ, _ENVIRON_ROOM: "." * _ENVIRON_ROOM_BYTES}
        os.execve(sys.executable, sys.orig_argv, with_room)
    run(*dispatch_requests(socket.socket(fileno=int(sys.argv[1]))))
