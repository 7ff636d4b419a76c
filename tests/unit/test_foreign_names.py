"""Imports of scripts for the original besides `horovod.torch`: they work, or the error says what to do."""

from __future__ import annotations

import importlib
import importlib.util
import queue
import re
import subprocess
import sys
import threading
from pathlib import Path
from unittest import mock

import pytest

import harness
import horovod
import horovod.torch as hvd
from horovod import _absent, _core
from horovod.common import elastic
from horovod.common._news import HostMessages
from horovod.runner.elastic import discovery
from horovod.runner.elastic.worker import HostUpdateResult
from horovod.runner.util import threads
from horovod.spark import conf

MODULES = [
    *("gloo_run", "mpi_run", "js_run", "task_fn", "driver.driver_service", "http.http_client"),
    *("common.util.settings", "common.util.config_parser", "common.util.network"),
    *("common.util.safe_shell_exec", "common.service.task_service", "util.network", "util.lsf"),
    *("elastic.driver", "elastic.settings", "elastic.rendezvous", "elastic.registration"),
    "elastic.constants",
]


@pytest.mark.parametrize("name", MODULES)
def test_a_module_of_the_originals_launcher_says_what_to_use(name: str) -> None:
    with pytest.raises(ModuleNotFoundError, match=r"does not exist in horovod-rs: \w+") as caught:
        importlib.import_module(f"horovod.runner.{name}")
    assert "horovod.runner" in str(caught.value)
    parent, _, last = f"horovod.runner.{name}".rpartition(".")
    with pytest.raises(ImportError, match="does not exist in horovod-rs"):
        exec(f"from {parent} import {last}")


@pytest.mark.parametrize("name", ["driver.job_id", "driver.driver_service", "gloo_run", "mpi_run"])
def test_a_module_of_the_originals_spark_says_what_to_use(name: str) -> None:
    text = r"horovod\.spark\.\w+ of the original .* horovod\.spark\.run"
    with pytest.raises(ModuleNotFoundError, match=text):
        importlib.import_module(f"horovod.spark.{name}")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("common.cache", "prepare_data"),
        ("common.constants", "a fixed amount of memory"),
        ("keras.util", r"model\.save"),
        ("lightning.util", r"model\.save"),
        ("torch.util", r"model\.save"),
        ("tensorflow.compute_worker", r"horovod\.tensorflow\.data\.compute_worker\.main"),
    ],
)
def test_a_module_of_the_originals_estimators_says_what_to_use(name: str, text: str) -> None:
    advice = _absent.advice(f"horovod.spark.{name}")
    assert advice is not None
    assert re.search(rf"^horovod\.spark\.\S+ of the original .*{text}", advice)


def test_a_constant_of_the_originals_spark_says_what_to_use() -> None:
    with pytest.raises(ImportError, match=r"SPARK_CONF_REUSE.* builder\.config"):
        exec("from horovod.spark.conf import SPARK_CONF_REUSE")
    assert not hasattr(conf, "SPARK_CONF_REUSE")
    assert conf.SPARK_CONF_BLACKLIST_DISABLED[1] == "false"


def test_who_asks_first_gets_a_plain_answer() -> None:
    assert importlib.util.find_spec("horovod.runner.gloo_run") is None


def test_handlers_of_the_originals_rendezvous_say_what_to_use() -> None:
    with pytest.raises(ImportError, match=r"http_server\.KVStoreServer .*HOROVOD_RANK0_ADDRESS"):
        exec("from horovod.runner.http.http_server import KVStoreServer")


@pytest.mark.parametrize("name", ["parse_args", "check_build", "run_controller"])
def test_a_function_of_the_originals_launcher_says_what_to_use(name: str) -> None:
    with pytest.raises(ImportError, match=rf"horovod\.runner\.launch\.{name} .*horovodrun"):
        exec(f"from horovod.runner.launch import {name}")


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("horovod.runner.launch", "parse_args"),
        ("horovod.runner.elastic.discovery", "HostManager"),
        ("horovod.runner.launch", "nothing"),
    ],
)
def test_who_only_looks_for_an_attribute_finds_none(module: str, name: str) -> None:
    found = importlib.import_module(module)
    assert not hasattr(found, name)
    assert getattr(found, name, 7) == 7
    with pytest.raises(AttributeError):
        mock.patch(f"{module}.{name}").start()


def test_the_error_of_an_attribute_of_the_original_says_what_to_use() -> None:
    with pytest.raises(AttributeError, match=r"launch\.parse_args .*horovodrun parses its own"):
        _ = importlib.import_module("horovod.runner.launch").parse_args


def test_what_is_only_misspelled_fails_as_ever() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'horovod\.torhc'$"):
        importlib.import_module("horovod.torhc")
    with pytest.raises(ImportError, match="cannot import name 'nothing'"):
        exec("from horovod.runner.launch import nothing")
    assert _absent.advice("horovod.torch") is None


def test_no_name_in_the_table_exists() -> None:
    home = Path(horovod.__file__).parent.parent
    for name in _absent._INSTEAD:
        if ":" not in name:
            place = home / name.replace(".", "/")
            assert not place.is_dir(), name
            assert not place.with_suffix(".py").is_file(), name


def test_an_adapter_without_its_framework_says_what_to_install() -> None:
    code = (
        "import importlib.util\n"
        "found = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *a: None if name == 'torch' else found(name, *a)\n"
        "import horovod.torch"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=harness.LIMIT_S,
        check=False,
    )
    assert "horovod.torch needs PyTorch, which is not installed for" in done.stderr
    assert "pip install torch" in done.stderr


def test_functions_in_threads() -> None:
    done = threading.Event()
    thread = threads.in_thread(lambda *args: args == (1, 2) and done.set(), (1, 2), name="t")
    assert thread.daemon
    assert done.wait(60)
    threads.in_thread(lambda: 1 / 0, silent=True).join(60)
    with pytest.raises(ValueError, match="args: expected a tuple"):
        threads.in_thread(print, "text")

    event, stop, called = threading.Event(), threading.Event(), threading.Event()
    waiting = threads.on_event(event, called.set, stop=stop, check_stop_interval_s=0.01)
    event.set()
    waiting.join(60)
    assert called.is_set()
    with pytest.raises(ValueError, match="stop: expected an event with daemon=False"):
        threads.on_event(event, called.set, daemon=False)
    never = threading.Event()
    waiting = threads.on_event(threading.Event(), never.set, (), stop, 0.01)
    stop.set()
    waiting.join(60)
    assert not waiting.is_alive()
    assert not never.is_set()

    squares = threads.execute_function_multithreaded(lambda a: a * a, [(1,), (2,), (3,)])
    assert squares == {0: 1, 1: 4, 2: 9}
    with pytest.raises(RuntimeError, match=r"call 1 of .* failed: ZeroDivisionError"):
        threads.execute_function_multithreaded(lambda a: 1 / a, [(1,), (0,)], True, 1)
    gate, passed = threading.Event(), threading.Event()
    calls = [(lambda: gate.wait(60),), (passed.set,)]
    assert threads.execute_function_multithreaded(lambda f: f(), calls, False, 1) is None
    assert not passed.is_set()
    gate.set()
    assert passed.wait(60)
    with pytest.raises(ValueError, match="must be larger than 0"):
        threads.execute_function_multithreaded(print, [], max_concurrent_executions=0)


def test_discoveries() -> None:
    script = discovery.HostDiscoveryScript("echo a:2; echo; echo b", 3)
    assert script.find_available_hosts_and_slots() == {"a": 2, "b": 3}
    with pytest.raises(ValueError, match="the line 'b' tells no slots"):
        discovery.HostDiscoveryScript("echo b").find_available_hosts_and_slots()
    with pytest.raises(RuntimeError, match="Exit code: 3"):
        discovery.HostDiscoveryScript("exit 3", 1).find_available_hosts_and_slots()
    fixed = discovery.FixedHosts({"a": 1})
    fixed.set({"b": 2})
    assert fixed.find_available_hosts_and_slots() == {"b": 2}
    with pytest.raises(NotImplementedError):
        discovery.HostDiscovery().find_available_hosts_and_slots()
    with pytest.raises(ImportError, match="host-discovery-script"):
        exec("from horovod.runner.elastic.discovery import HostManager")


def test_a_states_messages_hold_the_launchers_news_and_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    news = [(0, 0)]
    monkeypatch.setattr(_core, "is_initialized", lambda: True)
    monkeypatch.setattr(_core, "host_updates", lambda: news[-1])
    messages = HostMessages()
    assert messages.empty()
    with pytest.raises(queue.Empty):
        messages.get_nowait()
    news.append((4, int(HostUpdateResult.added)))
    assert not messages.empty()
    assert messages.qsize() == 1
    assert messages.get()[1] == HostUpdateResult.added
    assert messages.empty()
    news.append((5, int(HostUpdateResult.mixed)))
    assert not messages.empty()
    messages.acted_upon(5)
    assert messages.empty()
    messages.put((1.0, HostUpdateResult.removed))
    assert messages.get(timeout=1) == (1.0, HostUpdateResult.removed)
    with pytest.raises(queue.Empty):
        messages.get(timeout=0)
    messages.put((2.0, HostUpdateResult.removed))
    assert messages.take_given() == [1]


def test_the_notification_manager_tells_states() -> None:
    state = elastic.ObjectState(lambda value, root_rank: value, lambda: 0)
    manager = elastic.notification_manager
    manager.init()
    manager.register_listener(state)
    manager.handle_hosts_updated(7.0, HostUpdateResult.added)
    manager.remove_listener(state)
    manager.handle_hosts_updated(8.0, HostUpdateResult.added)
    assert state._host_messages.get_nowait() == (7.0, HostUpdateResult.added)
    assert state._host_messages.empty()


def test_queries_can_be_patched() -> None:
    for target in ("horovod.torch.mpi_enabled", "horovod.torch.mpi_ops.mpi_enabled"):
        with mock.patch(target, return_value=True):
            pass
    with mock.patch("horovod.torch.mpi_enabled", return_value=True):
        assert hvd.mpi_enabled()
    assert not hvd.mpi_enabled()
