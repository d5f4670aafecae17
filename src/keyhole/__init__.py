"""Keyhole recovers the attention inside a model from its answers, with the fewest queries and a certificate."""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from keyhole.audit import audit
    from keyhole.compress import compress
    from keyhole.errors import KeyholeError, RecoveryFailed
    from keyhole.families import (
        AttentionLayer,
        FormHead,
        Labels,
        MultiHead,
        NormAfter,
        NormBefore,
        OneLayer,
        ReluNet,
        Residual,
        SingleHead,
        load,
    )
    from keyhole.gauge import Witness, canonical, distance, equivalent, kinds, on_alphabet, witness
    from keyhole.noise import Noise
    from keyhole.oracles import FunctionOracle, HttpOracle, OnnxOracle, RestOracle, TorchOracle, TransformersOracle
    from keyhole.recover import diagnose, recover
    from keyhole.recover_model import recover_model
    from keyhole.recovery import Outcome, Recovery
    from keyhole.samples import learn
    from keyhole.sentence import attention_on
    from keyhole.verify import Verdict, verify

    __version__: str

__all__ = [
    "AttentionLayer",
    "FormHead",
    "FunctionOracle",
    "HttpOracle",
    "KeyholeError",
    "Labels",
    "MultiHead",
    "Noise",
    "NormAfter",
    "NormBefore",
    "OneLayer",
    "OnnxOracle",
    "Outcome",
    "Recovery",
    "RecoveryFailed",
    "ReluNet",
    "Residual",
    "RestOracle",
    "SingleHead",
    "TorchOracle",
    "TransformersOracle",
    "Verdict",
    "Witness",
    "attention_on",
    "audit",
    "canonical",
    "compress",
    "diagnose",
    "distance",
    "equivalent",
    "kinds",
    "learn",
    "load",
    "on_alphabet",
    "recover",
    "recover_model",
    "verify",
    "witness",
]

# Where each name lives: it is imported when it is first used, so that `import keyhole` costs next to nothing.
_HOMES = {
    "keyhole.audit": ("audit",),
    "keyhole.compress": ("compress",),
    "keyhole.errors": ("KeyholeError", "RecoveryFailed"),
    "keyhole.families": (
        "AttentionLayer",
        "FormHead",
        "Labels",
        "MultiHead",
        "NormAfter",
        "NormBefore",
        "OneLayer",
        "ReluNet",
        "Residual",
        "SingleHead",
        "load",
    ),
    "keyhole.gauge": ("Witness", "canonical", "distance", "equivalent", "kinds", "on_alphabet", "witness"),
    "keyhole.noise": ("Noise",),
    "keyhole.oracles": (
        "FunctionOracle",
        "HttpOracle",
        "OnnxOracle",
        "RestOracle",
        "TorchOracle",
        "TransformersOracle",
    ),
    "keyhole.recover_model": ("recover_model",),
    "keyhole.recovery": ("Outcome", "Recovery"),
    "keyhole.samples": ("learn",),
    "keyhole.sentence": ("attention_on",),
    "keyhole.recover": ("diagnose", "recover"),
    "keyhole.verify": ("Verdict", "verify"),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}


class _Package(ModuleType):
    """Keeps public names what they are: `audit`, `verify` and others are functions, and submodules too."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _HOME and isinstance(value, ModuleType)):  # which the import of a submodule would set
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    """A public name, the version, or a submodule."""
    if name == "__version__":
        return import_module("keyhole.optional").KEYHOLE_VERSION
    if name in _HOME:
        globals()[name] = found = getattr(import_module(_HOME[name]), name)
        return found
    if not name.startswith("_"):
        try:
            return import_module(f"keyhole.{name}")
        except ModuleNotFoundError as error:
            if error.name != f"keyhole.{name}":
                raise
    raise AttributeError(f"module 'keyhole' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})
