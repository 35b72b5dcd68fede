"""Reinforcement-learning mathematics: pure torch on plain tensors. No Megatron, no Ray, no global state."""
