"""Train with megatron-core behind ten calls, on GPUs and, proven exact, on a CPU."""
