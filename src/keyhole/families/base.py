"""What every family is: parameters, a forward map, and what certificates, verification and reports ask of both."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cache
from os import PathLike
from typing import TYPE_CHECKING, ClassVar, Protocol, Self

import numpy as np

from keyhole.arrays import Array, Floats, floats, like, namespace
from keyhole.errors import UsageError
from keyhole.families.files import save_arrays
from keyhole.optional import on_demand

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    from keyhole.families.forms.base import Form
    from keyhole.families.relu_net import ReluNet
    from keyhole.families.single_head import SingleHead

    F = TypeVar("F", bound="Family", default="Family")
    F_co = TypeVar("F_co", bound="Family", default="Family", covariant=True)
else:  # the default is for type checkers only: `typing` knows none before Python 3.13
    from typing import TypeVar

    F, F_co = TypeVar("F"), TypeVar("F_co", covariant=True)


MATRIX = 2  # dimensions


@dataclass(frozen=True)
class Anatomy:
    """What parameters are made of, as reports and verification see them."""

    title: str  # what they are, in words
    heads: tuple[SingleHead, ...] = ()
    numbered: bool = False  # whether a head is one of a list and called by its number
    net: ReluNet | None = None
    behind: bool = False  # whether answers pass through a net behind the heads
    form: Form | None = None  # of one head whose logits are not bilinear

    @property
    def attends(self) -> bool:
        """Whether there are heads, whose logits have a size."""
        return bool(self.heads) or self.form is not None

    def matrices(self) -> dict[str, Array]:
        """The matrices that people look at: scores of heads, and weights into the neurons of a net."""
        if self.form is not None:
            return {name: array for name, array in self.form.arrays().items() if array.ndim == MATRIX}
        named = {f"score of head {number}": head.score for number, head in enumerate(self.heads)}
        scores = named if self.numbered else {"score": self.heads[0].score} if self.heads else {}
        return scores if self.net is None else {**scores, "weights into the neurons": self.net.weights_in}


@dataclass(frozen=True)
class Part:
    """One array of the parameters, and the first-order effect of a change of it: an outer product left ⊗ right."""

    name: str  # score, value and so on
    head: int | None
    size: float  # Frobenius norm
    count: int  # numbers in it
    left: Floats  # (rows, m): for each answer that is looked at
    right: Floats  # (rows, n)
    reach: Floats  # (queries, outputs): how far a change of norm one may move each answer
    added: bool = False  # every entry is added to one number of every answer

    @property
    def label(self) -> str:
        """The part in words."""
        name = self.name.replace("_", " ")
        return name if self.head is None else f"{name} of head {self.head}"

    def powers(self) -> Floats:  # (rows,)
        """Variances of the answers under random changes of the part's own size."""
        return np.asarray(np.sum(self.left**2, axis=1) * np.sum(self.right**2, axis=1) * (self.size**2 / self.count))

    def gram(self) -> Floats:  # (rows, rows)
        """Covariance of the answers under random changes of the part's own size."""
        whole: Floats = (self.left @ self.left.T) * (self.right @ self.right.T) * (self.size**2 / self.count)
        return whole


@dataclass(frozen=True)
class Sensitivity:
    """Predictions of some queries, their rounding, and the first-order effect of each part of the parameters."""

    answers: Floats  # (queries, outputs)
    rounding: Floats  # (queries, outputs)
    parts: tuple[Part, ...]


@cache
def field_names(kind: type) -> tuple[str, ...]:
    """The names of the fields of a dataclass, which are looked up for every batch that a family answers."""
    return tuple(each.name for each in fields(kind))


# Arrays that are listed where parameters are shown in one line.
MOST_LISTED = 6


class Family(Protocol):
    """Parameters of one kind of map from sequences to answers.

    A family derives from this class, is a frozen dataclass of its arrays, and defines what stands before `of_arrays`;
    the answers of everything after it hold for any map and are overridden where a family knows more. Radii and
    standard errors of parameters are parameters of the same family.
    """

    family: ClassVar[str]

    @property
    def width(self) -> int:
        """Numbers per token."""
        ...

    @property
    def outputs(self) -> int | None:
        """Numbers per answer; None when the answer is a plain number."""
        ...

    def __call__(self, tokens: Array) -> Array:  # (batch, length, width) -> (batch,) or (batch, outputs)
        """Answer a batch of sequences, in the library and dtype and on the device of the tokens."""
        ...

    def error_bar(self, radius: Self, tokens: Array, rounding: float) -> Array:  # (batch, length, width) -> as answers
        """First-order bound on `|f_true − f_self|` for parameters right within `radius`.

        `rounding` is the relative error of one inner product of unit vectors, in the oracle and in this prediction.
        """
        ...

    def deviation(self, errors: Self, tokens: Array) -> Array:  # (batch, length, width) -> as answers
        """Standard deviation of predictions whose numbers err independently by these standard errors, or a bound."""
        return self.error_bar(errors, tokens, 0.0)

    def token_norm(self, size: float) -> float:
        """The norm of random tokens with logits of about `size`, or `size` times as far out as the typical kink."""
        ...

    def logit_norm(self, radius: Self, logit_radius: float) -> float:
        """The norm up to which radii leave logits of random tokens known to `logit_radius`; inf where that is any."""
        norms = (namespace(head.score).linalg.vector_norm(head.score) for head in radius.anatomy.heads)
        widest = max(map(float, norms), default=0.0)
        if not widest < np.inf:
            return 1.0
        # Random tokens of norm n make of a matrix a number of about n² times its norm over the width.
        return (logit_radius * self.width / widest) ** 0.5 if widest > 0 else float("inf")

    def effects(self, change: Self, tokens: Array) -> Iterator[tuple[str, Array]]:  # names, arrays as answers
        """How far a change of each part alone, of the size of `change`, moves the answers, to first order."""
        arrays = change.arrays()
        for name in self.arrays():
            alone = {each: array if each == name else 0 * array for each, array in arrays.items()}
            yield name.replace("_", " "), self.error_bar(self.with_arrays(alone), tokens, 0.0)

    @classmethod
    def of_arrays(cls, **arrays: Array) -> Self:
        """The parameters of arrays as `arrays` names them, and of what `words` says; TypeError for unknown names."""
        return cls(**arrays)

    @property
    def words(self) -> dict[str, str]:
        """What determines the map besides numbers."""
        return {}

    def arrays(self) -> dict[str, Array]:
        """The parameters that are present, by name; those of an inner family by their path."""
        named = ((name, getattr(self, name)) for name in field_names(type(self)))
        return {name: array for name, array in named if hasattr(array, "ndim")}

    def with_arrays(self, named: dict[str, Array]) -> Self:
        """A copy with other arrays, named as `arrays` names them."""
        return self.of_arrays(**named, **self.words)

    def like(self, tokens: Array) -> Self:
        """A copy with all arrays in the library, dtype and device of `tokens`; no copy where they are there."""
        own = self.arrays()
        moved = {name: like(array, tokens) for name, array in own.items()}
        same = all(array is own[name] for name, array in moved.items())
        return self if same else self.with_arrays(moved)

    def __init_subclass__(cls, **given: object) -> None:
        super().__init_subclass__(**given)
        if "__repr__" not in vars(cls):  # a dataclass would write out all numbers
            cls.__repr__ = Family.__repr__  # type: ignore[method-assign]

    def __repr__(self) -> str:
        """The arrays by name and shape, not their numbers."""
        shapes = [f"{name} {tuple(array.shape)}" for name, array in self.arrays().items()]
        words = [f"{name} {word}" for name, word in self.words.items()]
        more = [f"{len(shapes) - MOST_LISTED} arrays more"] if len(shapes) > MOST_LISTED else []
        return f"{type(self).__name__}({', '.join([*shapes[:MOST_LISTED], *more, *words[:MOST_LISTED]])})"

    def _repr_html_(self) -> str:
        """A card for notebooks."""
        card: str = on_demand("report.notebook").card_of_params(self)
        return card

    def save(self, path: str | PathLike[str]) -> None:
        """Write the parameters to a safetensors file that `keyhole.load` reads."""
        save_arrays(path, self.family, self.arrays(), self.words)

    @property
    def positions(self) -> str:
        """Where answers are: at the `last` position, or at `all` of them, (batch, length, outputs)."""
        return "last"

    def without_attention(self) -> Self | None:
        """A copy in which all tokens weigh the same; None of what has no attention."""
        return None

    def loudest(self) -> Array | None:  # (width,)
        """The unit token whose value is largest, where answers are sums of values."""
        return None

    def onto_kinks(self, x: Floats, rng: np.random.Generator) -> Floats:  # noqa: ARG002 - (n, width) -> (n, width)
        """The points moved onto a kink each; as they are where the map has none that is known."""
        return x

    def padded(self, absent: Array) -> Self | None:  # noqa: ARG002 - (batch, length)
        """The map of a batch without the tokens where `absent`, elsewhere zero, is −inf; none of them is a last token.

        They equal others of their sequence. None where more than the tokens count: how many, or where they are.
        """
        return None

    def as_single_tokens(self, tokens: Array) -> Array | None:  # noqa: ARG002 - (batch, length, width)
        """The tokens (batch, width) that alone are answered as these sequences; None where the map knows of none."""
        return None

    def onto_boundary(self, tokens: Floats, rng: np.random.Generator) -> Floats:  # noqa: ARG002 - (length, width)
        """The sequence moved close to where its answer jumps; as it is where answers do not."""
        return tokens

    @property
    def jumping_length(self) -> int | None:
        """The fewest tokens whose answer jumps, where one takes the place of another; None where answers do not."""
        return None

    def check(self) -> None:
        """UsageError for constants out of their range. It is for parameters, not for their radii, which may be zero."""
        return

    def simplest(self) -> Family:
        """The parameters in the smallest family that holds them."""
        return self

    @property
    def has_poles(self) -> bool:
        """Whether answers to some finite tokens are not finite: none of them can be asked for."""
        return False

    @property
    def label_names(self) -> tuple[int, ...]:
        """What may be answered where answers are labels; none where they are numbers."""
        return ()

    @property
    def tells_labels(self) -> bool:
        """Whether an answer is a label, which is right or wrong, and not a number."""
        return bool(self.label_names)

    def numbers(self) -> Family:
        """The family of the numbers behind labels; itself where answers are numbers."""
        return self

    @property
    def constant(self) -> Array | None:
        """What every answer has, whatever the query: to predict it says nothing."""
        return None

    @property
    def anatomy(self) -> Anatomy:
        """What the parameters are made of."""
        return Anatomy(f"A {self.family} of width {self.width}")

    @property
    def counting_bound(self) -> int:
        """The fewest queries whose answers hold as many numbers as the parameters do."""
        numbers = sum(int(np.prod(array.shape)) for array in self.arrays().values())
        return -(-numbers // (self.outputs or 1))

    def matrices(self) -> dict[str, Array]:
        """The matrices that people look at: scores of heads, and weights into the neurons of a net."""
        return self.anatomy.matrices()

    def sensitivity(self, tokens: Floats, unit: float, looked_at: Array) -> Sensitivity:  # noqa: ARG002
        """Predictions, rounding by arithmetic of inner products right within `unit`, and the effect of each part.

        `looked_at` numbers the outputs that parts are for. Of a map that is known as a function only there are none.
        """
        exactly = self.with_arrays({name: 0 * array for name, array in self.arrays().items()})
        shape = (tokens.shape[0], -1)
        return Sensitivity(
            floats(self(tokens)).reshape(shape), floats(self.error_bar(exactly, tokens, unit)).reshape(shape), ()
        )


def is_family(params: object) -> bool:
    """Whether something is parameters of a family: answers sequences, and names its family."""
    return callable(params) and isinstance(getattr(params, "family", None), str)


def check_arrays(params: Family, *names: str) -> None:
    """UsageError for parameters that are no arrays; None is one where it is the default."""
    for name in names:
        array = getattr(params, name)
        if not hasattr(array, "ndim") and (array is not None or getattr(type(params), name, 0) is not None):
            raise UsageError(f"{type(params).__name__}.{name} must be an array, not {type(array).__name__}")


def check_shapes(params: Family, **expected: tuple[int, ...]) -> None:
    """UsageError for arrays that are present and of another shape than expected."""
    for name, shape in expected.items():
        array = getattr(params, name)
        if array is not None and tuple(array.shape) != shape:
            raise UsageError(f"{type(params).__name__}.{name} has shape {tuple(array.shape)}, expected {shape}")


def under(prefix: str, named: dict[str, Array]) -> dict[str, Array]:
    """Arrays or words of an inner family by their path."""
    return {f"{prefix}.{name}": array for name, array in named.items()}


def below(family: str, arrays: dict[str, Array], *prefixes: str) -> dict[str, dict[str, Array]]:
    """Arrays by path taken apart by the first step of it; TypeError for another step than these."""
    parts: dict[str, dict[str, Array]] = {prefix: {} for prefix in prefixes}
    for name, array in arrays.items():
        step, _, inner = name.partition(".")
        if step not in parts or not inner:
            raise TypeError(f"a {family} has no {name!r}")
        parts[step][inner] = array
    return parts
