"""A vLLM sampler on a device mesh whose weights are always current."""
