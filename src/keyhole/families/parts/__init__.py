"""Attention by parts: score form × length law × link × position bias × normaliser, each a small description.

A part other than the form is a frozen dataclass of plain numbers, with a `name` that files know it by.
"""

from keyhole.families.parts.attention import SOFTMAX, Attention, register
from keyhole.families.parts.forms import Bilinear, ScoreForm

__all__ = ["SOFTMAX", "Attention", "Bilinear", "ScoreForm", "register"]
