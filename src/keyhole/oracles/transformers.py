"""One layer of a transformers model as an oracle that takes vectors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any, Literal

from keyhole.arrays import Array
from keyhole.errors import FileError, UsageError
from keyhole.families import MultiHead
from keyhole.families.torch_layouts import Albert, Bert, Gpt2, Llama, Place, attention_in, heads_of
from keyhole.noise import Noise
from keyhole.optional import extra
from keyhole.oracles.positions import Positions
from keyhole.oracles.torch import TorchOracle, identity
from keyhole.queries import digest

Part = Literal["attention", "attention-block", "layer"]
PARTS = ("attention", "attention-block", "layer")
# Files with the weights of a model, those that can be read without running code first.
SAFE = ("model.safetensors", "model.safetensors.index.json")
PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")

# (the part's module, tokens, what else the model's own code would give it) -> outputs
Ask = Callable[[Any, Array, dict[str, Any]], Any]


class TransformersOracle(TorchOracle):
    """One layer of a model of BERT, RoBERTa, MiniLM, ALBERT, GPT-2 or Llama kind, asked with vectors.

    `model` is a transformers model in eval mode, or a folder that holds one; nothing is ever fetched, and no code of
    the folder runs. `layer` counts from 0, from the end if negative; layers that a model shares count once. `part` is

    - "attention": heads and output projection, without residual and normalisation;
    - "attention-block": the same with the residual and the normalisation that the model has, before or behind;
    - "layer": the whole layer, the feed-forward part included.

    Causal models keep their mask, rotary models their positions. `answers="labels"`: only the number of the largest
    output is told. The other arguments are those of `TorchOracle`; the
    dtype is that of the stored weights unless given.
    """

    def __init__(
        self,
        model: Any,
        layer: int | Literal["all"],
        part: Part = "attention",
        *,
        positions: Positions = "last",
        dtype: Any = None,
        device: Any = None,
        max_norm: float | None = None,
        max_length: int | None = None,
        noise: Noise | str | None = None,
        batch_limit: int | None = None,
        answers: Literal["numbers", "labels"] = "numbers",
        name: str | None = None,
    ) -> None:
        if part not in PARTS:
            raise UsageError(f"part must be one of {', '.join(PARTS)}, not {part!r}")
        if layer == "all":
            raise UsageError("one oracle is one layer: keyhole.recover_model(model) recovers all of them")
        model = open_model(model, type(self).__name__)
        self.place = place_in(model, layer)
        self.part = part
        whole = part == "layer" or (part == "attention-block" and not isinstance(self.place.layout, Bert))
        module = self.place.layer if whole else self.place.module
        ask = _whole_module if part == "layer" else ASKS[type(self.place.layout)][part]
        surroundings = _Surroundings(model, self.place)
        told = _largest if answers == "labels" else _all
        super().__init__(
            module,
            _width(self.place),
            positions=positions,
            dtype=dtype,
            device=device,
            batch_first=True,
            call=lambda module, tokens: told(ask(module, tokens, surroundings.of(tokens))),
            max_norm=max_norm,
            max_length=max_length,
            noise=noise,
            batch_limit=batch_limit,
            answers=answers,
            name=name,
        )
        if name is None:
            where = "" if isinstance(positions, str) else f" at position {positions}"
            where += " | labels" if answers == "labels" else ""
            self.name = f"{identity(self.module)} {part}{surroundings.words}{where}"

    def heads(self) -> MultiHead:
        """The heads inside, to compare a recovery with; only of the part "attention", and not of rotary models."""
        if self.part != "attention":
            raise UsageError(f"the part {self.part!r} is more than its heads: ask the part 'attention' for them")
        return heads_of(self.module)


def _all(outputs: Any) -> Any:
    return outputs


def _largest(outputs: Any) -> Any:  # (batch, length, outputs) -> (batch, length)
    return outputs.argmax(dim=-1)


def open_model(model: Any, user: str) -> Any:
    """The model itself, or the one in the folder that was given."""
    torch = extra("torch", "transformers", user)
    if isinstance(model, str | PathLike):
        return read_model(model, user)
    if not isinstance(model, torch.nn.Module):
        raise UsageError(f"model must be a transformers model or a folder with one, not {type(model).__name__}")
    return model


def place_in(model: Any, layer: int) -> Place:
    """The attention module of a layer; UsageError says how many layers there are."""
    places = [place for place in attention_in(model) if type(place.layout) in ASKS]
    if not places:
        raise UsageError(
            f"{type(model).__name__} has no attention layer of a kind that Keyhole can ask; known are those of BERT, "
            "RoBERTa, MiniLM, ALBERT, GPT-2 and Llama: ask another module with TorchOracle(module, width=..., call=...)"
        )
    if isinstance(layer, bool) or not isinstance(layer, int) or not -len(places) <= layer < len(places):
        raise UsageError(
            f"{type(model).__name__} has no layer {layer!r}: its {len(places)} attention layers are counted from 0 to "
            f"{len(places) - 1} (layers that it shares count once)"
        )
    return places[layer]


class _Surroundings:
    """What a model's own code gives its layers besides tokens: a mask, and rotary positions."""

    def __init__(self, model: Any, place: Place) -> None:
        self._torch = extra("torch", "torch", "TransformersOracle")
        self._causal = place.layout.causal(place.module)
        self._rotary = _rotary(model) if place.layout.rotary else None
        self.words = ", causal" if self._causal else ""
        if self._rotary is not None:
            self.words += f", rotary {digest(self._rotary.inv_freq.float()).hex()[:16]}"

    def of(self, tokens: Array) -> dict[str, Any]:
        """Arguments for tokens (batch, length, width).

        The mask is given in full: attention that is not given one may take it that all is in sight.
        """
        torch, length = self._torch, tokens.shape[1]
        mask = None
        if self._causal:
            blocked = torch.ones(length, length, dtype=torch.bool, device=tokens.device).triu(1)
            mask = torch.zeros(1, 1, length, length, dtype=tokens.dtype, device=tokens.device)
            mask = mask.masked_fill(blocked, -torch.inf)
        given: dict[str, Any] = {"attention_mask": mask}
        if self._rotary is not None:
            places = torch.arange(length, device=tokens.device)[None, :]
            given |= {"position_ids": places, "position_embeddings": self._rotary(tokens, places)}
        return given


def _rotary(model: Any) -> Any:
    for module in model.modules():
        if hasattr(module, "inv_freq") and hasattr(module, "rope_init_fn"):
            return module
    rotary = getattr(model, "rotary_emb", None) or getattr(getattr(model, "model", None), "rotary_emb", None)
    if rotary is None:
        raise UsageError(
            f"{type(model).__name__} does not show its rotary positions (rotary_emb): give the whole model"
        )
    return rotary


def _width(place: Place) -> int:
    config = getattr(place.module, "config", None) or getattr(getattr(place.module, "self", None), "config", None)
    if config is None:
        raise UsageError(f"{type(place.module).__name__} does not say how many numbers a token has")
    return int(config.hidden_size)


def _first(outputs: Any) -> Any:
    return outputs[0] if isinstance(outputs, tuple) else outputs


def _bert(module: Any, tokens: Array, given: dict[str, Any]) -> Any:
    return module.output.dense(_first(module.self(tokens, **given)))


def _whole_module(module: Any, tokens: Array, given: dict[str, Any]) -> Any:
    return _first(module(tokens, **given))


def _albert(module: Any, tokens: Array, given: dict[str, Any]) -> Any:
    """Its module normalises at once; what its output projection gave is caught on the way."""
    caught: list[Any] = []
    hook = module.dense.register_forward_hook(lambda _module, _given, outputs: caught.append(outputs))
    try:
        module(tokens, **given)
    finally:
        hook.remove()
    return caught[-1]


def _gpt2_block(layer: Any, tokens: Array, given: dict[str, Any]) -> Any:
    return tokens + _first(layer.attn(layer.ln_1(tokens), **given))


def _llama_block(layer: Any, tokens: Array, given: dict[str, Any]) -> Any:
    return tokens + _first(layer.self_attn(layer.input_layernorm(tokens), **given))


ASKS: dict[type, dict[str, Ask]] = {
    Bert: {"attention": _bert, "attention-block": _whole_module},
    Albert: {"attention": _albert, "attention-block": _whole_module},
    Gpt2: {"attention": _whole_module, "attention-block": _gpt2_block},
    Llama: {"attention": _whole_module, "attention-block": _llama_block},
}


# Reading a model from a folder: never from the network, never with code of the folder.


def read_model(path: str | PathLike[str], user: str) -> Any:
    """The model in a folder that `save_pretrained` wrote, in eval mode and in the dtype that it is stored in."""
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise FileError(
            f"{path} is no folder: a model is read from a folder with config.json and model.safetensors, never fetched "
            "by its name; download it first"
        )
    if not (folder / "config.json").is_file():
        raise FileError(f"{path} has no config.json: it is no folder of a transformers model")
    safe = any((folder / name).is_file() for name in SAFE)
    pickled = [name for name in PICKLED if (folder / name).is_file()]
    if not safe and not pickled:
        raise FileError(f"{path} has no weights: there should be a model.safetensors beside its config.json")
    transformers = extra("transformers", "transformers", user)
    try:
        with _quiet(transformers):
            model, about = transformers.AutoModel.from_pretrained(
                folder,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=safe,
                weights_only=True,
                attn_implementation="sdpa",
                dtype="auto",
                output_loading_info=True,
            )
    except Exception as error:
        raise _unreadable(path, pickled, safe, error) from error
    _refuse_missing(path, about)
    return model.eval()


def _unreadable(path: object, pickled: list[str], safe: bool, error: Exception) -> FileError:
    if not safe:
        return FileError(
            f"{path} has its weights in {pickled[0]} only, a pickle, and they cannot be read as weights alone "
            f"({type(error).__name__}). A pickle can run any code: ask for model.safetensors, or convert it where you "
            "trust it"
        )
    reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return FileError(f"{path} cannot be read as a transformers model ({reason})")


def _refuse_missing(path: object, about: dict[str, Any]) -> None:
    """Tensors that are not in the file would be random numbers; a pooler is no part of any layer."""
    missing = sorted(name for name in about.get("missing_keys", ()) if "pooler" not in name)
    wrong = sorted(str(each) for each in about.get("mismatched_keys", ()))
    if missing or wrong:
        named = ", ".join((missing + wrong)[:3])
        raise FileError(
            f"{path} lacks {len(missing) + len(wrong)} of the tensors that its config.json describes, {named} among "
            "them: the model would have random weights in their place"
        )


@contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """No progress bars and no advice while a model is read: what matters becomes an error."""
    logging = transformers.utils.logging
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
