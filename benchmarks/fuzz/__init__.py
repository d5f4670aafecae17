"""Random boxes for `keyhole.recover`, judged by code of its own: forward maps, input classes, alignment in NumPy.

Of the package only `recover`, `FunctionOracle`, `Noise` and the arrays of a result are used.
"""
