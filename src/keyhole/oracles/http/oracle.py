"""A model behind a server of the Open Inference Protocol v2 (KServe, Triton, `keyhole serve`) as an oracle."""

from __future__ import annotations

import re
from typing import Any, Literal
from urllib.parse import urlsplit
from weakref import finalize

import numpy as np

from keyhole.arrays import Array, Space
from keyhole.errors import UsageError
from keyhole.noise import Noise
from keyhole.optional import extra
from keyhole.oracles.base import Oracle
from keyhole.oracles.http.access import Access, check_address, check_whole
from keyhole.oracles.http.batches import Batches
from keyhole.oracles.http.metadata import EXAMPLE, Told, is_ready, look
from keyhole.oracles.http.tensors import TensorQueries
from keyhole.queries import Signature

URL = re.compile(r"(?P<server>https?://.+?)/v2/models/(?P<model>[^/]+)(?:/versions/(?P<version>[^/]+))?(?:/infer)?/?")
BATCH = 512  # sequences per request, unless the server takes fewer


class HttpOracle(Oracle):
    """A model at `http://host:port/v2/models/name`, asked over HTTP.

    Width, datatypes and the shape of answers come from the model's metadata; give `width`, `positions`, `input_name`,
    `output_name` or `datatype` where it leaves them open, and `answers="labels"` of a model that answers with labels.
    Tensors travel as binary data where the server takes that: tried once where it does not say. A batch is
    split into requests of at most `batch` sequences over so many `connections`. No answer in `timeout` seconds, a
    lost connection or a failure of the server is asked again at most `retries` times, and a server that asks to wait
    is waited for up to `patience` seconds per request; `requests` and `retried` count it. `token_env` names the
    environment variable that holds a token, sent as `header`. `ca` is a file of certificates to trust, `proxy` the
    address of a proxy, "none" for none; left out, both are those of the environment.
    """

    def __init__(
        self,
        url: str,
        width: int | None = None,
        max_norm: float | None = None,
        max_length: int | None = None,
        positions: Literal["last", "all"] | None = None,
        noise: Noise | str | None = None,
        *,
        input_name: str | None = None,
        output_name: str | None = None,
        datatype: str | None = None,
        binary: bool | None = None,
        batch: int | None = None,
        connections: int = 4,
        timeout: float = 30.0,
        retries: int = 5,
        patience: float = 300.0,
        token_env: str | None = None,
        header: str = "Authorization",
        ca: str | None = None,
        proxy: str | None = None,
        require_id: bool = True,
        answers: Literal["numbers", "labels"] | None = None,
        name: str | None = None,
    ) -> None:
        self.url, self._server = _address(url)
        check_whole("batch", batch or 1, 1)
        extra("orjson", "http", "asking a server")
        access = Access(
            connections=connections,
            timeout=timeout,
            retries=retries,
            patience=patience,
            token_env=token_env,
            header=header,
            ca=ca,
            proxy=proxy,
        )
        self._exchange = access.exchange(self.url)
        finalize(self, self._exchange.close)  # where nobody calls close
        try:
            told = Told(input_name, output_name, datatype, binary)
            self.model = look(self._exchange, self._server, self.url, told)
            self._places = self.model.places(positions)
            most = min(batch or BATCH, self.model.batch_limit or batch or BATCH)
            space, places = Space.of(np.zeros(1, dtype=self.model.dtype)), positions or self._places
            own = self.model.noise if noise is None else Noise.of(noise)
            said = answers or ("labels" if self.model.answers.labels else "numbers")
            width = self.model.width(width)
            self.signature = Signature(width, space, max_norm, max_length, places, own, most * connections, said)
        except BaseException:
            self._exchange.close()
            raise
        self.lanes = connections
        self._queries = TensorQueries(self._exchange, self.model, self._places, require_id=require_id)
        self._batches = Batches(self._queries.ask, most, connections)
        versions = f" version {','.join(self.model.versions)}" if self.model.versions else ""
        self.name = name or f"{self.url}{versions} {self.model.tokens.name} to {self.model.answers.name}"

    @property
    def batch(self) -> int:
        """Most sequences per request."""
        return self._batches.most

    @property
    def binary(self) -> bool | None:
        """Whether tensors travel as binary data; None until a reply has shown it."""
        return self._queries.binary

    @property
    def requests(self) -> int:
        """Inference requests sent, those sent again included."""
        return self._exchange.requests

    @property
    def retried(self) -> dict[str, int]:
        """How often something was asked again, by reason."""
        return dict(self._exchange.retried)

    def facts(self) -> dict[str, Any]:
        """Requests and repetitions, for the report."""
        return self._exchange.facts()

    def ready(self) -> bool:
        """Whether server and model are ready, as they say themselves."""
        return is_ready(self._exchange, self._server, self.url)

    def close(self) -> None:
        """Close the connections."""
        self._exchange.close()
        self._batches.close()

    def answer(self, tokens: Array) -> Array:
        """Ask, in as many requests as it takes; what arrived before one of them failed goes with the error."""
        values = self._batches.answer(tokens, self)
        if self._places == "all" and self.signature.positions == "last":
            values = values[:, -1]
        return self.signature.space.asarray(values)


def _address(url: str) -> tuple[str, str]:
    """Address of the model, and of its server."""
    check_address(url, EXAMPLE)
    parts = urlsplit(url)
    if parts.query or parts.fragment:
        raise UsageError(f"{url!r} has something behind the name of the model: write {EXAMPLE}")
    found = URL.fullmatch(url)
    if found is None or not parts.hostname:
        raise UsageError(f"{url!r} is no address of a model: write {EXAMPLE}, or https://")
    version = f"/versions/{found['version']}" if found["version"] else ""
    return f"{found['server']}/v2/models/{found['model']}{version}", found["server"]
