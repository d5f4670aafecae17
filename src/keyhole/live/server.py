"""The page at an address of this machine, alone or beside a served oracle."""

from __future__ import annotations

from keyhole.live.access import Access
from keyhole.live.manager import Runs
from keyhole.live.routes import add_page, make_empty_app
from keyhole.serve.routes import make_app
from keyhole.serve.served_oracle import ServedOracle
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
    ) -> None:
        self.runs, self.served = runs, served
        app = make_empty_app() if served is None else make_app(served, token)
        add_page(app, runs, closing=lambda: self.stopping)
        super().__init__(Access(app, lambda: (self.host, self.port), BESIDE if served is not None else ()), host, port)

    def run(self) -> None:
        """Serve until a signal comes or `stop` is called; then stop the runs."""
        try:
            super().run()
        finally:
            self.runs.close()

    def __exit__(self, *error: object) -> None:
        self.runs.close()  # first, so that pages see how it ends
        super().__exit__(*error)
