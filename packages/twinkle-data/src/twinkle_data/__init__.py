"""Data formats, chat templates, datasets and mesh-aware data loading for LLM post-training."""
