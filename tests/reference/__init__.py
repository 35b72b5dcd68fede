"""What mrl/algorithm computes, once more: plain Python numbers, one loop a formula, written from the papers alone.

Nothing here uses torch or mrl. Slow, and meant to be read beside docs/algorithms.md.
"""
