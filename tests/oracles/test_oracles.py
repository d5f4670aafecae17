"""Oracles: questions and answers are checked at the border, wrappers change one thing each."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import keyhole as kh
from keyhole.arrays import Array, Space, to_numpy
from keyhole.errors import (
    BudgetExhausted,
    KeyholeError,
    NonFiniteAnswer,
    OracleError,
    OracleRaised,
    UsageError,
    WrongShape,
)
from keyhole.noise import Noise
from keyhole.oracles import Batched, Budgeted, Counted, FunctionOracle, Noisy, Oracle, Rounded, Wrapper
from support import targets as t

WIDTH = 3


def total(tokens: Array) -> Array:
    return tokens.sum(-1).sum(-1)


def ask(oracle: Oracle, batch: int = 4, length: int = 2) -> Array:
    space = oracle.signature.space
    return oracle(space.asarray(np.arange(batch * length * WIDTH, dtype=float).reshape(batch, length, WIDTH)))


def answering(answers: Any, **signature: Any) -> FunctionOracle:
    return FunctionOracle(lambda tokens: answers, width=WIDTH, name="the box", **signature)


# --- the border -----------------------------------------------------------------------------------------------


def test_an_oracle_shows_what_it_is() -> None:
    oracle = kh.FunctionOracle(lambda tokens: tokens[:, 0, 0], width=3, max_norm=2.0, name="first numbers")
    assert repr(oracle) == "FunctionOracle('first numbers', width=3, max_norm='2')"
    assert repr(Rounded(oracle, 2)).startswith(
        "Rounded('first numbers | rounded to 2 decimals', width=3, noise='rounded"
    )

    class Half(Oracle):
        def answer(self, tokens: np.ndarray) -> np.ndarray:
            return tokens[:, 0, 0]

    assert repr(Half()) == "Half(…)"


@pytest.mark.parametrize(
    "answers",
    [
        np.zeros(3),
        np.zeros(5),
        np.zeros((1, 4)),
        np.zeros((4, 2, 1)),
        np.float64(1.0),
        np.zeros(()),
        np.zeros((0,)),
        [0.0] * 4,
        1.5,
        None,
        "four",
        np.array(["a"] * 4),
        np.array([None] * 4),
        np.array([{}] * 4, dtype=object),
        np.zeros(4, dtype="datetime64[s]"),
    ],
    ids=lambda answers: f"{type(answers).__name__}-{getattr(answers, 'dtype', '')}-{getattr(answers, 'shape', '')}",
)
def test_answers_that_do_not_fit_the_question(answers: Any) -> None:
    with pytest.raises(WrongShape, match="the box"):
        ask(answering(answers))


def test_complex_answers_are_refused() -> None:
    """Dropping an imaginary part without a word would make a wrong answer look right."""
    with pytest.raises(WrongShape, match="real"):
        ask(answering(np.zeros(4) + 1j))


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
def test_answers_that_are_no_numbers(number: float) -> None:
    answers = np.zeros(4)
    answers[2] = number
    with pytest.raises(NonFiniteAnswer, match=r"the box.*nan or inf.*max_norm"):
        ask(answering(answers))


def test_an_answer_beyond_the_dtype_is_not_finite() -> None:
    with np.errstate(over="ignore"), pytest.raises(NonFiniteAnswer):
        ask(answering(np.full(4, 1e300), like=np.zeros(1, np.float32)))


@pytest.mark.parametrize("dtype", ["int64", "float32", "float16", "uint8", "bool"])
def test_other_real_numbers_are_converted(dtype: str) -> None:
    answers = ask(answering(np.ones(4, dtype=dtype)))
    assert answers.dtype == np.float64
    assert answers.tolist() == [1.0] * 4


def test_all_positions() -> None:
    oracle = FunctionOracle(lambda tokens: tokens[:, :, 0], width=WIDTH, positions="all")
    assert ask(oracle, batch=4, length=2).shape == (4, 2)
    oracle = FunctionOracle(lambda tokens: tokens, width=WIDTH, positions="all")
    assert ask(oracle, batch=4, length=2).shape == (4, 2, WIDTH)
    with pytest.raises(WrongShape):
        ask(FunctionOracle(total, width=WIDTH, positions="all"))


def test_an_exception_is_chained_and_named() -> None:
    def box(tokens: Array) -> Array:
        raise ZeroDivisionError("dividing in the box")

    with pytest.raises(OracleRaised, match=r"box.*ZeroDivisionError: dividing in the box") as caught:
        ask(FunctionOracle(box, width=WIDTH))
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert isinstance(caught.value, OracleError)
    assert isinstance(caught.value, KeyholeError)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_a_person_who_stops_is_obeyed(error: type[BaseException]) -> None:
    def box(tokens: Array) -> Array:
        raise error

    with pytest.raises(error):
        ask(FunctionOracle(box, width=WIDTH))


def test_questions_are_checked() -> None:
    oracle = FunctionOracle(total, width=WIDTH, max_norm=1.0, max_length=2)
    for tokens, word in (
        (np.zeros((4, 2, WIDTH + 1)), "tokens"),
        (np.zeros((4, WIDTH)), "tokens"),
        (np.zeros((4, 3, WIDTH)), "max_length"),
        (np.full((4, 2, WIDTH), 0.6), "max_norm"),
        (np.full((4, 2, WIDTH), np.nan), "norm|finite|nan"),
    ):
        with pytest.raises(UsageError, match=word):
            oracle(tokens)
    assert oracle(np.full((4, 2, WIDTH), 0.5)).shape == (4,)


def test_constructor() -> None:
    with pytest.raises(UsageError, match="callable"):
        FunctionOracle(3, width=WIDTH)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="floating"):
        FunctionOracle(total, width=WIDTH, like=np.zeros(1, int))
    assert FunctionOracle(total, width=WIDTH).name == "total"
    assert FunctionOracle(total, width=WIDTH, name="x").name == "x"
    assert FunctionOracle(total, width=WIDTH).signature.noise == Noise.exact()


def test_positional_arguments_are_those_of_the_design() -> None:
    oracle = FunctionOracle(total, 3, 2.0, 5, "all", Noise.rounded(4))
    signature = oracle.signature
    assert (signature.width, signature.max_norm, signature.max_length) == (3, 2.0, 5)
    assert (signature.positions, signature.noise) == ("all", Noise.rounded(4))


# --- wrappers -------------------------------------------------------------------------------------------------


def test_counted(like: object) -> None:
    oracle = Counted(FunctionOracle(total, width=WIDTH, like=like))
    for batch in (4, 1, 7):
        ask(oracle, batch)
    assert (oracle.queries, oracle.calls) == (12, 3)


def test_budgeted() -> None:
    inner = Counted(FunctionOracle(total, width=WIDTH))
    oracle = Budgeted(inner, 10)
    ask(oracle, 4)
    with pytest.raises(BudgetExhausted, match="6 left"):
        ask(oracle, 7)
    assert inner.queries == 4  # a batch that does not fit is refused whole
    ask(oracle, 6)
    with pytest.raises(BudgetExhausted):
        ask(oracle, 1)
    assert inner.queries == 10


def test_batched() -> None:
    oracle = Batched(FunctionOracle(total, width=WIDTH), 4)
    assert oracle.signature.batch_limit == 4
    ask(oracle, 4)
    with pytest.raises(UsageError, match="limit of 4"):
        ask(oracle, 5)


@pytest.mark.parametrize("decimals", [-1, 0, 2, 6])
def test_rounded(like: object, decimals: int) -> None:
    numbers = np.random.default_rng(0).standard_normal(100) * 30
    box = FunctionOracle(lambda tokens: Space.of(tokens).asarray(numbers), width=WIDTH, like=like)
    oracle = Rounded(box, decimals)
    answers = to_numpy(ask(oracle, 100))
    np.testing.assert_allclose(answers, np.round(numbers, decimals), atol=1e-12)
    assert np.max(np.abs(answers - numbers)) <= oracle.signature.noise.radius
    assert Space.of(ask(oracle, 100)) == Space.of(like)
    assert Rounded(box, decimals, declared=False).signature.noise == Noise.exact()


def test_rounded_does_not_overflow() -> None:
    box = FunctionOracle(lambda tokens: np.full(4, 1e300), width=WIDTH)
    np.testing.assert_array_equal(ask(Rounded(box, 12)), np.full(4, 1e300))


def test_noisy(like: object) -> None:
    box = FunctionOracle(lambda tokens: tokens[:, 0, 0] * 0.0, width=WIDTH, like=like)
    oracle = Noisy(box, 0.5, seed=1)
    answers = to_numpy(ask(oracle, 4000))
    assert abs(answers.mean()) < 0.05
    assert 0.45 < answers.std() < 0.55
    assert np.any(to_numpy(ask(oracle, 4000)) != answers)
    assert oracle.signature.noise == Noise.gaussian(0.5)
    assert Noisy(box, 0.5, declared=False).signature.noise == Noise.exact()
    np.testing.assert_array_equal(to_numpy(ask(Noisy(box, 0.5, seed=1), 4000)), answers)


def test_wrappers_nest_and_close() -> None:
    closed = []

    class Closing(FunctionOracle):
        def close(self) -> None:
            closed.append(True)

    inner = Closing(total, width=WIDTH, max_norm=100.0)
    oracle = Rounded(Counted(Batched(Budgeted(inner, 100), 5)), 2)
    assert oracle.signature.max_norm == 100.0
    assert oracle.signature.batch_limit == 5
    assert oracle.signature.noise == Noise.rounded(2)
    ask(oracle, 5)
    oracle.close()
    assert closed == [True]


def test_a_wrapper_passes_errors_on_as_they_are() -> None:
    def box(tokens: Array) -> Array:
        raise OSError("cable")

    with pytest.raises(OracleRaised, match="cable") as caught:
        ask(Counted(Wrapper(FunctionOracle(box, width=WIDTH))))
    assert isinstance(caught.value.__cause__, OSError)


# --- torch modules as boxes -----------------------------------------------------------------------------------


def test_a_torch_module_with_gradients_is_a_box(rng: np.random.Generator) -> None:
    """What people have: parameters that require gradients. Nothing may warn, leak a graph or fail."""
    torch = pytest.importorskip("torch")
    truth = kh.SingleHead(t.gaussian(rng, 6), t.normal_value(rng, 6))

    class Layer(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.score = torch.nn.Parameter(torch.asarray(truth.score))
            self.value = torch.nn.Parameter(torch.asarray(truth.value))

        def forward(self, tokens: Array) -> Array:
            logits = torch.einsum("bij,jk,bk->bi", tokens, self.score, tokens[:, -1])
            return torch.einsum("bi,bij,j->b", torch.softmax(logits, -1), tokens, self.value)

    like = torch.zeros(1, dtype=torch.float64)
    result = kh.recover(kh.FunctionOracle(Layer(), width=6, like=like))
    assert kh.distance(result.params, truth) <= 1e-13
    assert not result.params.score.requires_grad
    assert not result.params.value.requires_grad
