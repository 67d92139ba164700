"""What runs in the queues: the calls of the Tinker protocol on trainers and samplers. Everything here blocks."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from pydantic import ValidationError

from twinkle_data import ModelOutput
from twinkle_data import SamplingParams as Params
from twinkle_mesh import DeviceMesh

from .._errors import BadRequest, Invalid
from .._paths import CheckpointUri, parse_uri
from ..engine import Calls, Context, Reply, TrainerBackend
from ..http._json import parse_json
from ..store import Run, Sampler
from . import _wire as wire
from ._codec import PROTOBUF, ForwardBackward, Sampled, read_forward_backward, write_forward_backward, write_sample
from ._training import LossSpec, Rows, loss_spec, metrics_of, rows_of

if TYPE_CHECKING:
    from .._config import ModelConfig

BodyT = TypeVar("BodyT", bound=wire.Body)

# Weights that are saved for one sampling client, without a name, are of no use when it is gone.
_UNNAMED_TTL_S = 24 * 3600
_OPTIMIZER: dict[str, Any] = {"name": "adamw", "lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-12}


def register_calls(calls: Calls) -> None:
    """Says how the calls of the protocol run."""
    calls.register("tinker.create_model", decode=_json(wire.CreateModel), run=_create_model)
    calls.register("tinker.load_weights", decode=_json(wire.LoadWeights), run=_load_weights)
    calls.register("tinker.forward_backward", decode=read_forward_backward, run=_forward_backward)
    calls.register("tinker.optim_step", decode=_json(wire.OptimStep), run=_optim_step)
    calls.register("tinker.save_weights", decode=_json(wire.SaveWeights), run=_save_weights)
    calls.register("tinker.save_weights_for_sampler", decode=_json(wire.SaveWeightsForSampler), run=_save_weights_for_sampler)
    calls.register("tinker.unload_model", decode=_json(wire.UnloadModel), run=_unload_model)
    calls.register("tinker.asample", decode=_json(wire.Sample), run=_sample)


def tinker_uri(uri: CheckpointUri) -> str:
    """A checkpoint's URI as this protocol has it."""
    return f"tinker://{uri.run_id}/{uri.kind}/{uri.name}"


def _json(kind: type[BodyT]) -> Callable[[bytes], BodyT]:
    def decode(body: bytes) -> BodyT:
        try:
            return kind.model_validate(parse_json(body))
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            raise Invalid(f"{'.'.join(map(str, first['loc']))[:200]}: {first['msg'][:300]}") from None

    return decode


def _reply(**content: Any) -> Reply:
    return Reply(body=json.dumps({name: value for name, value in content.items() if value is not None}).encode())


# Training.


def _create_model(context: Context, body: wire.CreateModel) -> Reply:
    run = context.the_run()
    context.the_trainer().configure(run, "set_optimizer", _OPTIMIZER)
    return _reply(type="create_model", model_id=run.id)


def _load_weights(context: Context, body: wire.LoadWeights) -> Reply:
    run, trainer = context.the_run(), context.the_trainer()
    uri = parse_uri(body.path, "tinker")
    checkpoint, source = context.service.checkpoints.find(context.tenant, uri, may_be_public=True)
    is_new = "set_optimizer" not in run.setup
    if is_new:  # a state that is loaded takes the place of its own
        trainer.configure(run, "set_optimizer", _OPTIMIZER)
    context.service.checkpoints.load(trainer, run, checkpoint, source, with_state=body.optimizer)
    if not (is_new or body.optimizer):
        # Of weights alone: the optimizer begins anew with them.
        trainer.configure(run, "set_optimizer", _OPTIMIZER)
    return _reply(type="load_weights", path=body.path, model_id=run.id)


def _forward_backward(context: Context, request: ForwardBackward) -> Reply:
    run, trainer = context.the_run(), context.the_trainer()
    model = trainer.config
    spec: LossSpec | None = loss_spec(request.loss_fn, request.config)
    if request.forward_only and not all(spec.fits(datum) for datum in request.data):
        spec = None
    rows = rows_of(request.data, spec, max_rows=model.max_rows, max_length=model.max_length, min_rows=_data_ranks(model))
    arguments = {"inputs": list(rows.features), "micro_batch_size": model.micro_batch_size}
    if request.forward_only:
        output: ModelOutput = trainer.call(run, "forward_only", **arguments)
        metrics = {} if spec is None else _loss_of(rows, spec, output)
    else:
        assert spec is not None, "only forward does without"
        loss = {"loss": spec.name, **spec.options}
        if run.setup.get("set_loss") != loss:
            trainer.configure(run, "set_loss", loss)
        output = trainer.call(run, "forward_backward", **arguments)
        metrics = metrics_of(output)
    assert output.logprobs is not None, "the collected result has those of the last stage"
    return Reply(body=write_forward_backward(rows.join(output.logprobs), metrics), media_type=PROTOBUF)


def _loss_of(rows: Rows, spec: LossSpec, output: ModelOutput) -> dict[str, float]:
    """The loss of log-probabilities that were computed without one."""
    import torch

    from twinkle_data import InputProcessor
    from twinkle_train import Totals, loss_input_from_batch, resolve_loss

    batch = InputProcessor()(rows.features)
    logprobs_BT = np.zeros(batch.input_ids.shape, np.float32)
    for row, values in enumerate(output.logprobs or ()):
        logprobs_BT[row, : len(values) - 1] = values[1:]
    totals = Totals.of([resolve_loss(spec.name, **spec.options)(loss_input_from_batch(batch, torch.from_numpy(logprobs_BT)))])
    return metrics_of(ModelOutput(loss=totals.loss, loss_weight=totals.weight, metrics=totals.metric_values()))


def _data_ranks(model: ModelConfig) -> int:
    sizes: dict[str, Any] = {**(model.mesh or {})}
    return DeviceMesh.from_sizes(**sizes).data_world_size if sizes else 1


def _optim_step(context: Context, body: wire.OptimStep) -> Reply:
    run, trainer = context.the_run(), context.the_trainer()
    if body.optimizer_params is not None:
        raise BadRequest(f"this server steps with Adam: give AdamParams, not {str(body.optimizer_params.get('type'))[:50]!r}")
    params = body.adam_params or wire.AdamParams()
    if "set_optimizer" not in run.setup:  # a run that the native interface began
        trainer.configure(run, "set_optimizer", _OPTIMIZER)
    settings = {"lr": params.learning_rate, "betas": (params.beta1, params.beta2), "eps": params.eps, "weight_decay": params.weight_decay}
    trainer.call(run, "adjust_optimizer", **settings)
    norm = trainer.call(run, "clip_grad_and_step", max_grad_norm=params.grad_clip_norm if params.grad_clip_norm > 0 else float("inf"))
    measured = dict(trainer.call(run, "calculate_metric"))
    context.measured(measured, run.steps + 1)
    return _reply(type="optim_step", metrics={"grad_norm": float(norm)})


def _save_weights(context: Context, body: wire.SaveWeights) -> Reply:
    run = context.the_run()
    checkpoint = context.service.checkpoints.save(
        context.the_trainer(),
        run,
        "weights",
        body.path,
        metadata=body.user_metadata,
        ttl_s=_ttl(body.ttl_seconds),
        overwrite=body.overwrite,
    )
    return _reply(type="save_weights", path=tinker_uri(CheckpointUri(run.id, "weights", checkpoint.name)))


def _save_weights_for_sampler(context: Context, body: wire.SaveWeightsForSampler) -> Reply:
    run, ttl_s = context.the_run(), _ttl(body.ttl_seconds)
    if body.path is None and body.sampling_session_seq_id is None:
        raise BadRequest("path or sampling_session_seq_id is needed")
    name = body.path if body.path is not None else f"sampling-{body.sampling_session_seq_id}-{secrets.token_hex(4)}"
    if body.path is None and ttl_s is None:
        ttl_s = _UNNAMED_TTL_S
    checkpoint = context.service.checkpoints.save(context.the_trainer(), run, "sampler_weights", name, metadata=body.user_metadata, ttl_s=ttl_s)
    uri = CheckpointUri(run.id, "sampler_weights", checkpoint.name)
    if body.path is not None:
        return _reply(type="save_weights_for_sampler", path=tinker_uri(uri))
    sampler = Sampler(
        id=f"{run.session_id or run.id}:sample:{body.sampling_session_seq_id}",
        tenant=run.tenant,
        session_id=run.session_id,
        base_model=run.base_model,
        checkpoint=str(uri),
        created_at=time.time(),
    )
    context.service.store.add(sampler)
    return _reply(type="save_weights_for_sampler", sampling_session_id=sampler.id)


def _unload_model(context: Context, body: wire.UnloadModel) -> Reply:
    run = context.the_run()
    _end(context.the_trainer(), run, context)
    return _reply(type="unload_model", model_id=run.id)


def _end(trainer: TrainerBackend, run: Run, context: Context) -> None:
    trainer.drop(run.id)
    context.service.store.end_run(run.id)
    if run.parked is not None:
        context.service.folders.remove(run.parked)


def _ttl(seconds: int | None) -> float | None:
    if seconds is not None and not 0 < seconds < 10 * 366 * 24 * 3600:
        raise Invalid(f"ttl_seconds must be from 1 to ten years, got {seconds}")
    return seconds


# Sampling.


def _sample(context: Context, body: wire.Sample) -> Reply:
    service, backend = context.service, context.the_sampler()
    sampler = service.store.get(Sampler, body.sampling_session_id)
    assert sampler is not None, "the route has found it, and nothing deletes it"
    checkpoint = None
    if sampler.checkpoint is not None:
        checkpoint, _ = service.checkpoints.find(context.tenant, parse_uri(sampler.checkpoint), may_be_public=True)
    tokens, params = prompt_and_params(body, backend.model.max_length)
    (response,) = backend.sample([tokens], params, None, checkpoint)
    response.raise_for_error()
    sequences = [
        Sampled(tokens=each.tokens, logprobs=each.logprobs, stopped=each.stop_reason == "stop", top=each.top_logprobs) for each in response.sequences
    ]
    return Reply(body=write_sample(sequences, response.prompt_logprobs if body.prompt_logprobs else None), media_type=PROTOBUF)


def prompt_and_params(body: wire.Sample, max_length: int) -> tuple[list[int], Params]:
    """The tokens of a prompt, and how to sample.

    Raises BadRequest for what this server does not do, Invalid for options out of range.
    """
    unknown = [chunk.type for chunk in body.prompt.chunks if chunk.type != "encoded_text"]
    if unknown:
        raise BadRequest(f"the prompt has a chunk of type {unknown[0][:50]!r}; this server samples from encoded_text")
    for name in ("topk_prompt_logprobs", "prompt_alt_tokens_k", "target_prompt_logprobs"):
        if getattr(body, name):
            raise BadRequest(f"this server does not compute {name}")
    tokens = [token for chunk in body.prompt.chunks for token in chunk.tokens]
    if not 1 <= len(tokens) < max_length:
        raise Invalid(f"the prompt has {len(tokens)} tokens; 1 to {max_length - 1} can be sampled from")
    given = body.sampling_params
    options: dict[str, Any] = {}
    match given.stop:
        case None:
            pass
        case str():
            options["stop"] = (given.stop,)
        case []:
            # Never: the end token is not allowed before the last.
            options["min_tokens"] = options["max_tokens"] = given.max_tokens or max_length - len(tokens)
        case [int(), *_]:
            options["stop_token_ids"] = tuple(given.stop)
        case texts:
            options["stop"] = tuple(texts)
    return tokens, Params(
        **{
            "max_tokens": given.max_tokens,
            "temperature": given.temperature,
            "top_k": given.top_k,
            "top_p": given.top_p,
            "seed": given.seed,
            "num_samples": body.num_samples,
            "prompt_logprobs": bool(body.prompt_logprobs),
            "top_logprobs": body.topk_sample_logprobs,
            **options,
        }
    )
