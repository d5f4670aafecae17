"""Low-rank matrix sensing from rank-one measurements ``b_k = u_k^T W g_k``.

Two solvers, one result. Both search on part of the measurements and are believed only if the answer predicts
measurements the search never saw *and* the measurements determine it (injective on the tangent space of the
rank-r matrices). Only then is it refitted on everything and returned with ``converged=True``.

    nuclear_norm : convex, ADMM, then a polish on the rank it identified
    factored     : W = L R^T, spectral start, variable projection; reweighted least squares where that fails

References: Recht, Fazel and Parrilo (2010) for nuclear-norm recovery; Golub and Pereyra (1973) for variable
projection; Kuemmerle and Mayrink Verdun (2021) for harmonic-mean reweighting, whose inverse weight
(M1 X + X M2) / 2 makes the Gram matrix of rank-one measurements a sum of two entrywise products.
"""

from __future__ import annotations

from keyhole.methods.sensing.solvers.problem import SensingSolution, parameter_count, recommended_measurements
from keyhole.methods.sensing.solvers.search import factored, nuclear_norm
from keyhole.methods.sensing.solvers.validation import standard_error

__all__ = [
    "SensingSolution",
    "factored",
    "nuclear_norm",
    "parameter_count",
    "recommended_measurements",
    "standard_error",
]
