"""The interface of an oracle: one method to write, one to call."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, final

import array_api_compat

from keyhole.arrays import Array, is_out_of_memory, is_real
from keyhole.errors import KeyholeError, NonFiniteAnswer, OracleRaised, OutOfMemory, UsageError, WrongShape
from keyhole.optional import on_demand
from keyhole.queries import Signature

# No label is larger: numbers that grow with their tokens become whole ones too.
LARGEST_LABEL = 2.0**31


class Oracle(ABC):
    """An oracle that answers sequences of tokens.

    A subclass sets `signature` and `name` and writes `answer`; callers use the oracle as a function,
    which checks query and answer. Where workers ask, each has a copy: what pickle makes, or what `text` opens.
    """

    signature: Signature
    name: str  # what the oracle is; a journal belongs to one name
    lanes: int = 1  # calls that may be under way at the same time; a call of `batch_limit` sequences is split over them
    text: str | None = None  # a target that opens it again, in another process too

    @abstractmethod
    def answer(self, tokens: Array) -> Array:  # (batch, length, width) -> (batch,) or (batch, outputs)
        """Answer a batch of sequences; with all positions observed (batch, length[, outputs])."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Opened again by its text where it has one, with its own state where it has none."""
        return super().__reduce_ex__(protocol) if self.text is None else (_open_again, (self.text,))

    def begin_anew(self, label: str) -> None:  # noqa: B027 - most oracles draw nothing
        """From now on draw the random numbers that belong to a label, as every copy of the oracle would."""

    def close(self) -> None:  # noqa: B027 - most oracles hold nothing
        """Release what the oracle holds."""

    def __repr__(self) -> str:
        """What is asked, and what is known of it before anything is."""
        kind = type(self).__name__
        signature: Signature | None = getattr(self, "signature", None)
        if signature is None:  # a subclass that is being made
            return f"{kind}(…)"
        known = {
            "noise": "" if signature.noise.kind == "exact" else str(signature.noise),
            "max_norm": "" if signature.max_norm is None else f"{signature.max_norm:g}",
            "max_length": "" if signature.max_length is None else str(signature.max_length),
            "positions": "" if signature.positions == "last" else signature.positions,
            "answers": "" if signature.answers == "numbers" else signature.answers,
        }
        said = "".join(f", {name}={value!r}" for name, value in known.items() if value)
        return f"{kind}({str(getattr(self, 'name', ''))!r}, width={signature.width}{said})"

    @property
    def hints(self) -> Sequence[Mapping[str, Any]]:
        """Options of a method each that are worth trying: they choose what is asked, and nothing rests on them."""
        return ()

    def facts(self) -> dict[str, Any]:
        """What a report should say of how the oracle was asked, such as requests sent again."""
        return {}

    @final
    def __call__(self, tokens: Array) -> Array:
        """Answer a batch, or raise an error that says what is wrong with the query or the answer."""
        answers = self.ask(tokens)
        self.check_finite(answers)
        return answers

    @final
    def ask(self, tokens: Array) -> Array:
        """Answer a batch that may hold nan or inf: for several batches `check_finite` looks at all numbers at once."""
        self._check_question(tokens)
        try:
            answers = self.answer(tokens)
        except KeyholeError:
            raise
        except Exception as error:
            kind = OutOfMemory if is_out_of_memory(error) else OracleRaised
            raise kind(
                f"the oracle {self.name!r} raised {type(error).__name__}: {error} (asked {tuple(tokens.shape)} tokens)"
            ) from error
        return self._check_answers(answers, tokens)

    @final
    def check_finite(self, *answers: Array) -> None:
        """Raise NonFiniteAnswer unless all these answers are finite. It waits once for the device that they are on."""
        xp = self.signature.space.xp
        finite = [xp.all(xp.isfinite(each)) for each in answers]
        if not bool(finite[0] if len(finite) == 1 else xp.all(xp.stack(finite))):
            raise NonFiniteAnswer(
                f"the oracle {self.name!r} answered nan or inf to a question of finite tokens: "
                "set max_norm if it overflows at long tokens, or mend the box"
            )

    def _check_question(self, tokens: Array) -> None:
        signature, xp = self.signature, self.signature.space.xp
        if tokens.ndim != 3 or tokens.shape[2] != signature.width:
            raise UsageError(f"tokens must be (batch, length, {signature.width}), not {tuple(tokens.shape)}")
        if signature.max_length is not None and tokens.shape[1] > signature.max_length:
            raise UsageError(f"sequences of {tokens.shape[1]} tokens exceed max_length {signature.max_length}")
        if signature.alphabet is not None and not signature.alphabet.has(tokens):
            raise UsageError(
                f"{self.name!r} takes no tokens but the {signature.alphabet.size} of its alphabet: use method alphabet"
            )
        if signature.max_norm is not None:
            longest = float(xp.max(xp.linalg.vector_norm(tokens, axis=-1)))
            if not longest <= signature.max_norm:
                raise UsageError(f"a token of norm {longest} exceeds max_norm {signature.max_norm}")

    def _check_answers(self, answers: Array, tokens: Array) -> Array:
        space = self.signature.space
        if not array_api_compat.is_array_api_obj(answers):
            raise WrongShape(
                f"the oracle {self.name!r} answered a {type(answers).__name__}, expected an array: "
                "return one row per sequence"
            )
        leading = tuple(tokens.shape[:1] if self.signature.positions == "last" else tokens.shape[:2])
        shape = tuple(answers.shape)
        if shape[: len(leading)] != leading or len(shape) > len(leading) + 1:
            raise WrongShape(
                f"the oracle {self.name!r} answered shape {shape} to tokens {tuple(tokens.shape)}, "
                f"expected {leading} or {(*leading, 'outputs')}: return one row per sequence"
            )
        if 0 in shape[len(leading) :]:
            raise WrongShape(f"the oracle {self.name!r} answered no numbers, shape {shape}: there is nothing to read")
        if not is_real(answers):
            raise WrongShape(f"the oracle {self.name!r} answered {answers.dtype}, expected real numbers")
        answers = space.asarray(answers)
        return self._check_labels(answers, leading) if self.signature.answers == "labels" else answers

    def _check_labels(self, answers: Array, leading: tuple[int, ...]) -> Array:
        xp = self.signature.space.xp
        if tuple(answers.shape) == (*leading, 1):  # as of an argmax that keeps its axis
            answers = xp.reshape(answers, leading)
        if tuple(answers.shape) != leading:
            raise WrongShape(
                f"the oracle {self.name!r} answered shape {tuple(answers.shape)}, expected {leading}: an oracle whose "
                "answers are labels returns one whole number per sequence, such as a sign or an argmax"
            )
        wrong = (answers != xp.round(answers)) | (xp.abs(answers) > LARGEST_LABEL)
        if bool(xp.any(wrong)):
            odd = float(answers[wrong][0])
            raise WrongShape(
                f"the oracle {self.name!r} answered {odd:g}, which is no label: return whole numbers, or leave out "
                "answers='labels' where its answers are numbers"
            )
        return answers


def _open_again(text: str) -> Oracle:
    opened: Oracle = on_demand("targets").open_target(text).oracle
    return opened
