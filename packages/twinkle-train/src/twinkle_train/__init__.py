"""Losses, advantages, rewards, metrics and the trainer contract for LLM post-training."""
