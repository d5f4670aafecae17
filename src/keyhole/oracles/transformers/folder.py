"""Reading a model from a folder: never from the network, never with code of the folder."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any

from keyhole.errors import FileError, UsageError
from keyhole.optional import extra

# Files with the weights of a model, those that can be read without running code first.
SAFE = ("model.safetensors", "model.safetensors.index.json")
PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")
# Ways to compute attention, the first that the model has: its own choice, and what every model has.
IMPLEMENTATIONS = (None, "eager")


def open_model(model: Any, user: str) -> Any:
    """The model itself, or the one in the folder that was given."""
    torch = extra("torch", "transformers", user)
    if isinstance(model, str | PathLike):
        return read_model(model, user)
    if not isinstance(model, torch.nn.Module):
        raise UsageError(f"model must be a transformers model or a folder with one, not {type(model).__name__}")
    return model


def read_model(path: str | PathLike[str], user: str) -> Any:
    """The model in a folder that `save_pretrained` wrote, in eval mode and in the dtype that it is stored in."""
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise FileError(
            f"{path} is no folder: a model is read from a folder with config.json and model.safetensors, never fetched "
            "by its name; download it first"
        )
    _check_config(folder, path)
    safe = any((folder / name).is_file() for name in SAFE)
    pickled = [name for name in PICKLED if (folder / name).is_file()]
    if not safe and not pickled:
        raise FileError(f"{path} has no weights: there should be a model.safetensors beside its config.json")
    transformers = extra("transformers", "transformers", user)
    troubles: list[Exception] = []
    for implementation in IMPLEMENTATIONS:
        chosen = {} if implementation is None else {"attn_implementation": implementation}
        try:
            with _quiet(transformers):
                model, about = transformers.AutoModel.from_pretrained(
                    folder,
                    local_files_only=True,
                    trust_remote_code=False,
                    use_safetensors=safe,
                    weights_only=True,
                    dtype="auto",
                    output_loading_info=True,
                    **chosen,
                )
            break
        except Exception as error:
            troubles.append(error)
            if "attn_implementation" not in str(error) and "flash" not in str(error).lower():
                raise _unreadable(path, pickled, safe, error) from error
    else:
        raise _unreadable(path, pickled, safe, troubles[0]) from troubles[0]
    _refuse_missing(path, about)
    return model.eval()


def _check_config(folder: Path, path: object) -> None:
    """FileError for a config that says of no architecture that it is one."""
    if not (folder / "config.json").is_file():
        raise FileError(f"{path} has no config.json: it is no folder of a transformers model")
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise FileError(f"{path} cannot be read as a transformers model: its config.json is no JSON") from error
    if not isinstance(config, dict) or "model_type" not in config:
        raise FileError(
            f"{path} cannot be read as a transformers model: its config.json names no architecture (model_type). "
            "Write the folder again with save_pretrained, or open the model yourself and hand it over"
        )


def _unreadable(path: object, pickled: list[str], safe: bool, error: Exception) -> FileError:
    if not safe:
        return FileError(
            f"{path} has its weights in {pickled[0]} only, a pickle, and they cannot be read as weights alone "
            f"({type(error).__name__}). A pickle can run any code: ask for model.safetensors, or convert it where you "
            "trust it"
        )
    reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    remedy = (
        "open it yourself, with attn_implementation='eager' where it wants another that is not here, and hand over the "
        "model; or ask one of its modules with TorchOracle(module, width=...)"
    )
    return FileError(f"{path} cannot be read as a transformers model ({reason}): {remedy}")


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
