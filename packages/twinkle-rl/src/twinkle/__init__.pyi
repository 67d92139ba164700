from twinkle._errors import ConfigError as ConfigError
from twinkle._errors import MissingExtraError as MissingExtraError
from twinkle._errors import RunFolderError as RunFolderError
from twinkle._errors import TwinkleError as TwinkleError
from twinkle._errors import WarmupError as WarmupError
from twinkle_data import DataLoader as DataLoader
from twinkle_data import Dataset as Dataset
from twinkle_data import InputFeature as InputFeature
from twinkle_data import Message as Message
from twinkle_data import SamplingParams as SamplingParams
from twinkle_data import Template as Template
from twinkle_data import Trajectory as Trajectory
from twinkle_megatron import MegatronModel as MegatronModel
from twinkle_mesh import DeviceGroup as DeviceGroup
from twinkle_mesh import DeviceMesh as DeviceMesh
from twinkle_remote import LazyResult as LazyResult
from twinkle_remote import Runtime as Runtime
from twinkle_remote import current_runtime as current_runtime
from twinkle_remote import gather as gather
from twinkle_remote import initialize as initialize
from twinkle_remote import remote_class as remote_class
from twinkle_remote import remote_function as remote_function
from twinkle_remote import shutdown as shutdown
from twinkle_sync import CheckpointEngineManager as CheckpointEngineManager
from twinkle_train import group_advantages as group_advantages
from twinkle_vllm import vLLMSampler as vLLMSampler

__all__: list[str]
