"""Prompts: reading them, turning them into tokens, and drawing them in a resumable order."""
