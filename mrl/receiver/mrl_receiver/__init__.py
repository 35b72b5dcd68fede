"""What runs inside an engine's worker: it receives a sync and puts it into the engine's own parameters.

The folder above goes on the engine's PYTHONPATH, so nothing here may need more than torch and the engine itself, and
imports are relative: the trainer's side uses the same modules as `mrl.receiver.mrl_receiver`.
"""
