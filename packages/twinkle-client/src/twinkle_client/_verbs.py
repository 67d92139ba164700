"""Bodies and results of the verbs of models, samplers and processors: the arguments by name, strictly, plus `adapter_name`.

Every verb answers `{"result": ...}`, `Result`, unless its class says otherwise; the type of the result is given here. Methods whose options go
to a class that is named (`set_loss('grpo', epsilon=0.2)`) take them as further fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Generic, Literal, TypeVar

from pydantic import ConfigDict, Discriminator, Field, StrictInt, Tag

from ._formats import InputFeature, PackedFeature, SampleResponse, SamplingParams, Tokens, Trajectory
from ._resources import Answer, CheckpointType, Request

ResultT = TypeVar("ResultT")


class Result(Answer, Generic[ResultT]):
    """The answer to a verb."""

    result: ResultT


class Verb(Request):
    """Base of the bodies of verbs. `adapter_name` is compared exactly; '' is the base model."""

    adapter_name: str = ""


class VerbWithOptions(Verb):
    """Base of the bodies of verbs whose further fields go to what is named."""

    model_config = ConfigDict(extra="allow")

    @property
    def options(self) -> dict[str, Any]:
        """The further fields."""
        return dict(self.model_extra or {})


class ProcessorRef(Request):
    """A reference to an object that the server holds (see `CreateProcessor`), wherever an argument may be one."""

    processor_id: str


def _kind_of_row(value: Any) -> str:
    """Which record it is, by the one field that only it has: so an error tells of that record alone."""
    if isinstance(value, Mapping):
        return "trajectory" if "messages" in value else "packed" if "features" in value else "feature"
    return "trajectory" if isinstance(value, Trajectory) else "packed" if isinstance(value, PackedFeature) else "feature"


def _kind_of_prompt(value: Any) -> str:
    return "text" if isinstance(value, str) else "tokens" if isinstance(value, list) else _kind_of_row(value)


Row = Annotated[
    Annotated[InputFeature, Tag("feature")] | Annotated[PackedFeature, Tag("packed")] | Annotated[Trajectory, Tag("trajectory")],
    Discriminator(_kind_of_row),
]
Inputs = Annotated[list[Row], Field(min_length=1)]


class CreateModel(Verb):
    """POST create, of a model or a sampler: makes sure that it is there. Result: None."""


class AddAdapter(Verb):
    """POST add_adapter_to_model. config: the fields of LoraConfig, or of peft's. save_dir: a label, no path. Result: `AdapterAdded`."""

    config: dict[str, Any] = Field(default_factory=dict)
    save_dir: str | None = None
    user_metadata: dict[str, Any] | None = None


class AdapterAdded(Answer):
    """The result of add_adapter_to_model."""

    adapter_name: str
    training_run_id: str


class Forward(Verb):
    """POST forward. Result: `ModelOutput`."""

    inputs: Inputs


class ForwardBackward(Verb):
    """POST forward_backward. micro_batch_tokens: instead of a number of rows, the most tokens of a micro-batch. Result: `ModelOutput`."""

    inputs: Inputs
    micro_batch_size: Annotated[StrictInt, Field(ge=1)] | None = None
    micro_batch_tokens: Annotated[StrictInt, Field(ge=1)] | None = None


class ForwardOnly(ForwardBackward):
    """POST forward_only. top_k: so many of the likeliest tokens after each token, too. Result: `ModelOutput`."""

    top_k: Annotated[StrictInt, Field(ge=0, le=1024)] = 0


class CalculateLoss(Verb):
    """POST calculate_loss. Result: the loss, a number."""


class Backward(Verb):
    """POST backward. Result: None."""


class ClipGradNorm(Verb):
    """POST clip_grad_norm. Result: the norm before clipping."""

    max_grad_norm: Annotated[float, Field(ge=0)] = 1.0


class Step(Verb):
    """POST step. Result: None."""


class ZeroGrad(Verb):
    """POST zero_grad. Result: None."""


class LrStep(Verb):
    """POST lr_step. Result: the learning rate."""


class ClipGradAndStep(ClipGradNorm):
    """POST clip_grad_and_step. Result: the norm before clipping."""


class SetLoss(VerbWithOptions):
    """POST set_loss. loss: a name of the server's list. Further fields are the loss's options. Result: None."""

    loss: str


class SetOptimizer(Verb):
    """POST set_optimizer. options: numbers for the other classes of torch.optim. Result: None."""

    name: str = "adamw"
    lr: Annotated[float, Field(ge=0)] = 1e-5
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    momentum: float = 0.0
    options: dict[str, bool | int | float] | None = None


class AdjustOptimizer(Verb):
    """POST adjust_optimizer: other settings for the optimizer that is there; None keeps one. Result: None."""

    lr: Annotated[float, Field(ge=0)] | None = None
    betas: tuple[float, float] | None = None
    eps: float | None = None
    weight_decay: float | None = None


class SetLrScheduler(Verb):
    """POST set_lr_scheduler. Result: None."""

    name: str = "constant"
    warmup_steps: int = 0
    total_steps: int | None = None
    min_lr_ratio: float = 0.0
    decay_steps: int | None = None


class SetTemplate(VerbWithOptions):
    """POST set_template, of a model or a sampler. template: the base model's name (its own tokenizer), or a template that the server holds.
    Further fields are the template's options (max_length, truncation, system). Result: None."""

    template: str | ProcessorRef


class SetProcessor(VerbWithOptions):
    """POST set_processor. processor: a name of the server's list; further fields are its options. Result: None."""

    processor: str | ProcessorRef = "InputProcessor"


class AddMetric(VerbWithOptions):
    """POST add_metric. metric: a name of the server's list; further fields are its options. Result: None."""

    metric: str


class ApplyPatch(VerbWithOptions):
    """POST apply_patch, of a model or a sampler. patch: a name of the server's list; further fields are its options. Result: None."""

    patch: str


class CalculateMetric(Verb):
    """POST calculate_metric. Result: a mapping of names to numbers."""


class GetStateDict(Verb):
    """POST get_state_dict. Result: a mapping of names to `TensorData`."""


class TensorData(Answer):
    """A tensor: its dtype as safetensors names it ('F32', 'BF16', ...), its shape, and its bytes, little-endian and row by row, in base64."""

    dtype: str
    shape: list[int]
    data: str


class GetTrainConfigs(Verb):
    """POST get_train_configs. Result: a mapping."""


class Save(Verb):
    """POST save; answers `Saved`.

    name: the checkpoint's; None: the server picks one. checkpoint_type: 'weights' can be resumed from, 'sampler_weights' sampled from.
    save_optimizer: False leaves the optimizer's state out of 'weights', which can then only be loaded. user_state: plain JSON that
    resume_from_checkpoint gives back.
    """

    name: str | None = None
    checkpoint_type: CheckpointType = "weights"
    save_optimizer: bool = True
    user_state: dict[str, Any] | None = None
    user_metadata: dict[str, Any] | None = None


class Saved(Answer):
    """The answer to save. checkpoint_dir: a file system path of the server."""

    twinkle_path: str
    checkpoint_dir: str | None = None


class Load(Verb):
    """POST load. path: a twinkle:// URI, or a checkpoint's name in this adapter's run. Result: None."""

    path: str


class ResumeFromCheckpoint(Load):
    """POST resume_from_checkpoint. Result: the `user_state` of save."""


class UploadToHub(Verb):
    """POST upload_to_hub; answers `UploadStarted`. path: as in `Load`. token: of the hub; it is not kept."""

    path: str
    repo_id: str
    private: bool = True
    token: Annotated[str | None, Field(repr=False)] = None


class UploadStarted(Answer):
    """The answer to upload_to_hub; GET upload_status/{request_id} tells how it goes."""

    request_id: str


class UploadStatus(Answer):
    """How an upload goes."""

    request_id: str
    status: str
    detail: str | None = None


Prompt = Annotated[
    Annotated[InputFeature, Tag("feature")]
    | Annotated[Trajectory, Tag("trajectory")]
    | Annotated[str, Tag("text")]
    | Annotated[Tokens, Tag("tokens")],
    Discriminator(_kind_of_prompt),
]


class Sample(Verb):
    """POST sample, answers `Samples`; POST sample_stream, answers lines of JSON, each a `SampleChunk`.

    inputs: prompts; each a feature, a conversation, a text or token ids. sampling_params: for all, or one for each. adapter_path: a twinkle:// URI of
    weights to sample with, instead of the name of an adapter that was added.
    """

    inputs: Annotated[list[Prompt], Field(min_length=1)]
    sampling_params: SamplingParams | list[SamplingParams] = Field(default_factory=SamplingParams)
    num_samples: Annotated[StrictInt, Field(ge=1)] | None = None
    adapter_path: str | None = None


class Samples(Answer):
    """The answer to sample: one for each prompt, in order."""

    samples: list[SampleResponse]


class SampleChunk(Answer):
    """A line of sample_stream: what prompt `index` has got since the line before (`tokens`, their `text`), and at its end its whole `response`."""

    index: int
    sequence: int = 0
    tokens: list[int] = Field(default_factory=list[int])
    logprobs: list[float] = Field(default_factory=list[float])
    text: str = ""
    response: SampleResponse | None = None
    error: str | None = None


class AddAdapterToSampler(Verb):
    """POST add_adapter_to_sampler: `adapter_name` names the weights of `path`, a twinkle:// URI, from now on. Result: None."""

    path: str


ProcessorType = Literal["dataset", "dataloader", "template", "processor", "reward", "advantage"]


class CreateProcessor(VerbWithOptions):
    """POST create, of a processor: an object that the server holds (a dataset, a loader, a template). Answers `ProcessorCreated`.

    class_type: a name of the server's list. Further fields are the constructor's arguments; one may be a `ProcessorRef`.
    """

    processor_type: ProcessorType
    class_type: str


class ProcessorCreated(Answer):
    """The answer to create."""

    processor_id: str


class CallProcessor(VerbWithOptions):
    """POST call: a method of an object that the server holds. Further fields are its arguments. Result: what it returns; 410 at an iterator's end.

    function: a name of the server's list for the class; '__len__', '__iter__' (begin again) and '__next__' (the next batch) of loaders among them.
    """

    processor_id: str
    function: str
