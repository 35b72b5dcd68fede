"""Holds `mrl_receiver`; this folder is what goes on an engine's PYTHONPATH."""
