"""What the heads that a run recovered attend to in a sentence, kept in its folder."""

from __future__ import annotations

from pathlib import Path

from keyhole.errors import KeyholeError, UsageError
from keyhole.families import Family, load
from keyhole.recover_model import load_layers
from keyhole.runs.store import ATTENTION, HEADS, PARAMS
from keyhole.sentence.attention_on import SENTENCE, attention_on, has_tokenizer
from keyhole.sentence.token_weights import save_weights
from keyhole.targets.models import TRANSFORMERS_EXAMPLE, TRANSFORMERS_KEYS, split

TRANSFORMERS = "transformers:"


def keep_attention(out: Path, target: str, sentence: str | None) -> tuple[dict[str, Path], list[str]]:
    """Write what the heads in a folder attend to; the path, or a note that says why there is none.

    Where no sentence is given one is taken, if the model has a tokenizer, and nothing is said if not.
    """
    (out / ATTENTION).unlink(missing_ok=True)
    try:
        path, found = _heads_in(out, target, sentence)
        if sentence is None and not (found and has_tokenizer(path)):
            return {}, []
        said = SENTENCE if sentence is None else sentence
        save_weights(out / ATTENTION, said, attention_on(said, path, found))
    except Exception as error:  # of a model that is run on text, which may raise anything: the result is kept already
        why = str(error) if isinstance(error, KeyholeError | ImportError) else f"{type(error).__name__}: {error}"
        silent = sentence is None and not target.startswith(TRANSFORMERS)
        return {}, [] if silent else [f"no attention on a sentence: {why}"]
    return {"attention": out / ATTENTION}, []


def _heads_in(out: Path, target: str, sentence: str | None) -> tuple[str, dict[str | int, Family]]:
    """The folder of the model, and what was recovered of it by layer: something, where a sentence was given."""
    if not target.startswith(TRANSFORMERS):
        raise UsageError("a sentence is for the layers of a model: transformers:PATH#layer=0")
    path, given = split(target.removeprefix(TRANSFORMERS), TRANSFORMERS_EXAMPLE, TRANSFORMERS_KEYS)
    if given.get("part", "attention") != "attention":
        raise UsageError("heads are shown on a sentence where the attention alone was recovered: part=attention")
    found: dict[str | int, Family] = {}
    if given.get("layer") == "all" and (out / HEADS).is_file():
        found.update(load_layers(out / HEADS)[0])
    elif (out / PARAMS).is_file():
        found[int(given["layer"])] = load(out / PARAMS)
    if sentence is not None and not found:
        raise UsageError("no heads were recovered")
    return path, found
