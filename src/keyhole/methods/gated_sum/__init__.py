"""Sums of rows behind sigmoid gates, Σ_h σ(c + u·k_h)·(u·v_h), fitted to answers: the heads behind one number."""

from keyhole.methods.gated_sum.joint import JointHeads, JointLinear, JointQueries, fit_joint
from keyhole.methods.gated_sum.known_values import fit_known_values
from keyhole.methods.gated_sum.model import GatedQueries, GatedSum
from keyhole.methods.gated_sum.radii import AnswerErrors, JointRadii, joint_radii
from keyhole.methods.gated_sum.search import GatedFit, fit_unknown

__all__ = [
    "AnswerErrors",
    "GatedFit",
    "GatedQueries",
    "GatedSum",
    "JointHeads",
    "JointLinear",
    "JointQueries",
    "JointRadii",
    "fit_joint",
    "fit_known_values",
    "fit_unknown",
    "joint_radii",
]
