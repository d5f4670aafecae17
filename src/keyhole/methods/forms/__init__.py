"""Bilinear forms uᵀWg from answers to sequences of two tokens: what several learners share."""
