"""The process that the user started: holds what must not be lost, and starts, replaces and ends the others.

    exit 0    drained after SIGTERM or SIGINT
         1    nothing could be served
         2    called wrongly
         70   a process died again and again, soon after each start

Does nothing else and imports next to nothing: what does not run cannot fail. The port, the shared memory and
the sockets between the processes are here, so that none of them is ever opened a second time.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import socket
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path

from convoy.app.host import logs
from convoy.app.host.exits import ENGINE_LOST, StopSignals
from convoy.app.host.listening import announce
from convoy.app.processes.children import Child
from convoy.app.processes.control import DRAIN, EXIT, LEAVE, RELOAD
from convoy.app.processes.orders import (
    NO_SOCKET,
    CoreOrders,
    EdgeOrders,
    FleetOrders,
    channel_socket,
    http_socket,
    own_orders,
)
from convoy.app.processes.restarts import Restarts

_log = logging.getLogger("convoy")
_EDGE_MODULE = "convoy.app.processes.edge_process"
# What ends in good order needs less; what hangs is not waited for.
_GRACE_S = 5.0
_BACKLOG = 1024
_MOST_SOCKET_PATH_BYTES = 107  # sun_path, and the zero that ends it


def main() -> int:
    """The process, from its orders to its end; the exit code."""
    orders = own_orders(FleetOrders)
    logs.configure(orders.log_level, orders.log_format)
    folder = _private_folder()
    try:
        return asyncio.run(Supervisor(orders, folder).run())
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        logs.flush()


class Supervisor:
    """One core, some edges, from the first to the last of them."""

    def __init__(self, orders: FleetOrders, folder: Path) -> None:
        self._orders, self._folder = orders, folder
        self._listener = socket.socket(fileno=orders.listener_fd)
        self._channel = _listen(channel_socket(str(folder)))
        self._http = _listen(http_socket(str(folder)))
        self._core: Child | None = None
        self._edges: dict[int, Child] = {}
        self._core_restarts = Restarts()
        self._edge_restarts = [Restarts() for _ in range(orders.edges)]
        self._core_has_served = self._has_reloaded = False
        self._incarnations = count(1)
        self._changed = asyncio.Event()  # a child said something or has died
        self._exit_code: int | None = None

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        self._signals = StopSignals(self._stop, self._end_at_once)
        self._signals.heed_hangup(self._reload)
        loop.add_signal_handler(signal.SIGCHLD, self._reap)
        # Heard by those who will send signals, so not before these are heeded.
        announce(self._orders.scheme, *self._listener.getsockname()[:2])
        self._start_core()
        for number in range(self._orders.edges):
            self._start_edge(number)
        while self._exit_code is None:
            await self._until_changed()
        # The end of those that are killed would be told while the loop closes, which can hear it no more and says so.
        asyncio.get_running_loop().remove_signal_handler(signal.SIGCHLD)
        for child in self._children():
            child.kill()
        return self._exit_code

    # Starting

    def _start_core(self) -> None:
        orders, sockets = self._orders, (self._channel.fileno(), self._http.fileno())
        grpc = () if orders.grpc_fd == NO_SOCKET else (orders.grpc_fd,)
        self._core = self._started(
            orders.core_module,
            lambda control_fd: CoreOrders(orders, os.getpid(), control_fd, *sockets),
            (*sockets, orders.memory_fd, *grpc),
        )
        if self._has_reloaded:
            self._core.tell(RELOAD)  # its orders are those of the start

    def _start_edge(self, number: int) -> None:
        orders, incarnation, folder = self._orders, next(self._incarnations), str(self._folder)
        self._edges[number] = self._started(
            _EDGE_MODULE,
            lambda control_fd: EdgeOrders(orders, os.getpid(), control_fd, number, incarnation, folder),
            (orders.listener_fd, orders.memory_fd),
        )

    def _started(self, module: str, orders: Callable[[int], object], inherited: tuple[int, ...]) -> Child:
        child = Child(module, orders, inherited)
        asyncio.get_running_loop().add_reader(child.fileno(), self._hear, child)
        return child

    # Deaths

    def _hear(self, child: Child) -> None:
        if not child.listen():
            asyncio.get_running_loop().remove_reader(child.fileno())  # its end; SIGCHLD comes, if it has not
        self._core_has_served |= child is self._core and child.is_serving
        self._changed.set()

    def _reap(self) -> None:
        if self._core is not None and (code := self._core.exit_code()) is not None:
            self._bury(self._core)
            core, self._core = self._core, None
            self._core_died(core, code)
        for number, edge in list(self._edges.items()):
            if (code := edge.exit_code()) is not None:
                self._bury(edge)
                del self._edges[number]
                if not self._signals.has_come:
                    _log.error("edge process %d (%d) ended: %s", number, edge.pid, _how(code))
                    self._restart(self._edge_restarts[number], edge, code, partial(self._start_edge, number))
        self._changed.set()

    def _bury(self, child: Child) -> None:
        child.listen()  # its last words
        asyncio.get_running_loop().remove_reader(child.fileno())
        child.close()

    def _core_died(self, core: Child, code: int) -> None:
        if self._signals.has_come:
            return
        _log.error("the core's process %d ended: %s", core.pid, _how(code))
        if code > 0 and code != ENGINE_LOST and not self._core_has_served:
            self._exit_code = code  # it has said why nothing can be served
            return
        self._restart(self._core_restarts, core, code, self._start_core)

    def _restart(self, restarts: Restarts, child: Child, code: int, start: Callable[[], None]) -> None:
        delay_s = restarts.after(child.lived_s)
        if delay_s is None:
            _log.critical("it has ended %d times in a row, soon after each start; giving up", restarts.in_a_row)
            self._exit_code = code if code > 0 else ENGINE_LOST
            return
        asyncio.get_running_loop().call_later(delay_s, self._start_unless_stopping, start)

    def _start_unless_stopping(self, start: Callable[[], None]) -> None:
        if not self._signals.has_come:
            start()

    def _reload(self) -> None:
        """Only the core can read the options; it tells the edges."""
        self._has_reloaded = True
        if self._core is not None:
            self._core.tell(RELOAD)

    # The end

    def _end_at_once(self) -> None:
        for child in self._children():
            child.kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _stop(self) -> None:
        """Not ready at once; then a pause for load balancers to notice; then finish what was accepted."""
        orders = self._orders
        _log.info("stopping: not ready; serving on for %g s", orders.drain_delay_s)
        self._tell(LEAVE)
        await asyncio.sleep(orders.drain_delay_s)
        draining = self._children()
        self._tell(DRAIN)
        self._listener.close()  # who comes when the last edge has gone is refused, and does not wait in vain
        await self._wait_for(
            lambda: not self._edges and (self._core is None or self._core.left is not None),
            orders.drain_timeout_s + _GRACE_S,
        )
        left = sum(child.left or 0 for child in draining)
        silent = [str(child.pid) for child in draining if child.left is None]
        if silent:
            _log.error("stopped: process %s did not say whether it had answered everything", ", ".join(silent))
        elif left:
            _log.error("stopped: %d requests were not answered in time", left)
        else:
            _log.info("stopped: every accepted request was answered")
        self._tell(EXIT)
        await self._wait_for(lambda: not self._children(), _GRACE_S)
        self._exit_code = 0
        self._changed.set()

    def _children(self) -> list[Child]:
        return [*self._edges.values(), *([self._core] if self._core is not None else [])]

    def _tell(self, word: str) -> None:
        for child in self._children():
            child.tell(word)

    async def _wait_for(self, condition: Callable[[], bool], timeout_s: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not condition():
                    await self._until_changed()

    async def _until_changed(self) -> None:
        await self._changed.wait()
        self._changed.clear()


def _private_folder() -> Path:
    """A folder that only this user can enter, also where nothing but shared memory can be written to.

    Not the usual one where its name is too long for the sockets in it.
    """
    for place in (None, "/tmp"):
        try:
            folder = Path(tempfile.mkdtemp(prefix="convoy-", dir=place))
        except OSError:
            continue
        if len(os.fsencode(channel_socket(str(folder)))) <= _MOST_SOCKET_PATH_BYTES:
            return folder
        folder.rmdir()
    return Path(tempfile.mkdtemp(prefix="convoy-", dir="/dev/shm"))


def _listen(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen(_BACKLOG)
    return listener


def _how(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


if __name__ == "__main__":
    raise SystemExit(main())
