from twinkle_vllm import vLLMSampler as vLLMSampler

__all__: list[str]
