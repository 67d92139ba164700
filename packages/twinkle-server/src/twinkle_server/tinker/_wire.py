"""The JSON bodies of the Tinker protocol. What the SDK may add is ignored; what it needs is required."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictInt

Id = Annotated[str, Field(min_length=1, max_length=200)]
Uri = Annotated[str, Field(max_length=400)]
Sequence = Annotated[StrictInt, Field(ge=0, lt=1 << 31)]
CheckpointType = Literal["training", "sampler"]


class Body(BaseModel):
    """Base of what the SDK sends."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=(), allow_inf_nan=False)


class Answer(BaseModel):
    """Base of what the server sends."""

    model_config = ConfigDict(protected_namespaces=())


# Sessions.


class ClientConfigRequest(Body):
    """POST client/config and client/dynamic_config: what the client is."""

    sdk_version: str | None = None


class ClientConfig(Answer):
    """POST client/config: what the client shall do where this server differs from the SDK's defaults."""

    sample_max_concurrent_requests: int
    custom_loss_server_side: bool = False
    sample_use_retrieve_futures: bool = False
    sample_join_sampling_session: bool = False
    proto_compress_fwdbwd: bool = False
    pjwt_auth_enabled: bool = False


class Nothing(Answer):
    """An answer without content."""


class CreateSession(Body):
    """POST create_session."""

    tags: list[str] = []
    user_metadata: dict[str, Any] | None = None
    sdk_version: str | None = None
    project_id: str | None = None
    display_name: str | None = None


class SessionCreated(Answer):
    """What create_session returns."""

    type: Literal["create_session"] = "create_session"
    session_id: str
    info_message: str | None = None
    warning_message: str | None = None
    error_message: str | None = None


class SessionHeartbeat(Body):
    """POST session_heartbeat."""

    session_id: Id


class HeartbeatAnswer(Answer):
    """What session_heartbeat returns."""

    type: Literal["session_heartbeat"] = "session_heartbeat"


class FinishSession(Body):
    """POST sessions/ID/finish."""

    reason: dict[str, Any] | None = None
    detail: str | None = None


class Telemetry(Body):
    """POST telemetry: taken and thrown away."""

    events: list[Any] = []


class TelemetryAnswer(Answer):
    """What telemetry returns."""

    status: Literal["accepted"] = "accepted"


class SessionInfo(Answer):
    """GET sessions/ID."""

    training_run_ids: list[str]
    sampler_ids: list[str]
    user_metadata: dict[str, str] | None = None
    display_name: str | None = None


class SessionList(Answer):
    """GET sessions."""

    sessions: list[str]


# Training.


class LoraConfig(Body):
    """Of create_model. seed: not used, adapters begin from the trainer's own generator. train_unembed: the head is never adapted."""

    rank: Annotated[StrictInt, Field(ge=1)]
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class CreateModel(Body):
    """POST create_model."""

    session_id: Id
    model_seq_id: Sequence
    base_model: Id
    user_metadata: dict[str, Any] | None = None
    lora_config: LoraConfig | None = None
    optimizer_config: dict[str, Any] | None = None


class AdamParams(Body):
    """Of optim_step."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


class OnModel(Body):
    """Base of numbered requests on a model. Values are looked at when the call runs: a request that is refused would leave its number missing."""

    model_id: Id
    seq_id: Annotated[StrictInt, Field(ge=1, lt=1 << 31)]


class OptimStep(OnModel):
    """POST optim_step."""

    adam_params: AdamParams | None = None
    optimizer_params: dict[str, Any] | None = None


class SaveWeights(OnModel):
    """POST save_weights."""

    path: str | None = None
    ttl_seconds: int | None = None
    overwrite: bool = False
    user_metadata: dict[str, str] | None = None


class SaveWeightsForSampler(OnModel):
    """POST save_weights_for_sampler. kind: 'inflight' weights are a snapshot here, too."""

    path: str | None = None
    sampling_session_seq_id: Sequence | None = None
    kind: str = "snapshot"
    ttl_seconds: int | None = None
    user_metadata: dict[str, str] | None = None


class LoadWeights(Body):
    """POST load_weights, into a new model (session_id, model_seq_id) or one that is there (model_id, seq_id)."""

    path: Uri
    optimizer: bool
    model_id: Id | None = None
    seq_id: Annotated[StrictInt, Field(ge=1, lt=1 << 31)] | None = None
    session_id: Id | None = None
    model_seq_id: Sequence | None = None
    base_model: Id | None = None
    user_metadata: dict[str, Any] | None = None


class UnloadModel(Body):
    """POST unload_model."""

    model_id: Id


class GetInfo(Body):
    """POST get_info."""

    model_id: Id


class ModelData(Answer):
    """Of get_info."""

    arch: str | None = None
    model_name: str
    tokenizer_id: str | None = None


class ModelInfo(Answer):
    """What get_info returns."""

    type: Literal["get_info"] = "get_info"
    model_id: str
    model_data: ModelData
    is_lora: bool = True
    lora_rank: int
    model_name: str


# Futures.


class Promise(Answer):
    """What a request that takes time returns at once. sample_sequence_ids: of asample only."""

    request_id: str
    model_id: str | None = None
    sample_sequence_ids: list[str] | None = None


class RetrieveFuture(Body):
    """POST retrieve_future."""

    request_id: Id
    allow_metadata_only: bool = False


class TryAgain(Answer):
    """What retrieve_future returns (408) while there is no result."""

    type: Literal["try_again"] = "try_again"
    request_id: str
    queue_state: Literal["active", "paused_capacity", "paused_rate_limit"]


class RequestFailed(Answer):
    """What retrieve_future returns for a call that failed."""

    error: str
    category: Literal["unknown", "server", "user"]


# Sampling.


class CreateSamplingSession(Body):
    """POST create_sampling_session."""

    session_id: Id
    sampling_session_seq_id: Sequence
    base_model: Id | None = None
    model_path: Uri | None = None


class SamplingSessionCreated(Answer):
    """What create_sampling_session returns."""

    type: Literal["create_sampling_session"] = "create_sampling_session"
    sampling_session_id: str


class SamplerInfo(Answer):
    """GET samplers/ID."""

    sampler_id: str
    base_model: str
    model_path: str | None = None


class Chunk(Body):
    """Of a prompt."""

    type: str = "encoded_text"
    tokens: list[Annotated[StrictInt, Field(ge=0, lt=1 << 31)]] = []


class Prompt(Body):
    """Of asample."""

    chunks: list[Chunk]


class SamplingParams(Body):
    """Of asample. stop: None ends at the model's end token, an empty list never."""

    max_tokens: Annotated[StrictInt, Field(ge=1)] | None = None
    seed: int | None = None
    stop: str | list[str] | list[StrictInt] | None = None
    temperature: Annotated[float, Field(ge=0)] = 1.0
    top_k: int = -1
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0


class Sample(Body):
    """POST asample."""

    sampling_session_id: Id
    seq_id: Sequence
    num_samples: Annotated[StrictInt, Field(ge=1, le=4096)] = 1
    prompt: Prompt
    sampling_params: SamplingParams = SamplingParams()
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: Annotated[StrictInt, Field(ge=0, le=1000)] = 0
    target_prompt_logprobs: Any = None
    prompt_alt_tokens_k: int = 0


# Resources.


class SupportedModel(Answer):
    """Of get_server_capabilities."""

    model_name: str
    max_context_length: int
    trainable: bool
    sampleable: bool


class Capabilities(Answer):
    """GET get_server_capabilities."""

    supported_models: list[SupportedModel]


class Health(Answer):
    """GET healthz."""

    status: Literal["ok"] = "ok"


class Checkpoint(Answer):
    """A checkpoint. checkpoint_id: `weights/NAME` or `sampler_weights/NAME`."""

    checkpoint_id: str
    checkpoint_type: CheckpointType
    time: datetime
    tinker_path: str
    size_bytes: int
    public: bool
    user_metadata: dict[str, str] | None = None
    expires_at: datetime | None = None


class Cursor(Answer):
    """Where a page lies in the whole."""

    offset: int
    limit: int
    total_count: int


class Checkpoints(Answer):
    """GET checkpoints and training_runs/ID/checkpoints."""

    checkpoints: list[Checkpoint]
    cursor: Cursor | None = None


class TrainingRun(Answer):
    """A training run."""

    training_run_id: str
    base_model: str
    model_owner: str
    is_lora: bool = True
    corrupted: bool
    lora_rank: int
    last_request_time: datetime
    last_checkpoint: Checkpoint | None = None
    last_sampler_checkpoint: Checkpoint | None = None
    user_metadata: dict[str, str] | None = None


class TrainingRuns(Answer):
    """GET training_runs."""

    training_runs: list[TrainingRun]
    cursor: Cursor


class SetTtl(Body):
    """PUT training_runs/ID/checkpoints/CID/ttl: None keeps the checkpoint."""

    ttl_seconds: Annotated[StrictInt, Field(ge=1, le=10 * 366 * 24 * 3600)] | None = None


class WeightsInfoRequest(Body):
    """POST weights_info."""

    tinker_path: Uri


class WeightsInfo(Answer):
    """What weights_info returns."""

    base_model: str
    is_lora: bool = True
    lora_rank: int
    train_unembed: bool = False
    train_mlp: bool
    train_attn: bool
