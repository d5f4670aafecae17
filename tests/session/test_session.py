"""The session: budget, batches, memory, repeats, several plans at once."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Generator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import keyhole as kh
from keyhole.arrays import Array, Space, numpy_space, to_numpy
from keyhole.errors import (
    BudgetExhausted,
    NonFiniteAnswer,
    OracleError,
    OracleRaised,
    OutOfMemory,
    RecoveryFailed,
    UsageError,
    WrongShape,
)
from keyhole.journal import Journal
from keyhole.noise import Noise
from keyhole.oracles import Batched, Budgeted, Counted, Noisy
from keyhole.queries import Measurements, Plan, Term, TokenRows, sequences
from keyhole.recovery import Outcome
from keyhole.session.session import CPU_BATCH_BYTES, Session
from support import targets as t

WIDTH = 8
HELDOUT = 120


@pytest.fixture
def needed(head: kh.SingleHead) -> int:
    """Queries of an uninterrupted run, before the certificate."""
    stats = kh.recover(kh.FunctionOracle(head, width=WIDTH)).stats
    assert stats.heldout_queries == HELDOUT
    return stats.queries


@pytest.fixture
def head(rng: np.random.Generator) -> kh.SingleHead:
    return kh.SingleHead(t.gaussian(rng, WIDTH), t.normal_value(rng, WIDTH))


def first_number(tokens: Array) -> Array:
    """An answer that tells which sequence was asked."""
    return tokens[:, 0, 0] * 1.0


def counting(count: int, stage: str = "counting", **more: Any) -> Plan:
    """A plan whose n-th sequence is the token (n, 0)."""
    rows = np.stack([np.arange(count, dtype=float), np.zeros(count)], axis=1)
    return Plan(stage, count, [[Term(TokenRows(rows))]], **more)


# --- budget ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [0, 1, 7, WIDTH, WIDTH + 1, 40, WIDTH**2 + WIDTH - 1])
@pytest.mark.parametrize("limit", [None, 3])
def test_a_small_budget_stops_exactly_there_and_resumes(
    tmp_path: Path, head: kh.SingleHead, needed: int, budget: int, limit: int | None
) -> None:
    total = needed + HELDOUT
    oracle = Counted(kh.FunctionOracle(head, width=WIDTH, batch_limit=limit))
    with pytest.raises(RecoveryFailed, match=f"budget of {budget} ") as caught:
        kh.recover(oracle, budget=budget, journal=tmp_path / "j")
    result = caught.value.result
    assert result.outcome is Outcome.BUDGET_EXHAUSTED
    assert "raise" in result.message.lower()
    assert oracle.queries == result.stats.queries == result.stats.new_queries == budget
    # Half as much again, then all: nothing is paid for twice, and nothing is lost.
    more = budget + (needed - 1 - budget) // 2
    kh.recover(oracle, budget=more, journal=tmp_path / "j", throw=False)
    assert oracle.queries == more
    final = kh.recover(oracle, journal=tmp_path / "j")
    assert oracle.queries == total
    assert final.stats.new_queries == total - more
    assert final.stats.queries == needed
    assert kh.distance(final.params, head) <= 1e-13


def test_a_partial_result_holds_the_value_and_the_columns_that_are_known(head: kh.SingleHead, needed: int) -> None:
    oracle = kh.FunctionOracle(head, width=WIDTH)
    nearly = kh.recover(oracle, budget=needed - 1, throw=False).params
    early = kh.recover(oracle, budget=needed // 2, throw=False).params
    np.testing.assert_allclose(nearly.value, head.value, rtol=1e-15)
    # A column unknown is a direction missing: the error is a projection of the score, so it only shrinks.
    misses = [np.linalg.norm(head.score - params.score) for params in (early, nearly)]
    assert misses[1] < misses[0] < np.linalg.norm(head.score)
    missing = head.score - nearly.score
    assert np.sum(np.linalg.svd(missing, compute_uv=False) > 1e-12 * np.linalg.norm(head.score)) == 1


def test_a_budget_without_room_for_the_certificate_is_not_certified(head: kh.SingleHead, needed: int) -> None:
    oracle = Counted(kh.FunctionOracle(head, width=WIDTH))
    result = kh.recover(oracle, budget=needed, throw=False)
    assert result.outcome is Outcome.UNCERTIFIED
    assert oracle.queries == needed
    assert kh.distance(result.params, head) <= 1e-13


def test_a_budget_that_just_suffices(head: kh.SingleHead, needed: int) -> None:
    oracle = Counted(kh.FunctionOracle(head, width=WIDTH))
    result = kh.recover(oracle, budget=needed + HELDOUT)
    assert oracle.queries == needed + HELDOUT
    assert (result.stats.queries, result.stats.heldout_queries) == (needed, HELDOUT)


def test_a_budget_below_what_the_journal_holds(tmp_path: Path, head: kh.SingleHead) -> None:
    oracle = Counted(kh.FunctionOracle(head, width=WIDTH))
    kh.recover(oracle, journal=tmp_path / "j")
    asked = oracle.queries
    result = kh.recover(oracle, journal=tmp_path / "j", budget=20, throw=False)
    assert result.outcome is Outcome.BUDGET_EXHAUSTED
    assert result.stats.queries <= 20
    assert oracle.queries == asked


def test_a_budgeted_oracle_ends_a_run_the_same_way(head: kh.SingleHead, tmp_path: Path) -> None:
    oracle = Counted(Batched(Budgeted(kh.FunctionOracle(head, width=WIDTH), 30), 1))
    result = kh.recover(oracle, journal=tmp_path / "j", throw=False)
    assert result.outcome is Outcome.BUDGET_EXHAUSTED
    assert result.stats.queries == 30


@pytest.mark.parametrize("heldout", [1, 100])
def test_as_many_held_out_questions_as_wanted(head: kh.SingleHead, heldout: int) -> None:
    result = kh.recover(kh.FunctionOracle(head, width=WIDTH), heldout=heldout)
    assert result.stats.heldout_queries == result.certificate.heldout_queries == heldout
    assert result.certificate.answers.shape == result.certificate.predictions.shape == (heldout,)


def test_wrong_arguments(head: kh.SingleHead) -> None:
    oracle = kh.FunctionOracle(head, width=WIDTH)
    for arguments, word in (
        ({"method": "magic"}, "single-head"),
        ({"budget": -1}, "budget"),
        ({"heldout": 0}, "heldout"),
        ({"colour": "red"}, "colour"),
    ):
        with pytest.raises(UsageError, match=word):
            kh.recover(oracle, **arguments)


def test_the_same_seed_is_the_same_run_and_another_is_not(head: kh.SingleHead) -> None:
    oracle = kh.FunctionOracle(head, width=WIDTH)
    runs = [kh.recover(oracle, seed=seed).params.score.tobytes() for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]


# --- memory ---------------------------------------------------------------------------------------------------


def million(kind: str) -> Plan:
    """A million sequences of two tokens of width 64: a gibibyte of tokens, described by a few megabytes."""
    count, rng = 10**6, np.random.default_rng(0)
    rows = TokenRows(rng.standard_normal((64, 64)))
    first, last = (rng.integers(0, 64, count) for _ in range(2))
    scale: Any = 0.5 if kind == "looked up" else rng.standard_normal(count)
    return Plan("million", count, [[Term(rows, first, scale)], [Term(rows, last, 2.0)]])


@pytest.mark.parametrize("kind", ["looked up", "made"])
def test_a_million_queries_need_the_memory_of_a_batch(kind: str) -> None:
    plan, largest = million(kind), [0]

    def box(tokens: Array) -> Array:
        largest[0] = max(largest[0], tokens.nbytes)
        return tokens[:, 0, 0] + tokens[:, 1, 1]

    session = Session(kh.FunctionOracle(box, width=64))
    gc.collect()
    tracemalloc.start()
    answers = session.measure(plan)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert answers.values.shape == (10**6,)
    assert 0 < largest[0] <= CPU_BATCH_BYTES
    # Answers twice over (8 MB each), indices twice over (16 MB) and a few batches (2 MiB), against 1 GB of tokens.
    assert peak <= 80e6, f"{peak / 1e6:.0f} MB"
    rows = plan.positions[0][0].rows.vectors
    scale = plan.positions[0][0].scale
    expected = scale * rows[plan.positions[0][0].index, 0] + 2.0 * rows[plan.positions[1][0].index, 1]
    np.testing.assert_array_equal(answers.values, expected)


@pytest.mark.parametrize("limit", [1, 7, 1000])
def test_no_batch_is_larger_than_the_limit(limit: int) -> None:
    spy = t.Spy(first_number)
    answers = Session(kh.FunctionOracle(spy, width=2, batch_limit=limit)).measure(counting(300))
    assert spy.largest_batch == min(limit, 300)
    np.testing.assert_array_equal(answers.values, np.arange(300.0))


def test_a_box_that_keeps_its_questions_does_not_see_them_change(like: object) -> None:
    space, kept, copies = Space.of(like), [], []

    def box(tokens: Array) -> Array:
        kept.append(tokens)
        copies.append(to_numpy(tokens).copy())
        return tokens[:, 0, 0] * 1.0

    rows = space.asarray(np.random.default_rng(0).standard_normal((40, 3)))
    plan = Plan("kept", 40, [[Term(TokenRows(rows))], [Term(TokenRows(2 * rows))]])
    Session(kh.FunctionOracle(box, width=3, like=like, batch_limit=6)).measure(plan)
    for tokens, copy in zip(kept, copies, strict=True):
        np.testing.assert_array_equal(to_numpy(tokens), copy)


def test_a_box_that_answers_with_a_view_of_its_question(like: object) -> None:
    """Answers that share memory with the tokens must not change when the next batch is made."""
    space = Space.of(like)
    rows = space.asarray(np.arange(60.0).reshape(20, 3))
    oracle = kh.FunctionOracle(lambda tokens: tokens[:, 0, 0], width=3, like=like, batch_limit=6)
    answers = Session(oracle).measure(Plan("views", 20, [[Term(TokenRows(rows))]]))
    np.testing.assert_array_equal(to_numpy(answers.values), np.arange(0.0, 60.0, 3))


def test_a_box_that_writes_to_its_question_harms_itself_only(like: object) -> None:
    space = Space.of(like)
    rows = space.asarray(np.arange(60.0).reshape(20, 3))

    def vandal(tokens: Array) -> Array:
        answers = tokens[:, 0, 0] * 1.0
        tokens[...] = -1.0
        return answers

    plan = Plan("vandal", 20, [[Term(TokenRows(rows))]])
    session = Session(kh.FunctionOracle(vandal, width=3, like=like, batch_limit=20))
    for _ in range(2):
        np.testing.assert_array_equal(to_numpy(session.measure(plan).values), np.arange(0.0, 60.0, 3))


# --- plans, repeats, methods ----------------------------------------------------------------------------------


def test_a_method_may_yield_several_plans_at_once() -> None:
    def method() -> Generator[Any, Any, tuple[Any, Any]]:
        first = yield counting(3)
        several = yield [counting(2, "a"), counting(4, "b"), counting(1, "a")]
        return first, several

    session = Session(kh.FunctionOracle(first_number, width=2))
    first, several = session.run(method())
    assert isinstance(first, Measurements)
    assert first.values.tolist() == [0.0, 1.0, 2.0]
    assert [m.values.tolist() for m in several] == [[0.0, 1.0], [0.0, 1.0, 2.0, 3.0], [0.0]]
    assert session.stages == {(0, "counting"): 3, (0, "a"): 3, (0, "b"): 4}
    assert session.queries == session.new_queries == 10


def test_what_goes_wrong_is_raised_inside_the_method() -> None:
    def method() -> Generator[Any, Any, str]:
        yield counting(4)
        try:
            yield [counting(3), counting(9)]
        except BudgetExhausted:
            return "made do"
        return "had enough"

    session = Session(kh.FunctionOracle(first_number, width=2), budget=10)
    assert session.run(method()) == "made do"
    assert session.queries == 10  # spent to the last one before it was refused


def test_a_method_that_does_not_care_lets_the_error_out() -> None:
    def method() -> Generator[Any, Any, None]:
        yield counting(4)

    def box(tokens: Array) -> Array:
        raise KeyError("gone")

    with pytest.raises(OracleRaised, match="KeyError"):
        Session(kh.FunctionOracle(box, width=2)).run(method())


def test_repeats_are_asked_and_averaged(tmp_path: Path) -> None:
    calls = [0]

    def box(tokens: Array) -> Array:
        calls[0] += 1
        return tokens[:, 0, 0] + calls[0]

    oracle = Counted(kh.FunctionOracle(box, width=2, noise=Noise.gaussian(1.0)))
    with Journal(tmp_path / "j", "box") as journal:
        session = Session(oracle, journal=journal)
        answers = session.measure(counting(5, repeats=4))
        np.testing.assert_allclose(answers.values, np.arange(5) + 2.5)  # mean of 1, 2, 3, 4
        assert answers.radius == oracle.signature.noise.radius / 2
        assert session.queries == oracle.queries == 20
        # The same repeats come from the journal, later ones are asked.
        again = Session(oracle, journal=journal)
        np.testing.assert_array_equal(again.measure(counting(5, repeats=4)).values, answers.values)
        assert (again.queries, again.new_queries) == (20, 0)
        later = again.measure(counting(5, repeats=1, first_repeat=4))
        np.testing.assert_allclose(later.values, np.arange(5) + 5)
        assert again.new_queries == 5


def test_repeats_shrink_gaussian_noise_only() -> None:
    for noise, factor in ((Noise.gaussian(1e-3), 0.1), (Noise.bounded(1e-3), 1.0), (Noise.rounded(3), 1.0)):
        oracle = kh.FunctionOracle(first_number, width=2, noise=noise)
        answers = Session(oracle).measure(counting(3, repeats=100))
        assert answers.radius == pytest.approx(noise.radius * factor)


def test_repeats_lower_the_error_of_a_noisy_box() -> None:
    oracle = Noisy(kh.FunctionOracle(first_number, width=2), 0.1, seed=3)
    answers = Session(oracle).measure(counting(200, repeats=100))
    errors = answers.values - np.arange(200)
    assert 0.5 * 0.01 < np.std(errors) < 1.5 * 0.01
    assert np.all(np.abs(errors) <= answers.radius)


def test_the_budget_counts_repeats() -> None:
    oracle = Counted(kh.FunctionOracle(first_number, width=2))
    with pytest.raises(BudgetExhausted):
        Session(oracle, budget=13).measure(counting(5, repeats=3))
    assert oracle.queries == 13


def test_an_answer_is_in_the_journal_before_the_next_question(tmp_path: Path) -> None:
    def box(tokens: Array) -> Array:
        if tokens[0, 0, 0] >= 12:
            raise RuntimeError("stop here")
        return first_number(tokens)

    plan = counting(20)
    with Journal(tmp_path / "j", "box") as journal:
        with pytest.raises(OracleRaised):
            Session(kh.FunctionOracle(box, width=2, batch_limit=4), journal=journal).measure(plan)
        kept = journal.slices(plan.digest, 0)
    assert [(start, answers.tolist()) for start, answers in kept] == [
        (start, [start, start + 1.0, start + 2.0, start + 3.0]) for start in (0, 4, 8)
    ]


def test_gaps_in_the_journal_are_filled_and_nothing_else(tmp_path: Path) -> None:
    plan, asked = counting(20), []

    def box(tokens: Array) -> Array:
        asked.extend(tokens[:, 0, 0].tolist())
        return first_number(tokens)

    with Journal(tmp_path / "j", "box") as journal:
        for start, stop in ((3, 5), (5, 6), (11, 17)):
            journal.add(plan.digest, 0, start, np.arange(start, stop, dtype=float))
        answers = Session(kh.FunctionOracle(box, width=2, batch_limit=4), journal=journal).measure(plan)
    np.testing.assert_array_equal(answers.values, np.arange(20.0))
    assert asked == [0, 1, 2, *range(6, 11), 17, 18, 19]


def test_a_spoilt_answer_is_not_kept(tmp_path: Path) -> None:
    plan = counting(8)
    oracle = kh.FunctionOracle(lambda tokens: tokens[:, 0, 0] / tokens[:, 0, 0], width=2, batch_limit=4)
    with Journal(tmp_path / "j", "box") as journal, np.errstate(invalid="ignore"):
        with pytest.raises(kh.KeyholeError, match="nan"):
            Session(oracle, journal=journal).measure(plan)
        assert journal.slices(plan.digest, 0) == []


def test_a_shape_that_changes_between_plans(tmp_path: Path) -> None:
    shapes = iter([(), (2,)])
    oracle = kh.FunctionOracle(lambda tokens: np.zeros((len(tokens), *next(shapes))), width=2)
    session = Session(oracle)
    session.measure(counting(3))
    with pytest.raises(WrongShape, match="must not change"):
        session.measure(counting(4))


class Watcher:
    """An observer that writes down what it is told."""

    def __init__(self) -> None:
        self.expected: dict[str, int] = {}
        self.new = self.old = 0

    def planned(self, stage: str, queries: int) -> None:
        self.expected[stage] = self.expected.get(stage, 0) + queries

    def answered(self, queries: int, *, new: bool) -> None:
        self.new += queries if new else 0
        self.old += 0 if new else queries


def test_an_observer_is_told_everything(tmp_path: Path, head: kh.SingleHead, needed: int) -> None:
    oracle = kh.FunctionOracle(head, width=WIDTH, batch_limit=5)
    for new, old in ((needed + HELDOUT, 0), (0, needed + HELDOUT)):
        watcher = Watcher()
        result = kh.recover(oracle, journal=tmp_path / "j", observer=watcher)
        assert (watcher.new, watcher.old) == (new, old)
        assert watcher.expected.pop("held-out") == HELDOUT
        assert watcher.expected == result.stats.stages


def test_plans_reach_the_box_in_its_own_space(like: object) -> None:
    space, seen = Space.of(like), []

    def box(tokens: Array) -> Array:
        seen.append(Space.of(tokens))
        return tokens[:, 0, 0] * 1.0

    plan = sequences("here", space.asarray(np.ones((3, 2, 4))))
    answers = Session(kh.FunctionOracle(box, width=4, like=like)).measure(plan)
    assert seen == [space]
    assert Space.of(answers.values) == space


def test_a_box_may_answer_in_another_library(like: object) -> None:
    """A torch box that returns NumPy arrays is understood, and what comes back is torch again."""
    space = Space.of(like)
    plan = sequences("there", space.asarray(np.ones((3, 2, 4))))
    oracle = kh.FunctionOracle(lambda tokens: to_numpy(tokens)[:, 0, 0].copy(), width=4, like=like)
    answers = Session(oracle).measure(plan)
    assert Space.of(answers.values) == space
    assert numpy_space() == Space.of(to_numpy(answers.values))


class OutOfMemoryError(RuntimeError):
    """Named as those of PyTorch and CuPy are."""


def test_batches_that_do_not_fit_into_memory_are_halved(like: object) -> None:
    """The run goes on with what fits, and nothing is asked or counted twice that was answered."""
    space, fits, seen = Space.of(like), 100, []

    def box(tokens: Array) -> Array:
        if tokens.shape[0] > fits:
            raise OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        seen.append(tokens.shape[0])
        return tokens[:, 0, 0] * 1.0

    tokens = np.random.default_rng(0).standard_normal((1000, 1, 4))
    session = Session(kh.FunctionOracle(box, width=4, like=like))
    answers = session.measure(sequences("halved", space.asarray(tokens)))
    assert np.array_equal(to_numpy(answers.values), to_numpy(space.asarray(tokens))[:, 0, 0])
    assert sum(seen) == session.queries == session.new_queries == 1000
    assert fits / 2 < max(seen) <= fits


def test_what_never_fits_into_memory_is_an_error_of_the_oracle() -> None:
    def box(tokens: Array) -> Array:
        raise MemoryError(f"Unable to allocate {tokens.nbytes}")

    with pytest.raises(OutOfMemory, match="Unable to allocate 32") as raised:
        Session(kh.FunctionOracle(box, width=4)).measure(sequences("too large", np.ones((9, 1, 4))))
    assert isinstance(raised.value, OracleError)


def ahead(space: Space) -> Space:
    """The space, as if its device worked on while the host goes on."""
    vars(space).update(on_cpu=False, runs_ahead=True)
    return space


def test_products_of_few_digits_are_refused() -> None:
    torch = pytest.importorskip("torch")
    coarse, fine = (
        kh.FunctionOracle(lambda tokens: tokens[:, 0, 0], width=4, like=torch.zeros(1, dtype=dtype))
        for dtype in (torch.float32, torch.float64)
    )
    torch.set_float32_matmul_precision("high")
    try:
        Session(coarse)  # on the host products are whole
        for each in (coarse, fine):
            ahead(each.signature.space)
        Session(fine)
        with pytest.raises(UsageError, match="TF32"):
            Session(coarse)
    finally:
        torch.set_float32_matmul_precision("highest")
    Session(coarse)


def test_a_device_is_waited_for_once_for_plans_that_are_asked_together() -> None:
    """Answers are checked together, and one that is not finite is found all the same."""
    torch = pytest.importorskip("torch")
    looks: list[list[int]] = []

    def box(tokens: Array) -> Array:
        return 1 / tokens[:, 0, 0]

    oracle = kh.FunctionOracle(box, width=4, like=torch.ones(1, dtype=torch.float64), batch_limit=10)
    ahead(oracle.signature.space)
    check = oracle.check_finite
    oracle.check_finite = lambda *found: (looks.append(list(map(len, found))), check(*found))[1]  # type: ignore[method-assign]
    session = Session(oracle)
    tokens = torch.ones((100, 1, 4), dtype=torch.float64)
    assert len(session.measure(sequences("fine", tokens)).values) == 100
    session.measure_all([sequences("fine", tokens), sequences("fewer", tokens[:30])])
    assert looks == [[100], [100, 30]]
    assert session.oracle_seconds > 0
    tokens[17] = 0.0
    with pytest.raises(NonFiniteAnswer):
        session.measure(sequences("poles", tokens))
    with pytest.raises(NonFiniteAnswer):
        session.measure_all([sequences("poles", tokens), sequences("none", tokens[50:])])
