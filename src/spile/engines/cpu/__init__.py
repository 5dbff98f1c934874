"""The cpu engine: models on the native core, exact to the bit whatever the budget, threads, chunk or
instruction set.
"""
