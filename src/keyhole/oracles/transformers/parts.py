"""The parts of a layer that can be asked, and how: the module's own code, with hooks where a part begins and ends."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, ClassVar, final

from keyhole.errors import UsageError
from keyhole.optional import extra
from keyhole.oracles.transformers.own_run import (
    USER,
    Reached,
    exactly_computed,
    first,
    hidden_place,
    hooked,
    own_inputs,
    run,
)
from keyhole.oracles.transformers.places import Place
from keyhole.oracles.transformers.surroundings import LENGTHS, Call, Surroundings

# A part may differ from the model's own run by this many roundings, and by no more than this part of the answers.
ROUNDINGS, MOST_OFF = 1e3, 0.1


@dataclass
class Seen:
    """What a part was given and what it answered."""

    given: Any = None
    answered: Any = None


@dataclass
class LayerPart(ABC):
    """A part of a layer, asked through the module that contains it."""

    place: Place
    seen: Seen = field(default_factory=Seen)

    name: ClassVar[str]
    instead: ClassVar[str] = "the part 'attention', or "  # what to ask where this part cannot be

    @property
    @abstractmethod
    def module(self) -> Any:
        """The module that is called."""

    @abstractmethod
    def hooks(self, tokens: Any = None) -> list[Any]:
        """Hooks that note what the part is given and answers; with tokens, those are given in place of its own."""

    @final
    def ask(self, tokens: Any, call: Call) -> Any:
        """The answers of the part to tokens (batch, length, width)."""
        self.seen = Seen()
        args, given = call.of(tokens)
        torch = extra("torch", "transformers", USER)
        with hooked(lambda: self.hooks(tokens)), exactly_computed(self.place.model), torch.no_grad(), suppress(Reached):
            self.module(*args, **given)
        answered, self.seen = self.seen.answered, Seen()
        return answered

    @final
    def check(self, surroundings: Surroundings, eps: float) -> None:
        """UsageError where the part, asked, answers otherwise than in a run of the model."""
        self.seen = Seen()
        model = self.place.model
        run(model, own_inputs(model, 2, LENGTHS[1], seed=1), self.hooks)
        seen = self.seen
        if seen.given is None or seen.answered is None:
            raise UsageError(f"the {self.name} of {self.place.name} was not seen in a run of {type(model).__name__}")
        tokens = seen.given.detach()
        answers = self.ask(tokens, surroundings.of(*tokens.shape[:2]))
        size = float(seen.answered.abs().max())
        off = float((answers - seen.answered).abs().max()) if answers.shape == seen.answered.shape else float("inf")
        if not off <= min(ROUNDINGS * eps, MOST_OFF) * size:
            raise UsageError(
                f"the {self.name} of {self.place.name}, asked alone, answers otherwise than in a run of "
                f"{type(model).__name__}, by {off:.2g} where answers reach {size:.2g}: it reads more than its "
                f"tokens, as layers of a decoder do that attend to an encoder too. Ask {self.instead}the module with "
                "TorchOracle(module, width=..., call=...)"
            )


class Layer(LayerPart):
    """The whole layer."""

    name = "layer"

    @property
    def module(self) -> Any:
        """The layer; UsageError where the model has no module that is one."""
        if self.place.layer is None:
            raise UsageError(
                f"{type(self.place.model).__name__} calls no module that is the layer around {self.place.name}: ask "
                "the part 'attention'"
            )
        return self.place.layer

    def hooks(self, tokens: Any = None) -> list[Any]:  # noqa: ARG002 - its call is given them
        """The layer's own input and output."""
        return [self.module.register_forward_hook(_noting(self.seen), with_kwargs=True)]


class Attention(LayerPart):
    """Heads and output projection, without residual and normalisation."""

    name, instead = "attention", ""

    @property
    def module(self) -> Any:
        """The smallest module with all of attention."""
        return self.place.module

    def hooks(self, tokens: Any = None) -> list[Any]:
        """What makes queries, keys and values reads the tokens, and what the output projection makes is the answer."""
        seen, read = self.seen, set[int]()

        def entry(module: Any, args: tuple[Any, ...]) -> Any:
            if id(module) in read:  # a second time: of something else than tokens
                return None
            read.add(id(module))
            if seen.given is None:
                (seen.given,) = args
            return None if tokens is None else (tokens,)

        def leave(_module: Any, _args: tuple[Any, ...], outputs: Any) -> None:
            seen.answered = outputs
            raise Reached

        return [
            *(each.register_forward_pre_hook(entry) for each in self.place.entries),
            self.place.exit.register_forward_hook(leave),
        ]


class AttentionBlock(Layer):
    """Attention with the residual and the normalisation that the layer has, before or behind."""

    name = "attention-block"

    def hooks(self, tokens: Any = None) -> list[Any]:
        """What the rest of the layer reads where that ends with a norm; else the layer, its rest answering zero."""
        if self.place.after is not None:
            seen = self.seen

            def note(_module: Any, args: tuple[Any, ...], given: dict[str, Any]) -> None:
                where = hidden_place(args, given)
                seen.given = seen.given if where is None else given[where] if isinstance(where, str) else args[where]

            def leave(_module: Any, args: tuple[Any, ...]) -> None:
                (seen.answered,) = args
                raise Reached

            return [
                self.module.register_forward_pre_hook(note, with_kwargs=True),
                self.place.after.register_forward_pre_hook(leave),
            ]
        silent = [each.register_forward_hook(_silence(self.place.width)) for each in self.place.behind]
        return [*silent, *super().hooks(tokens)]


def _noting(seen: Seen) -> Callable[..., None]:
    def hook(_module: Any, args: tuple[Any, ...], given: dict[str, Any], outputs: Any) -> None:
        where = hidden_place(args, given)
        seen.given = seen.given if where is None else given[where] if isinstance(where, str) else args[where]
        seen.answered = first(outputs)
        raise Reached

    return hook


def _silence(width: int) -> Callable[..., Any]:
    """A hook that answers zero where a module answers vectors as wide as tokens."""

    def hook(_module: Any, _args: tuple[Any, ...], outputs: Any) -> Any:
        return outputs.new_zeros(outputs.shape) if getattr(outputs, "shape", (0,))[-1] == width else None

    return hook


PARTS: dict[str, type[LayerPart]] = {part.name: part for part in (Attention, AttentionBlock, Layer)}
