"""Runs the web application until it is told to stop; what is being answered then is answered first."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Self

from keyhole.errors import UsageError
from keyhole.optional import extra
from keyhole.serve.access import Guard, check_client
from keyhole.serve.routes import make_app
from keyhole.serve.served_oracle import ServedOracle

GRACE_SECONDS = 10  # for answers under way, once the server is told to stop
IDLE_SECONDS = 75  # a connection that is not used is kept for so long


class WebServer:
    """A web application at an address. The port is taken when it is made; 0 takes any that is free.

    `run` serves until a signal or `stop`; as a context manager it serves from another thread.
    """

    def __init__(self, app: Any, host: str, port: int) -> None:
        uvicorn = extra("uvicorn", "serve", "serving")
        config = uvicorn.Config(
            app,
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            lifespan="off",
            ws="none",
            timeout_keep_alive=IDLE_SECONDS,
            timeout_graceful_shutdown=GRACE_SECONDS,
        )
        self._socket = _listen(host, port)
        self._server = _quiet(uvicorn.Server)(config)
        self._thread: threading.Thread | None = None
        self.host, self.port = host, int(self._socket.getsockname()[1])

    @property
    def address(self) -> str:
        """Where it is."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    @property
    def stopping(self) -> bool:
        """Whether it was told to end."""
        return bool(self._server.should_exit)

    def run(self) -> None:
        """Serve until a signal comes or `stop` is called."""
        try:
            self._server.run(sockets=[self._socket])
        finally:
            self._socket.close()

    def stop(self) -> None:
        """Take no more requests, answer those under way, and end."""
        self._server.should_exit = True

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=WebServer.run, args=(self,), name="keyhole-serve", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()
        if self._thread is not None:
            self._thread.join()


class Server(WebServer):
    """An oracle at an address."""

    def __init__(
        self,
        served: ServedOracle,
        host: str = "127.0.0.1",
        port: int = 8000,
        token: str | None = None,
        names: Sequence[str] = (),  # of this machine, by which clients may come besides its address
    ) -> None:
        self.served, self._names = served, tuple(names)
        super().__init__(Guard(make_app(served, token), self._judge), host, port)

    def _judge(self, method: str, path: str, headers: Mapping[str, str]) -> None:  # noqa: ARG002 - all requests alike
        check_client(headers, self.host, self.port, self._names)

    @property
    def url(self) -> str:
        """The address of the model."""
        return f"{self.address}/v2/models/{self.served.name}"


def _listen(host: str, port: int) -> socket.socket:
    """A socket that takes connections from now on: whoever comes before the server runs waits."""
    if not 0 <= port < 2**16:
        raise UsageError(f"port {port} is none: ports are 0 (any that is free) to 65535")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        made = socket.socket(family, kind, protocol)
        try:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.bind(address)
            made.listen()
        except BaseException:
            made.close()
            raise
    except OSError as error:
        reason = error.strerror or str(error)
        raise UsageError(
            f"cannot listen at {host}, port {port}: {reason}; choose another with --port, 0 takes any"
        ) from error
    return made


def _quiet(base: type[Any]) -> Callable[..., Any]:
    """The server of uvicorn, which would raise the signal that stopped it once more when all is done."""

    class Quiet(base):  # type: ignore[misc]
        @contextmanager
        def capture_signals(self) -> Iterator[None]:
            if threading.current_thread() is not threading.main_thread():
                yield
                return
            signals = (signal.SIGINT, signal.SIGTERM)
            before = {each: signal.signal(each, self.handle_exit) for each in signals}
            try:
                yield
            finally:
                for each, handler in before.items():
                    signal.signal(each, handler)

    return Quiet
