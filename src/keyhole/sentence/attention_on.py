"""What the heads of recovered layers attend to in a sentence: the model is run once, and watched."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from keyhole.arrays import Floats
from keyhole.errors import FileError, UsageError
from keyhole.families import Family
from keyhole.optional import extra
from keyhole.oracles.transformers.folder import open_model
from keyhole.oracles.transformers.own_run import first, hidden_place, run
from keyhole.oracles.transformers.places import Place, attention_in
from keyhole.sentence.token_weights import TokenWeights, matched_order, weights_of_heads

# What is shown where nobody has said a sentence: one whose pronoun a head may resolve.
SENTENCE = "The key did not turn in the lock because it was rusty."
# Longer sentences are cut: a picture of more words cannot be read.
MOST_TOKENS = 40
TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "vocab.json", "spiece.model", "tokenizer.model")
# What tokenizers write for a space before a word.
SPACES = ("Ġ", "▁")


def has_tokenizer(path: str | PathLike[str]) -> bool:
    """Whether the folder of a model says how its tokens are made of words."""
    return any((Path(path).expanduser() / name).is_file() for name in TOKENIZERS)


def attention_on(
    sentence: str, model: Any, found: Mapping[str | int, Family], tokenizer: Any = None
) -> dict[str, TokenWeights]:
    """What recovered heads attend to in a sentence, beside the attention of the model itself.

    `model` is a transformers model or its folder. `found` has the heads of layers by their numbers, or by the names of
    their modules as `load_layers` has them: those of the attention alone, without residual and norm. `tokenizer` makes
    tokens of the sentence; that in the folder if left out. The vectors that reach every layer are those that the model
    itself gives it.
    """
    words, inputs = _tokens_of(sentence, model, tokenizer)
    model = open_model(model, "attention_on")
    model = (model.float() if next(model.parameters()).itemsize < 4 else model).eval()
    places = attention_in(model)
    layers, chosen = dict[str, TokenWeights](), {_number(key, places): params for key, params in found.items()}
    seen, own = _watched(model, inputs, [places[number] for number in chosen])
    for number, params in chosen.items():
        name = places[number].name
        original = own[number] if len(own) == len(places) else None
        causal = _is_causal(model, original)
        if params.width != seen[name].shape[1]:
            raise UsageError(f"what was found at {name} has width {params.width}, its tokens {seen[name].shape[1]}")
        weights = weights_of_heads(params, seen[name], causal=causal)
        order = None if original is None else matched_order(weights, original)
        layers[name] = TokenWeights(words, weights, order)
    return layers


def _number(key: str | int, places: list[Place]) -> int:
    """The number of a layer that is named, or counted from either end."""
    names = [place.name for place in places]
    if isinstance(key, str) and key in names:
        return names.index(key)
    if isinstance(key, int) and -len(names) <= key < len(names):
        return key % len(names)
    raise UsageError(f"the model has no attention {key!r}: it has {', '.join(names)}, or 0 to {len(names) - 1}")


def _tokens_of(sentence: str, model: Any, tokenizer: Any) -> tuple[tuple[str, ...], Any]:
    """The words of the tokens, and what the model is given."""
    transformers = extra("transformers", "transformers", "attention_on")
    if tokenizer is None:
        if not isinstance(model, str | PathLike):
            raise UsageError("give the tokenizer of the model: attention_on(…, tokenizer=…)")
        if not has_tokenizer(model):
            raise FileError(
                f"{model} has no tokenizer, which makes tokens of a sentence: save it there beside the model"
            )
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(
                Path(model).expanduser(), local_files_only=True, trust_remote_code=False
            )
        except Exception as error:
            raise FileError(f"the tokenizer in {model} cannot be read ({type(error).__name__}: {error})") from error
    given = tokenizer(sentence, return_tensors="pt", truncation=True, max_length=MOST_TOKENS)
    words = tokenizer.convert_ids_to_tokens(given["input_ids"][0].tolist())
    if not words:
        raise UsageError("the sentence is empty: say some words")
    return tuple(_readable(str(word)) for word in words), given


def _readable(word: str) -> str:
    for space in SPACES:
        word = word.removeprefix(space)
    return word or "␣"


def _watched(model: Any, inputs: Any, places: list[Place]) -> tuple[dict[str, Floats], list[Floats]]:
    """The tokens (length, width) that reach each attention, and the weights (heads, length, length) of all of them."""
    seen: dict[str, Floats] = {}
    own: list[Floats] = []

    def seer(name: str) -> Any:
        def hook(_: Any, args: tuple[Any, ...], given: dict[str, Any]) -> None:
            where = hidden_place(args, given)
            if where is not None:
                vectors = given[where] if isinstance(where, str) else args[where]
                seen.setdefault(name, vectors[0].double().numpy())

        return hook

    def hooks() -> list[Any]:
        return [
            *(place.module.register_forward_pre_hook(seer(place.name), with_kwargs=True) for place in places),
            model.register_forward_hook(lambda _, __, outputs: own.extend(_weights_in(outputs))),
        ]

    with suppress(Exception):  # not every model computes weights that it can tell
        model.set_attn_implementation("eager")
    run(model, {**inputs, "output_attentions": True}, hooks)
    missing = [place.name for place in places if place.name not in seen]
    if missing:
        raise UsageError(f"the tokens of the sentence do not reach {missing[0]}: it is not run on text")
    return seen, own


def _weights_in(outputs: Any) -> list[Floats]:
    kept = getattr(outputs, "attentions", None) or ()
    return [first(each)[0].double().numpy() for each in kept if each is not None]


def _is_causal(model: Any, original: Floats | None) -> bool:
    """Whether no token looks at later ones."""
    if original is None:
        return bool(getattr(model.config, "is_decoder", False)) or "CausalLM" in str(model.config.architectures)
    return bool(np.all(np.triu(original[0], 1) == 0))
