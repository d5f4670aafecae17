"""The head that the tests of HTTP serve, and tokens to ask it with."""

from __future__ import annotations

import socket

import numpy as np

import keyhole as kh
from keyhole.arrays import Array
from support import targets as t

WIDTH = 8


def head(width: int = WIDTH) -> kh.SingleHead:
    rng = np.random.default_rng(11)
    return kh.SingleHead(t.gaussian(rng, width), t.normal_value(rng, width))


def some(batch: int = 5, length: int = 2, width: int = WIDTH) -> Array:
    return np.random.default_rng(batch).standard_normal((batch, length, width))


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])
