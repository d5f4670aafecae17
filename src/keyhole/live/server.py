"""The page at an address of this machine, alone or beside a served oracle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from keyhole.live.access import HEADERS, refused
from keyhole.live.manager import Runs
from keyhole.live.routes import add_page, make_empty_app
from keyhole.serve.access import Guard, check_client
from keyhole.serve.routes import make_app
from keyhole.serve.served_oracle import Refusal, ServedOracle
from keyhole.serve.server import WebServer

BESIDE = ("/v2", "/openapi.json")  # paths of a served oracle, which has clients of other kinds


class LiveServer(WebServer):
    """The page of some runs. When it ends they are stopped, and their journals keep what was answered."""

    def __init__(
        self,
        runs: Runs,
        host: str = "127.0.0.1",
        port: int = 0,
        served: ServedOracle | None = None,
        token: str | None = None,  # that clients of the oracle must know
        names: Sequence[str] = (),  # of this machine, by which clients of the oracle may come
    ) -> None:
        self.runs, self.served = runs, served
        app = make_empty_app() if served is None else make_app(served, token)
        add_page(app, runs, closing=lambda: self.stopping)
        self._names = tuple(names)
        super().__init__(Guard(app, self._judge, HEADERS), host, port)

    def _judge(self, method: str, path: str, headers: Mapping[str, str]) -> None:
        """Requests of the page by its own rule; those of the oracle's clients by that of a server alone."""
        if self.served is not None and any(path == each or path.startswith(f"{each}/") for each in BESIDE):
            check_client(headers, self.host, self.port, self._names)
            return
        reason = refused(method, path, headers, self.host, self.port)
        if reason is not None:
            raise Refusal(*reason)

    def run(self) -> None:
        """Serve until a signal comes or `stop` is called; then stop the runs."""
        try:
            super().run()
        finally:
            self.runs.close()

    def __exit__(self, *error: object) -> None:
        self.runs.close()  # first, so that pages see how it ends
        super().__exit__(*error)
