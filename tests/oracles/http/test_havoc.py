"""A server between the two that does everything wrong: the right result, or a clear error."""

from __future__ import annotations

import threading
import time
from collections import Counter
from functools import cache
from pathlib import Path

import numpy as np
import pytest

import keyhole as kh
from keyhole.arrays import Array
from keyhole.oracles import HttpOracle, Oracle, Wrapper
from keyhole.serve import Server
from support.served_head import WIDTH, free_port, head
from support.serving import description, digest, havoc, serving

pytest.importorskip("orjson")
pytest.importorskip("fastapi")


BATCH = 3


class Witness(Wrapper):
    """Compares every answer that is believed with the truth, and keeps the questions."""

    def __init__(self, inner: Oracle) -> None:
        super().__init__(inner)
        self.wrong = 0
        self.believed = 0

    def change(self, answers: Array) -> Array:
        self.believed += len(answers)
        return answers

    def answer(self, tokens: Array) -> Array:
        answers, truth = super().answer(tokens), head()
        exact = truth.with_arrays({name: 0 * array for name, array in truth.arrays().items()})
        rounding = truth.error_bar(exact, tokens, np.finfo(float).eps)  # logits of long tokens round to much
        self.wrong += int(np.sum(np.abs(answers - truth(tokens)) > 1e-12 + rounding))
        return answers


@cache
def asked_in_process(batch: int) -> Counter[bytes]:
    """Queries of a recovery in such batches: roundings depend on batches, and queries on the bits of answers."""
    asked: Counter[bytes] = Counter()

    def spy(tokens: Array) -> Array:
        asked.update(digest(sequence) for sequence in tokens)
        return head()(tokens)

    kh.recover(kh.FunctionOracle(spy, width=WIDTH, batch_limit=batch))
    return asked


FAULTS: dict[str, dict[str, float]] = {
    "the lot": {
        "500": 0.05,
        "hang": 0.05,
        "truncate": 0.04,
        "duplicate": 0.06,
        "stale": 0.04,
        "late": 0.06,
        "wrong shape": 0.02,
        "cut": 0.02,
        "garbage": 0.02,
        "drop": 0.02,
        "nan": 0.01,
    },
    **{
        fault: {fault: 0.2}
        for fault in ("500", "drop", "truncate", "cut", "garbage", "stale", "duplicate", "wrong shape", "nan")
    },
    "hang": {"hang": 0.05},
}


@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize("name", FAULTS)
def test_havoc_ends_in_the_right_result_or_a_clear_error(
    server: Server, name: str, binary: bool, tmp_path: Path, fresh_seed: int
) -> None:
    """No garbled answer is believed, and no answer that arrived is asked for again, over any number of runs."""
    expected = asked_in_process(BATCH)
    timeout = 0.5 if "hang" in FAULTS[name] else 10.0
    with havoc(server.url, FAULTS[name], fresh_seed, timeout) as (state, url):
        for _ in range(60):
            oracle = HttpOracle(
                url, binary=binary, batch=BATCH, connections=2, timeout=timeout, retries=3, name="a head behind a proxy"
            )
            witness = Witness(oracle)
            result = kh.recover(witness, journal=tmp_path / "journal.db", throw=False)
            oracle.close()
            assert witness.wrong == 0
            if result.certified:
                break
            assert result.outcome is kh.Outcome.ORACLE_FAILED, result.message
            assert "/infer" in result.message
        else:
            pytest.fail("60 runs were not enough")
        assert kh.distance(result.params, head()) < 1e-12
        assert sum(state.done[fault] for fault in FAULTS[name]) > 0
        assert state.delivered
        # What arrived was never asked again; where rounding decides what is asked, it may be another query than here.
        assert not [query for query, times in state.delivered.items() if times > max(1, expected[query])]


def test_a_server_that_is_restarted_mid_run(tmp_path: Path) -> None:
    """The run goes on where the server comes back in time, and nothing that was answered is asked again."""
    seen: Counter[bytes] = Counter()

    def slow(tokens: Array) -> Array:
        time.sleep(0.003)
        seen.update(digest(sequence) for sequence in tokens)
        return head()(tokens)

    box = kh.FunctionOracle(slow, width=WIDTH, name="a head")
    port = free_port()
    running = serving(box, port)
    running.__enter__()
    oracle = HttpOracle(f"http://127.0.0.1:{port}/v2/models/box", batch=1, connections=2, retries=12)
    done: list[kh.Recovery] = []
    thread = threading.Thread(target=lambda: done.append(kh.recover(oracle, throw=False)))
    thread.start()
    while sum(seen.values()) < 40:
        time.sleep(0.005)
    running.__exit__(None, None, None)
    time.sleep(0.1)
    with serving(box, port):
        thread.join()
    oracle.close()
    (result,) = done
    assert result.certified, result.message
    assert kh.distance(result.params, head()) < 1e-12
    assert oracle.retried
    repeated = seen - asked_in_process(1) - Counter({digest(np.zeros((1, WIDTH))): 2})  # the first question of a server
    # Only what was under way when the server went, each time counted as asked again.
    assert sum(repeated.values()) <= sum(oracle.retried.values())


def test_a_run_is_resumed_when_the_server_comes_back(tmp_path: Path) -> None:
    journal, port = tmp_path / "journal.db", free_port()
    box = kh.FunctionOracle(head(), width=WIDTH, name="a head")
    with serving(box, port, rate=1e9) as running:
        oracle = HttpOracle(running.url, batch=1, connections=2, retries=0)
        half = kh.recover(oracle, journal=journal, budget=50, throw=False)
        assert half.outcome is kh.Outcome.BUDGET_EXHAUSTED
    result = kh.recover(oracle, journal=journal, throw=False)
    assert result.outcome is kh.Outcome.ORACLE_FAILED
    assert "server running" in result.message
    with serving(box, port) as running:
        result = kh.recover(HttpOracle(running.url), journal=journal)
        assert running.served.queries == result.stats.new_queries == sum(asked_in_process(BATCH).values()) - 50


def test_description_is_that_of_a_model() -> None:
    assert set(description()) >= {"name", "inputs", "outputs"}
