from twinkle_megatron import MegatronModel as MegatronModel

__all__: list[str]
