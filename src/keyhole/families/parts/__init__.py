"""Attention by parts: score form × length law × link × position bias × normaliser, and one head of any parts.

A part other than the form is a frozen dataclass of constants, which are arrays, with a `name` that files know it by.
"""

from keyhole.families.parts.attention import KINDS, PARTS, SIGMOID_BESIDE, SOFTMAX, Attention, part_names, register
from keyhole.families.parts.bilinear import Bilinear, ScoreForm
from keyhole.families.parts.head import Head
from keyhole.families.parts.length_laws import LengthTable, LogLength, NoLengthLaw, RootLength
from keyhole.families.parts.links import Exp, Linear, Relu, Sigmoid, Softcap, Squared, Tabulated
from keyhole.families.parts.normalisers import Count, Entmax, NoNormaliser, PlusOne, Sink, Sparsemax, Sum, TopK
from keyhole.families.parts.position_biases import Alibi, Causal, DistanceTable, NoPositionBias, Window
from keyhole.families.parts.protocols import Link, Normaliser, Part, PositionBias

__all__ = [
    "KINDS",
    "PARTS",
    "SIGMOID_BESIDE",
    "SOFTMAX",
    "Alibi",
    "Attention",
    "Bilinear",
    "Causal",
    "Count",
    "DistanceTable",
    "Entmax",
    "Exp",
    "Head",
    "LengthTable",
    "Linear",
    "Link",
    "LogLength",
    "NoLengthLaw",
    "NoNormaliser",
    "NoPositionBias",
    "Normaliser",
    "Part",
    "PlusOne",
    "PositionBias",
    "Relu",
    "RootLength",
    "ScoreForm",
    "Sigmoid",
    "Sink",
    "Softcap",
    "Sparsemax",
    "Squared",
    "Sum",
    "Tabulated",
    "TopK",
    "Window",
    "part_names",
    "register",
]
