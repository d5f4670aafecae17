"""What every oracle must do, as tests that an oracle of your own passes in three lines.

With pytest::

    class TestMine(keyhole.testing.OracleConformance):
        def make(self):
            return MyOracle("model.bin")

Without it: `keyhole.testing.check_oracle(make)`. Each check makes an oracle of its own and closes it. They hold an
oracle to what its own signature says: limits of norm, length and batch, positions, array library, and noise.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from keyhole.arrays import Array, Space, to_numpy
from keyhole.errors import UsageError
from keyhole.noise import Noise
from keyhole.oracles import Oracle
from keyhole.queries import Signature

__all__ = ["OracleConformance", "check_oracle"]

# Exact answers to one query may differ by so many spacings of the dtype, since batches of other sizes are added up
# in another order.
SPACINGS = 256
# Normal errors of two answers differ by no more than so many standard deviations, but for one pair in a million.
DEVIATIONS = 8.0


class OracleConformance:
    """Tests of one oracle; a subclass writes `make`."""

    lengths: tuple[int, ...] = (1, 2, 5)  # of the sequences that are asked, as far as the oracle takes them
    size: float = 1.0  # of the tokens' entries

    @abstractmethod
    def make(self) -> Oracle:
        """A new oracle, always of the same function."""
        raise NotImplementedError

    # What it says of itself.

    def test_it_says_what_it_is(self) -> None:
        """Name and signature are set, and the name says the same each time: a journal is found by it."""
        with self._oracle() as oracle, self._oracle() as again:
            _require(isinstance(oracle, Oracle), f"{type(oracle).__name__} is no Oracle: derive it from keyhole's")
            _require(isinstance(oracle.signature, Signature), "signature must be a keyhole.queries.Signature")
            _require(isinstance(oracle.name, str) and bool(oracle.name.strip()), "name must be text that names the box")
            _require(
                " at 0x" not in oracle.name, f"the name {oracle.name!r} holds an address: it changes with each run"
            )
            _require(oracle.name == again.name, f"one box has two names, {oracle.name!r} and {again.name!r}")
            _require(oracle.signature == again.signature, "one box has two signatures")

    def test_its_facts_are_plain(self) -> None:
        """What it tells for the report is a dict by names."""
        with self._oracle() as oracle:
            facts = oracle.facts()
            _require(
                isinstance(facts, dict) and all(isinstance(name, str) for name in facts), "facts is a dict by name"
            )

    # Answers.

    def test_answers_have_one_row_per_sequence(self) -> None:
        """Whatever batch and length, and of one shape per sequence."""
        with self._oracle() as oracle:
            seen = set()
            for length in self._lengths(oracle):
                for batch in (1, 2, 7):
                    tokens = self._tokens(oracle, self._most(oracle, batch), length)
                    shape = tuple(oracle(tokens).shape)
                    leading = tuple(tokens.shape[: 1 if oracle.signature.positions == "last" else 2])
                    _require(shape[: len(leading)] == leading, f"answers {shape} to tokens {tuple(tokens.shape)}")
                    seen.add(shape[len(leading) :])
            _require(len(seen) == 1, f"answers change their shape from question to question: {sorted(seen)}")

    def test_answers_live_where_the_signature_says(self) -> None:
        """Array library, dtype and device; and all are finite."""
        with self._oracle() as oracle:
            answers = oracle(self._tokens(oracle, 2, 1))
            space = oracle.signature.space
            found, wanted = Space.of(answers), Space.of(space.zeros(1))
            _require(found == wanted, f"answers are {found.label}, the signature says {wanted.label}")
            _require(bool(np.all(np.isfinite(to_numpy(answers)))), "an answer is nan or inf")

    def test_zero_tokens_are_answered(self) -> None:
        """The shortest query there is."""
        with self._oracle() as oracle:
            answers = oracle(oracle.signature.space.zeros(1, 1, oracle.signature.width))
            _require(bool(np.all(np.isfinite(to_numpy(answers)))), "the zero token is answered with nan or inf")

    def test_answers_do_not_depend_on_the_batch(self) -> None:
        """A sequence is answered the same alone, among others, and in another place among them."""
        with self._oracle() as oracle:
            for length in self._lengths(oracle):
                batch = self._most(oracle, 6)
                tokens = self._tokens(oracle, batch, length)
                whole = to_numpy(oracle(tokens))
                single = np.concatenate([to_numpy(oracle(tokens[place : place + 1, ...])) for place in range(batch)])
                self._agree(oracle, whole, single, f"a batch of {batch} and the same sequences one by one")
                order = np.arange(batch)[::-1]
                turned = oracle(
                    oracle.signature.space.xp.take(tokens, oracle.signature.space.indices(order.copy()), axis=0)
                )
                self._agree(oracle, whole, to_numpy(turned)[order], "a batch and the same backwards")

    def test_what_is_asked_twice_differs_by_the_declared_noise_at_most(self) -> None:
        """Sampling, dropout and other chance must be declared, as noise=."""
        with self._oracle() as oracle:
            tokens = self._tokens(oracle, self._most(oracle, 6), self._lengths(oracle)[-1])
            first, second = to_numpy(oracle(tokens)), to_numpy(oracle(tokens))
            self._agree(oracle, first, second, "one question asked twice")

    def test_a_new_oracle_of_the_same_box_agrees(self) -> None:
        """`make` makes the same oracle, so that a journal can be resumed."""
        with self._oracle() as oracle, self._oracle() as again:
            tokens = self._tokens(oracle, self._most(oracle, 4), self._lengths(oracle)[-1])
            self._agree(oracle, to_numpy(oracle(tokens)), to_numpy(again(tokens)), "two oracles of one box")

    # Manners.

    def test_tokens_are_left_alone(self) -> None:
        """An oracle does not write to the tokens it is given."""
        with self._oracle() as oracle:
            tokens = self._tokens(oracle, 3, 2)
            before = to_numpy(tokens).copy()
            oracle(tokens)
            _require(np.array_equal(to_numpy(tokens), before), "the oracle has written to its tokens")

    def test_answers_are_its_callers_own(self) -> None:
        """Writing to tokens or answers afterwards changes no other answer: a session uses the tokens' memory again."""
        with self._oracle() as oracle:
            tokens = self._tokens(oracle, 3, 1)
            kept = tokens[...] + 0.0
            first = oracle(tokens)
            before = to_numpy(first).copy()
            tokens[...] = 0.0
            _require(np.array_equal(to_numpy(first), before), "an answer changes with the tokens it was given for")
            second = to_numpy(oracle(kept)).copy()
            _require(np.array_equal(to_numpy(first), before), "an answer is overwritten by the next one")
            self._agree(oracle, before, second, "one question asked twice")

    def test_a_slice_of_an_array_is_a_question_too(self) -> None:
        """Tokens need not lie side by side in memory."""
        with self._oracle() as oracle:
            batch = self._most(oracle, 3)
            tokens = self._tokens(oracle, 2 * batch, 2)
            apart, close = tokens[::2, ...], tokens[::2, ...] + 0.0
            self._agree(oracle, to_numpy(oracle(apart)), to_numpy(oracle(close)), "a slice and a copy of it")

    # Limits.

    def test_wrong_questions_are_refused(self) -> None:
        """UsageError, before the oracle sees them; and right ones are answered afterwards."""
        with self._oracle() as oracle:
            signature = oracle.signature
            space, width = signature.space, signature.width
            wrong = {
                "tokens of another width": space.zeros(1, 1, width + 1),
                "tokens without a batch": space.zeros(1, width),
                "tokens of four dimensions": space.zeros(1, 1, 1, width),
            }
            if signature.max_length is not None:
                wrong["a sequence that is too long"] = space.zeros(1, signature.max_length + 1, width)
            if signature.max_norm is not None:
                wrong["a token that is too long"] = space.full((1, 1, width), 2.0 * signature.max_norm)
            for what, tokens in wrong.items():
                try:
                    oracle(tokens)
                except UsageError:
                    continue
                _require(False, f"{what}, {tuple(tokens.shape)}, should raise UsageError")
            oracle(self._tokens(oracle, 1, 1))

    def test_a_batch_of_the_limit_is_answered(self) -> None:
        """As many sequences as `batch_limit` allows, up to a size that tests can afford."""
        with self._oracle() as oracle:
            batch = self._most(oracle, 2000)
            _require(oracle(self._tokens(oracle, batch, 1)).shape[0] == batch, f"a batch of {batch} is not answered")

    def test_the_longest_token_is_answered(self) -> None:
        """One of `max_norm`, where that is set."""
        with self._oracle() as oracle:
            limit = oracle.signature.norm_limit
            if np.isfinite(limit):
                tokens = self._tokens(oracle, 2, 1)
                xp = oracle.signature.space.xp
                oracle(tokens * (limit / xp.linalg.vector_norm(tokens, axis=-1, keepdims=True)))

    def test_it_can_be_closed_twice(self) -> None:
        """And unused: whoever cleans up need not know what was done before."""
        oracle = self.make()
        oracle.close()
        oracle.close()

    # Helpers.

    @contextmanager
    def _oracle(self) -> Iterator[Oracle]:
        oracle = self.make()
        try:
            yield oracle
        finally:
            oracle.close()

    def _lengths(self, oracle: Oracle) -> list[int]:
        most = oracle.signature.max_length
        return [length for length in self.lengths if most is None or length <= most] or [1]

    @staticmethod
    def _most(oracle: Oracle, batch: int) -> int:
        return min(batch, oracle.signature.batch_limit or batch)

    def _tokens(self, oracle: Oracle, batch: int, length: int) -> Array:
        """Random ones, within the norm bound and the limit of length."""
        signature = oracle.signature
        length = min(length, signature.max_length or length)
        numbers = np.random.default_rng([batch, length]).standard_normal((batch, length, signature.width))
        longest = float(np.max(np.linalg.norm(numbers, axis=-1), initial=0.0))
        numbers *= min(self.size, 0.5 * signature.norm_limit / longest if longest else 1.0)
        return signature.space.asarray(numbers)

    @staticmethod
    def _agree(oracle: Oracle, first: Any, second: Any, what: str) -> None:
        noise, space = oracle.signature.noise, oracle.signature.space
        if noise.kind == "measure":  # anything may happen, as declared
            return
        size = float(np.max(np.abs(first), initial=0.0))
        allowed = SPACINGS * space.spacing * max(size, space.tiny) + _allowed_difference(noise, size)
        difference = float(np.max(np.abs(first.astype(np.float64) - second.astype(np.float64)), initial=0.0))
        _require(
            difference <= allowed,
            f"{what} are answered {difference:.3g} apart, where {allowed:.3g} is declared (noise: {noise}): declare "
            "the noise of the box, or mend it",
        )


def check_oracle(make: Callable[[], Oracle]) -> None:
    """Run all checks on the oracles that `make` makes; AssertionError says what is wrong."""

    class Given(OracleConformance):
        def make(self) -> Oracle:
            return make()

    for name in dir(Given):
        if name.startswith("test_"):
            getattr(Given(), name)()


def _allowed_difference(noise: Noise, size: float) -> float:
    """How far apart two answers to one query may be."""
    if noise.kind == "gaussian":
        return DEVIATIONS * 2**0.5 * noise.scale
    return 2 * noise.radius + 2 * noise.relative * size


def _require(holds: bool, sentence: str) -> None:
    if not holds:
        raise AssertionError(sentence)
