"""Sums of rows behind sigmoid gates, Σ_h σ(c + u·k_h)·(u·v_h), fitted to answers: the heads behind one number."""
