"""What the two processes of the kill test do: `serve` a box that logs every question it sees, and `run` a recovery."""

from __future__ import annotations

import hashlib
import json
import time
from multiprocessing.connection import Client, Listener
from pathlib import Path

import numpy as np

import keyhole as kh

WIDTH = 16
BATCH_LIMIT = 4
SECONDS_PER_BATCH = 0.004


def target() -> kh.SingleHead:
    rng = np.random.default_rng(5)
    return kh.SingleHead(rng.standard_normal((WIDTH, WIDTH)), rng.standard_normal(WIDTH))


def serve(address: str, log: str) -> None:
    """Answer one run after the other. A question is logged before it is answered."""
    head, run = target(), 0
    with Listener(address, family="AF_UNIX") as listener, Path(log).open("a", buffering=1) as book:
        while True:
            with listener.accept() as connection:
                run += 1
                try:
                    while True:
                        tokens = connection.recv()
                        questions = [hashlib.sha256(sequence.tobytes()).hexdigest() for sequence in tokens]
                        book.write(json.dumps({"run": run, "questions": questions}) + "\n")
                        time.sleep(SECONDS_PER_BATCH)
                        connection.send(head(tokens))
                except (EOFError, ConnectionError):
                    continue  # the run ended, or was killed


def run(address: str, journal: str, out: str) -> None:
    """One recovery."""
    with Client(address, family="AF_UNIX") as connection:

        def ask(tokens: np.ndarray) -> np.ndarray:
            connection.send(tokens)
            return connection.recv()

        oracle = kh.FunctionOracle(ask, width=WIDTH, batch_limit=BATCH_LIMIT, name="slow box")
        result = kh.recover(oracle, journal=journal)
    unfinished = Path(out + ".part")
    with unfinished.open("wb") as file:
        np.savez(
            file,
            score=result.params.score,
            value=result.params.value,
            score_radius=result.certificate.radius.score,
            worst_error=result.certificate.worst_error,
            queries=result.stats.queries,
            new_queries=result.stats.new_queries,
        )
    unfinished.rename(out)
