"""Rewards: graders in processes that can be killed, and clients of servers that score.

Grader processes import this package: what it imports at the top must stay light (no torch, no pydantic).
"""
