"""Held-out results: estimators on plain arrays, reports of finished groups, and `mrl eval`."""
