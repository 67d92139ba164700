"""Twinkle: compose Megatron trainers and vLLM samplers for RL, SFT and distillation from one driver script."""
