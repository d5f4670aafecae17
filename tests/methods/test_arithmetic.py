"""The border around arithmetic: what fails or takes too long between two queries is an outcome; the rest is kept."""

from __future__ import annotations

import math
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import keyhole as kh
from keyhole.errors import NumericalError, RecoveryFailed, TimeExhausted, UsageError
from keyhole.journal import Journal
from keyhole.methods import METHODS, certificate
from keyhole.methods.arithmetic import ComputeLimit, default_limit, is_arithmetic, partial_result
from keyhole.methods.base import Estimate, Method, Steps
from keyhole.oracles import Counted
from keyhole.oracles.base import Oracle
from keyhole.queries import Signature, sequences
from keyhole.recover import diagnose
from keyhole.recovery import Outcome
from keyhole.runs.settings import Settings
from keyhole.session import Session, box_of
from keyhole.verify import judge

WIDTH = 3
QUERIES = 5
HEAD = kh.SingleHead(np.eye(WIDTH), np.arange(1.0, WIDTH + 1))


def spin() -> None:
    while True:
        math.sqrt(2.0)


def singular() -> None:
    np.linalg.inv(np.zeros((2, 2)))


FAILURES: dict[str, Callable[[], Any]] = {
    "singular": singular,
    "division": lambda: 1 / int(np.zeros(1)[0]),
    "overflow": lambda: math.exp(1e6),
    "infinity as an integer": lambda: int(float("inf")),
    "nan as an integer": lambda: int(float("nan")),
    "math domain": lambda: math.log(-1.0),
    "an SVD of nan": lambda: np.linalg.svd(np.full((2, 2), np.nan)),
    "floating point": lambda: (_ for _ in ()).throw(FloatingPointError("underflow")),
}
BUGS: dict[str, Callable[[], Any]] = {
    "type": lambda: len(3),  # type: ignore[arg-type]
    "key": lambda: {}["x"],
    "shape": lambda: np.zeros(2) + np.zeros(3),
    "index": lambda: [0][int(np.ones(1)[0])],
}


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], Any]], str]:
    """A method that knows something, asks a few queries, and then does what it was given."""

    def plant(does: Callable[[], Any]) -> str:
        def run(signature: Signature, rng: np.random.Generator) -> Steps[Estimate]:
            with partial_result(lambda _: HEAD):
                yield sequences("first look", signature.space.asarray(rng.standard_normal((QUERIES, 1, WIDTH))))
                does()
            raise AssertionError

        monkeypatch.setitem(METHODS, "planted", Method("planted", "for a test", run))
        return "planted"

    return plant


@pytest.mark.parametrize("name", FAILURES)
def test_arithmetic_that_fails_is_an_outcome_with_what_was_known(
    tmp_path: Path, name: str, planted: Callable[[Callable[[], Any]], str]
) -> None:
    oracle = Counted(kh.FunctionOracle(HEAD, width=WIDTH))
    method = planted(FAILURES[name])
    result = kh.recover(oracle, method, journal=tmp_path / "j", throw=False)
    assert result.outcome is Outcome.ARITHMETIC_FAILED
    assert "'first look'" in result.message
    assert result.params is HEAD
    assert (result.stats.queries, result.stats.stages) == (QUERIES, {"first look": QUERIES})
    again = kh.recover(oracle, method, journal=tmp_path / "j", throw=False)
    assert (again.stats.queries, again.stats.new_queries, oracle.queries) == (QUERIES, 0, QUERIES)
    with pytest.raises(RecoveryFailed) as caught:
        kh.recover(oracle, method)
    cause = caught.value.__cause__
    assert isinstance(cause, NumericalError)
    assert cause.__cause__ is not None
    assert is_arithmetic(cause.__cause__)


@pytest.mark.parametrize("name", BUGS)
def test_errors_in_the_code_itself_are_raised(name: str, planted: Callable[[Callable[[], Any]], str]) -> None:
    with pytest.raises((TypeError, KeyError, ValueError, IndexError)) as caught:
        kh.recover(kh.FunctionOracle(HEAD, width=WIDTH), planted(BUGS[name]), throw=False)
    assert not isinstance(caught.value, kh.KeyholeError)


def test_a_method_without_end_is_ended(tmp_path: Path, planted: Callable[[Callable[[], Any]], str]) -> None:
    began = time.perf_counter()
    oracle = kh.FunctionOracle(HEAD, width=WIDTH)
    result = kh.recover(oracle, planted(spin), journal=tmp_path / "j", throw=False, max_seconds=0.2)
    assert time.perf_counter() - began < 5
    assert result.outcome is Outcome.TIME_EXHAUSTED
    assert "'first look'" in result.message
    assert "of 0.2 s" in result.message
    assert result.params is HEAD
    assert result.stats.queries == QUERIES
    with Journal(tmp_path / "j", box_of(oracle)):  # which opens, and is nobody else's
        pass
    settings = Settings("demo:single-head", "planted", journal=tmp_path / "j", max_seconds=0.2)
    assert "--max-seconds 2" in str(settings.resume(result, WIDTH))


def test_time_between_two_queries_is_looked_at_where_nothing_can_be_interrupted(
    planted: Callable[[Callable[[], Any]], str],
) -> None:
    result = kh.recover(
        kh.FunctionOracle(HEAD, width=WIDTH), planted(lambda: time.sleep(0.3)), throw=False, max_seconds=0.1
    )
    assert result.outcome is Outcome.TIME_EXHAUSTED


def test_the_time_of_the_oracle_does_not_count() -> None:
    def slow(tokens: Any) -> Any:
        time.sleep(0.05)
        return HEAD(tokens)

    result = kh.recover(kh.FunctionOracle(slow, width=WIDTH), max_seconds=0.5, throw=False)
    assert result.stats.oracle_seconds > 0.3
    assert result.outcome is Outcome.CERTIFIED


def test_a_limit_ends_what_goes_on_after_the_first_exception_and_nothing_outside() -> None:
    limit = ComputeLimit(lambda: 0.05)

    def stubborn() -> None:
        with limit:
            try:
                spin()
            except TimeExhausted:
                spin()

    with pytest.raises(TimeExhausted):
        stubborn()
    limit.close()
    time.sleep(0.2)  # nothing is left behind that could be raised here
    assert limit.seconds > 0.05


def test_a_limit_holds_in_a_thread_that_is_not_the_first() -> None:
    ends: list[str] = []

    def work() -> None:
        limit = ComputeLimit(lambda: 0.05)
        try:
            with limit:
                spin()
        except TimeExhausted as error:
            ends.append(str(error))
        limit.close()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(10)
    assert ends == [str(TimeExhausted())]


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), True, "long"])
def test_a_limit_is_a_positive_number(seconds: Any) -> None:
    with pytest.raises(UsageError, match="max_seconds"):
        kh.recover(kh.FunctionOracle(HEAD, width=WIDTH), max_seconds=seconds)


def test_the_limit_that_nobody_sets_grows_with_queries_and_sizes() -> None:
    assert default_limit(0, 8, 1) < default_limit(1000, 8, 1) < default_limit(1000, 64, 64)


def test_errors_travel_between_processes() -> None:
    for error in (TimeExhausted(), NumericalError("the arithmetic failed")):
        assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_a_certificate_that_fails_leaves_the_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise np.linalg.LinAlgError("Singular matrix")
        yield

    monkeypatch.setattr("keyhole.methods.attempt.certify", fails)
    assert callable(certificate.certify)
    result = kh.recover(kh.FunctionOracle(HEAD, width=WIDTH), "single-head", throw=False)
    assert result.outcome is Outcome.ARITHMETIC_FAILED
    assert kh.distance(result.params, HEAD) <= 1e-12


def test_verify_and_diagnose_admit_it(monkeypatch: pytest.MonkeyPatch) -> None:
    oracle = kh.FunctionOracle(HEAD, width=WIDTH)
    monkeypatch.setattr(judge, "resolution_of", lambda *_: singular())
    verdict = kh.verify(oracle, HEAD)
    assert verdict.conclusion == "inconclusive"
    assert "Singular" in verdict.message
    monkeypatch.setattr("keyhole.methods.diagnosis.diagnose.affine_misfit", lambda *_: spin())
    found = diagnose(oracle, max_seconds=0.2)
    assert (found.family, found.method) == ("unknown", None)
    assert any("longer than allowed" in finding.evidence for finding in found.findings)


def test_learning_ends_with_what_the_best_start_has_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from keyhole.samples import varpro  # noqa: PLC0415

    rng = np.random.default_rng(0)
    inputs = rng.standard_normal((300, 3, WIDTH))
    outputs = rng.standard_normal((300, 3, 2))  # nothing to learn
    monkeypatch.setattr(varpro._Fits, "done", lambda *_: spin())
    late = kh.learn(inputs, outputs, 1, throw=False, max_seconds=0.5)
    assert late.outcome is Outcome.TIME_EXHAUSTED
    assert late.params is not None
    monkeypatch.setattr(varpro._Fits, "done", lambda *_: singular())
    failed = kh.learn(inputs, outputs, 1, throw=False)
    assert failed.outcome is Outcome.ARITHMETIC_FAILED
    assert failed.params is not None


class Buffered(Oracle):
    """Answers in memory of its own, every time the same; no function, so that nobody else copies."""

    def __init__(self) -> None:
        self.signature = kh.FunctionOracle(HEAD, width=WIDTH, batch_limit=4).signature
        self.name = "buffered"
        self.memory = np.empty(4)

    def answer(self, tokens: Any) -> Any:
        self.memory[: len(tokens)] = HEAD(tokens)
        return self.memory[: len(tokens)]


def test_an_oracle_of_any_kind_may_answer_in_the_same_memory() -> None:
    result = kh.recover(Buffered(), throw=False)
    assert result.outcome is Outcome.CERTIFIED
    session = Session(Buffered())
    tokens = np.random.default_rng(0).standard_normal((9, 2, WIDTH))
    np.testing.assert_array_equal(session.measure(sequences("any", tokens)).values, HEAD(tokens))


@pytest.mark.parametrize("module", ["keyhole.cli", "typer", "keyhole.cli.recover", "numpy"])
def test_interrupted_while_it_is_imported_the_command_prints_no_traceback(module: str) -> None:
    code = f"""
import sys, runpy
class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupt())
sys.argv = ["keyhole", "recover", "demo:single-head?width=4"]
runpy.run_module("keyhole", run_name="__main__")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "keyhole: interrupted\n")
