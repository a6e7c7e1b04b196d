"""Reinforcement learning: advantages, losses, the update, the whole step, the trainer."""
