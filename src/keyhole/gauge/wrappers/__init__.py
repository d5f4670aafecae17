"""Gauges of families that are heads in another dress."""
