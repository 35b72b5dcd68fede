"""Verifiers and reward functions, run in processes that can be killed.

Verifier processes import this package: what it imports at the top must stay light (no torch, no pydantic).
"""
