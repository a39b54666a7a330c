"""A process with limits of time and memory, for what a checkpoint makes Python compute: the chat
template and the metadata of its model card.
"""

import contextlib
import json
import multiprocessing
import os
import resource
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from kvfold.convert.errors import summarize_error

_MEMORY = 512 << 20


class LimitedProcess:
    """Calls ``function`` in a forked process with at most ``seconds`` and 512 MiB for each call.

    A limit in the same process would not do: Python interrupts no operation that is written in C,
    such as ``3 ** 10**9``. The process starts with the first call; one that exceeds a limit is
    killed, and the next call starts another. It ends with this object.
    """

    def __init__(self, function: Callable[..., Any], seconds: float) -> None:
        self._function = function
        self._seconds = seconds
        self._connection: Connection | None = None

    def call(self, *arguments: Any) -> Any:
        """The result of ``function(*arguments)``; both must be JSON values. Raises TimeoutError if
        the call exceeds a limit, and ValueError with the error's text if it raises another error.
        """
        # fork: the function need not be importable, and nothing is imported again
        context = multiprocessing.get_context("fork")
        if self._connection is None:
            self._connection, other = context.Pipe()
            settings = (self._function, self._seconds, self._connection, other)
            self._process = context.Process(target=_answer_calls, args=settings, daemon=True)
            self._process.start()
            other.close()
        with contextlib.suppress(EOFError, OSError):  # the process died: of memory, most likely
            self._connection.send_bytes(json.dumps(arguments).encode())
            if self._connection.poll(self._seconds):
                result, error = json.loads(self._connection.recv_bytes())
                if error is not None:
                    raise ValueError(error)
                return result
        self._connection.close()
        self._connection = None
        self._process.kill()
        self._process.join()
        raise TimeoutError


def _answer_calls(
    function: Callable[..., Any], seconds: float, parent: Connection, own: Connection
) -> None:
    """Send the result or the error of ``function`` for each list of arguments received from
    ``own``, until the other end, ``parent``, is closed. Exceeding a limit ends the process.
    """
    parent.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: the parent ends this process
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    statistics = Path("/proc/self/statm")
    if statistics.exists():  # Linux
        present = int(statistics.read_text().split()[5]) * resource.getpagesize()
        before, hard = resource.getrlimit(resource.RLIMIT_DATA)
        limits = [limit for limit in (before, hard) if limit != resource.RLIM_INFINITY]
        resource.setrlimit(resource.RLIMIT_DATA, (min([present + _MEMORY, *limits]), hard))
    with contextlib.suppress(EOFError, OSError):
        while True:
            arguments = json.loads(own.recv_bytes())
            signal.alarm(int(seconds) + 1)  # should the parent be killed meanwhile
            answer: tuple[Any, str | None]
            try:
                answer = function(*arguments), None
            except MemoryError:
                break
            except Exception as error:
                answer = None, summarize_error(error)
            signal.alarm(0)
            own.send_bytes(json.dumps(answer, default=str).encode())
    os._exit(0)
