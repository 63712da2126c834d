"""Processes that work together and end together, and signals that end them with a sentence.

The parent alone decides: its children ignore SIGINT and SIGTERM, which a terminal or a scheduler sends to all of a
group, and never outlive it, however it ends.
"""

from __future__ import annotations

import ctypes
import math
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from multiprocessing.reduction import DupFd
from typing import Any

Send = Callable[[Any], None]

_PR_SET_PDEATHSIG = 1
_POLL = 0.5  # seconds between two looks at the parent, where the system cannot be asked to watch it
_GRACE = 1.0  # seconds in which the other processes may say more about a failure
_DOUBLE = 2.0  # seconds in which a second signal means the same as the first


class Ended(RuntimeError):
    """A process that ended without a word; the message is the predicate of a sentence."""


class _Traceback(Exception):
    """Where an error arose in another process, as text."""


class Terminated(BaseException):
    """SIGTERM, as KeyboardInterrupt is SIGINT."""


def together(function: Callable[[int, Send], Any], count: int, *, receive: Send, hold: Sequence[int] = ()) -> Any:
    """Call ``function(rank, send)`` in ``count`` fresh processes, and return what rank 0 returns.

    What rank 0 sends is handed to ``receive``, here. The first failure, a signal to this process included, ends
    all of them. Each child has the file descriptors ``hold`` open while it lives, and with them their locks.
    """
    members: list[_Member] = []
    readers: list[Connection] = []
    try:
        for rank in range(count):
            reader, writer = multiprocessing.Pipe(duplex=False)
            readers.append(reader)
            members.append(_Member(target=_work, args=(function, rank, writer)))
            members[-1].hold = tuple(hold)
            members[-1].start()
            writer.close()  # so that the pipe ends with the child
        return _listen(members, readers, receive)
    finally:
        started = [member for member in members if member.pid is not None]
        for member in started:
            member.kill()
        for member in started:
            member.join()


def _listen(members: Sequence[_Member], readers: Sequence[Connection], receive: Send) -> Any:
    running: dict[Any, int] = dict(zip(readers, range(len(members)), strict=True))
    returned: dict[int, Any] = {}
    failures: list[BaseException] = []
    deadline = math.inf
    while running and (left := deadline - time.monotonic()) > 0:
        for reader in wait(list(running), None if left == math.inf else left):
            rank = running[reader]  # type: ignore[index]
            try:
                message = reader.recv_bytes()  # type: ignore[union-attr]
            except (EOFError, OSError):  # the process has ended, perhaps in the midst of a message
                del running[reader]  # type: ignore[arg-type]
                members[rank].join()
                if rank not in returned:
                    # A kill comes first: what the others say is that they lost that process.
                    killed = (members[rank].exitcode or 0) < 0
                    failures.insert(0 if killed else len(failures), Ended(_how(members[rank].exitcode)))
                continue
            kind, content = pickle.loads(message)
            if kind == "failed":
                error, text = content
                error.__cause__ = _Traceback(text)
                failures.append(error)
            elif kind == "returned":
                returned[rank] = content
            elif rank == 0 and not failures:
                receive(content)
        if failures and deadline == math.inf:
            deadline = time.monotonic() + _GRACE
    if failures:
        raise failures[0]
    return returned[0]


def _how(code: int | None) -> str:
    if code is not None and code < 0:
        cause = ", as when memory runs out" if -code == signal.SIGKILL else ""
        return f"was killed by {signal.Signals(-code).name}{cause}"
    return f"ended with code {code}"


def _work(function: Callable[[int, Send], Any], rank: int, writer: Connection) -> None:
    def send(kind: str, content: Any) -> None:
        writer.send_bytes(pickle.dumps((kind, content)))  # whole: tensors, too, not as handles of shared memory

    try:
        value = function(rank, partial(send, "sent"))
    except BaseException as error:
        text = "".join(traceback.format_exception(error))
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:  # an error that cannot travel
            error = RuntimeError(str(error))
        send("failed", (error, text))
        sys.exit(1)
    send("returned", value if rank == 0 else None)


class _Member(SpawnProcess):
    """A child that guards against outliving its parent before it does anything else, such as import torch."""

    hold: tuple[int, ...] = ()

    def __reduce__(self) -> tuple[Any, ...]:
        # Pickled while the child starts: it calls _join first, then unpickles the state, with all it needs.
        return _join, (os.getpid(), [DupFd(fd) for fd in self.hold]), self.__dict__


def _join(parent: int, held: Sequence[Any]) -> _Member:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    end_with(parent)
    for fd in held:
        os.set_inheritable(fd.detach(), False)  # never closed: it is to go with the process
    return _Member.__new__(_Member)


def end_with(parent: int) -> None:
    """See to it that this process does not outlive the process ``parent``, which started it, however that ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    threading.Thread(target=_watch, args=(parent,), daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_POLL)
    os.kill(os.getpid(), signal.SIGKILL)


def handle_signals() -> None:
    """Make the first SIGINT or SIGTERM an exception in the main thread, once, so that everything can end well.

    A person's second Ctrl-C would fall into the midst of that and is not heard; later ones end the process at
    once, in case it hangs. A signal that is ignored, as SIGINT is for a script's background jobs, stays ignored.
    """
    first: list[float] = []

    def handle(number: int, frame: object) -> None:
        if not first:
            first.append(time.monotonic())
            raise KeyboardInterrupt if number == signal.SIGINT else Terminated
        if time.monotonic() > first[0] + _DOUBLE:
            os._exit(128 + number)

    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, handle)
