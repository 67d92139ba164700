from twinkle_megatron import MegatronModel as MegatronModel
from twinkle_transformers import TransformersModel as TransformersModel

__all__: list[str]
