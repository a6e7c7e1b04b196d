"""Rewards: built-in functions, and a user's own in processes with hard deadlines."""
