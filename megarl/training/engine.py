"""The Megatron engine: one model under one layout, trained or frozen, that processes batches of packed samples.

    batch -> data-parallel ranks exchange rows, so that all have about as many tokens
          -> plan: micro-batches by token budget, equally many on all data-parallel ranks
          -> Megatron's schedule (none, 1F1B, interleaved) -> hidden states on the last stage
          -> rows that predict response tokens -> head: log-prob and entropy, or value -> loss_fn -> backward
          -> gradients summed over dp x cp -> finite? -> clip -> AdamW -> new parameters

The loss is a sum with weights that contain the global normalisers, so the engine never divides, and the result does not
depend on micro-batches or layout. All context-parallel ranks see the token outputs of the whole micro-batch and compute
the same loss; each passes back the gradient of its own tokens only.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from megarl.config.model import LoraConfig, ParallelConfig
from megarl.config.training import EngineConfig, MtpConfig, OptimConfig
from megarl.data.batch import Batch, Jagged
from megarl.models.build import build_policy
from megarl.models.config import transformer_config
from megarl.models.hf import facts_of
from megarl.models.layer_forms import fp8_unit
from megarl.models.layers.experts.router import corrected_routers, count_tokens, update_corrections
from megarl.models.lora import freeze_base, init_adapters
from megarl.models.policy import PolicyModel
from megarl.planning.vision import patch_tokens
from megarl.system.comm import WorkerGroup
from megarl.system.device import device
from megarl.system.errors import ConfigError
from megarl.system.metrics import Metrics
from megarl.system.offload_schedule import GRADIENTS, OPTIMIZER, PARAMETERS, PARTS
from megarl.system.tracing import beat, phase
from megarl.training import microbatch, offload, optimizer
from megarl.training.draft_loss import DraftLogProbs, DraftLoss
from megarl.training.guard import check_finite
from megarl.training.heads import Head, LogProbs, SampledTokens, Values
from megarl.training.host_memory import HostArena
from megarl.training.microbatch import MicroBatch
from megarl.training.optimizer_stream import StreamedOptimizer
from megarl.training.parallel import Layout
from megarl.training.row_exchange import RowExchange
from megarl.training.sequence_layout import TEXT, SequenceLayout, TextLayout
from megarl.training.topk import SoftTargets, TopTokens
from megarl.training.vocabulary import HiddenStates, TeacherHead, Terms, WholeVocabulary

from megatron.core.distributed import finalize_model_grads  # isort: skip  (megarl imports install the compat hook)
from megatron.core.pipeline_parallel import get_forward_backward_func  # isort: skip
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed  # isort: skip

if TYPE_CHECKING:
    from transformers import PretrainedConfig

#: fn(*outputs of the head [N], samples of the micro-batch) -> (scalar, Metrics)
LossFn = Callable[..., tuple[Tensor, Metrics]]


class TeacherTargets(NamedTuple):
    """A teacher's targets for distillation: the batch field with its most likely tokens.

    With `terms`, the parts of a divergence over the whole vocabulary, the field has its hidden states.
    """

    field: str
    terms: Terms | None = None


#: Roles that have the settings of the actor's engine.
_OF_ACTOR = ("actor", "rollout", "reference", "teacher", "reward_model")
#: fn(metrics of all micro-batches and ranks) -> the divisor of the gradient
Divisor = Callable[[Metrics], float]
Weights = Callable[[list[PolicyModel]], None]


class MegatronEngine:
    """Trains and evaluates one model that is split by a parallel layout. Methods are collective over all its ranks.

    Args:
        hf_config: Hugging Face configuration of the model.
        parallel, engine: the recipe's settings of parallelism and of memory.
        optim: optimizer settings; None for a frozen engine, without gradient buffers and optimizer.
        dtype: dtype of parameters and activations; bf16 has float32 master weights and gradients.
        total_steps: optimizer steps of the whole run, the default length of the learning-rate decay.
        weights: fills the newly built chunks, e.g. `lambda chunks: load_weights(chunks, folder)`.
        name: name of the role, which is the first part of metric names.
        seed: seed of dropout and other random numbers of the model.
        value_head: whether to build a critic, which has one value per token instead of logits.
        sequences: turns samples into input sequences.
        lora: settings of low-rank adapters, which are trained instead of the weights and initialised from `seed`;
            None: no adapters.
        freeze: parts of the model (`ModelPart`) that are not trained.
        mtp: settings by which the model's draft head is built and trained; None: the model has none.

    Attributes:
        teacher_weight: the output embedding [v, its width] of a teacher or the reference for the tokens in
            `vocab_range`, on the last stage, for divergences over the vocabulary.
        snapshots: host memory for this rank's part of a checkpoint; one checkpoint at a time is written.
    """

    def __init__(
        self,
        hf_config: PretrainedConfig,
        parallel: ParallelConfig,
        engine: EngineConfig,
        optim: OptimConfig | None,
        *,
        dtype: torch.dtype,
        layout: Layout,
        total_steps: int,
        weights: Weights,
        name: str = "actor",
        seed: int = 0,
        value_head: bool = False,
        sequences: SequenceLayout = TEXT,
        lora: LoraConfig | None = None,
        freeze: Collection[str] = (),
        mtp: MtpConfig | None = None,
    ) -> None:
        self.sequences, self.hf_config, self.config, self.optim = sequences, hf_config, engine, optim
        self.dtype, self.layout, self.total_steps, self.name = dtype, layout, total_steps, name
        self.device, self.lora, self._mtp, self.step = device(), lora, mtp, 0
        if mtp is not None:
            assert isinstance(sequences, TextLayout), "only the draft heads of text models are trained"
            self.sequences = replace(sequences, drafts=True)
        self.teacher_weight: Tensor | None = None
        self.teacher_cap: float | None = None
        learns = optim is not None and "tower" not in freeze and (lora is None or lora.in_tower)
        self._patch_tokens = patch_tokens(facts_of(hf_config), parallel, engine, learns=learns)
        model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
        self._where = {"critic": "critic.engine", **dict.fromkeys(_OF_ACTOR, "actor.engine")}.get(
            name, f"models.{name}.engine"
        )
        configured = functools.partial(transformer_config, hf_config, parallel, dtype=dtype, engine=engine, lora=lora)
        self.model_config = configured(freeze=freeze, where=self._where, world=layout.world)
        self.model_config.draft = mtp is not None
        self.chunks = build_policy(hf_config, self.model_config, value_head=value_head)
        if lora is not None:  # attach adapters before the weights are read: a critic begins with the actor's adapters
            init_adapters(self.chunks, lora, seed)
        weights(self.chunks)
        if lora is not None:
            freeze_base(self.chunks)
        for chunk in self.chunks:
            chunk.freeze(freeze)
        self._away: dict[str, offload.OffloadedPart | StreamedOptimizer] = {}
        self._arenas = {part: HostArena(f"{self._where}.offload=false") for part in PARTS}
        self.snapshots = HostArena()
        self._stream: StreamedOptimizer | None = None
        if optim is None:
            self.wrapped: list[Any] = list(self.chunks)
            for chunk in self.chunks:
                chunk.requires_grad_(False).eval()
            self.optimizer: Any = None
            return
        self._wrap(engine, optim)

    def _wrap(self, engine: EngineConfig, optim: OptimConfig) -> None:
        """Wrap the chunks for data parallelism and build their optimizer."""
        self.wrapped = optimizer.wrap_chunks(self.chunks, self.model_config, engine)
        if self.model_config.layers == "te":
            from megarl.models.te_layers import add_into_main_grad

            add_into_main_grad(self.chunks)
        self._build_optimizer(optim)
        self.model_config.finalize_model_grads_func = _sum_gradients
        self._count_tokens(optim)
        if engine.overlap_grad_reduce:
            no_sync = [chunk.no_sync for chunk in self.wrapped]
            self.model_config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]

    def reset_optimizer(self, optim: OptimConfig, total_steps: int) -> None:
        """Start a new phase of training from the current parameters, with new moments, schedule and step count."""
        self._optim_settings()
        self.require(*self._needed_to_step)
        self.optim, self.total_steps, self.step = optim, total_steps, 0
        self._count_tokens(optim)
        self._build_optimizer(optim)
        if self._away.pop(OPTIMIZER, None) is not None:  # the former optimizer was offloaded: offload the new one
            self._away[OPTIMIZER] = self._leave(OPTIMIZER)

    def _build_optimizer(self, optim: OptimConfig) -> None:
        self.optimizer = optimizer.build_optimizer(self.wrapped, optim, self.config, self.dtype, self._where)
        self._stream = StreamedOptimizer(self.wrapped, self.optimizer) if self.config.stream_optimizer else None

    def _count_tokens(self, optim: OptimConfig) -> None:
        """Let routers count tokens if their correction biases follow the load of experts.

        Raises:
            ConfigError: the model has no such biases, or they are frozen.
        """
        rate, mixture = optim.expert_bias_rate, self.model_config.mixture
        if rate and (self.lora is not None or mixture is None or not mixture.router.correction):
            frozen = "adapters are trained, so the biases are frozen" if self.lora else "the model has no such biases"
            where = f"{self._where.removesuffix('engine')}optim.expert_bias_rate"
            raise ConfigError(
                f"experts' biases cannot follow their load: {frozen}",
                where=where,
                found=rate,
                allowed="0",
                fix="remove the key",
            )
        self._routers = corrected_routers(self.chunks) if rate else []
        count_tokens(self._routers)
        for chunk in self.chunks:
            chunk.marks_padding = bool(self._routers)

    def _optim_settings(self) -> OptimConfig:
        """Return the settings of the optimizer; raise RuntimeError if the engine is frozen."""
        if self.optim is None:
            raise RuntimeError(f"the {self.name} engine is frozen: it was built without optimizer settings")
        return self.optim

    # -- inference -----------------------------------------------------------------------------------------------

    def logprobs(self, batch: Batch, temperature: float = 1.0, entropy: bool = True) -> tuple[Jagged, Jagged]:
        """Return log-prob and entropy of every response token of this data-parallel rank's `batch`, which may be empty.

        Returns:
            Two Jagged float32 over response tokens, on the device of the batch, on every rank of the replica. The
            entropy is zero if `entropy` is False.
        """
        outputs = self._of_samples(batch, self._policy_head(temperature, entropy))
        logp, *more = (column.contiguous() for column in outputs.values.unbind(1))
        return outputs.like(logp), outputs.like(more[0] if more else torch.zeros_like(logp))

    def top_tokens(self, batch: Batch, k: int, limit: int, temperature: float = 1.0) -> Jagged:
        """Return the k most likely tokens below id `limit` at every response token's position, most likely first.

        Returns:
            float32 [tokens, K + 1, 2] over response tokens: ids and log-probs, on every rank of the replica; K is the
            smaller of `k` and `limit`. The last entry, with id -1, is all other tokens together.
        """
        k = min(k, limit)
        outputs = self._of_samples(batch, TopTokens(k, limit, self._log_probs(temperature, entropy=False)))
        return outputs.like(torch.stack(outputs.values.tensor_split(2, dim=1), 2))

    def hidden_states(self, batch: Batch) -> Jagged:
        """Return the final hidden state from which every response token is predicted.

        Returns:
            [tokens, hidden] in the model's dtype over response tokens, on every rank of the replica.
        """
        return self._of_samples(batch, HiddenStates(self.model_config.hidden_size), self.dtype)

    def sample(self, batch: Batch, seeds: Tensor, temperature: float) -> tuple[Jagged, Jagged]:
        """Sample all tokens of each row in one forward pass, for sequence layouts that predict them in parallel.

        Collective over the ranks of a replica; replicas may call it at different times.

        Args:
            batch: rows, see `SequenceLayout`; `response_ids` only give the number of tokens.
            seeds: int64 [B]; a row's tokens depend on its own seed only.
            temperature: 0: the most likely tokens.

        Returns:
            Tokens int64 and their log-probs float32, on every rank of the replica.
        """
        assert self.sequences.columns is not None, "a layout with parallel tokens has `columns`"
        slots = int(batch["response_ids"].lengths[0]) if len(batch) else 1
        head = SampledTokens(temperature, self.layout.tp_group, self.sequences.columns, seeds, slots)
        tokens, logp = (outputs := self.evaluate(batch, head)).values.unbind(1)
        return outputs.like(tokens.long()), outputs.like(logp.contiguous())

    def evaluate(self, batch: Batch, head: Head) -> Jagged:
        """Run the model without gradients; return the outputs [N, outputs] of `head` for the N response tokens of
        `batch`, on every rank of the replica.

        Collective over the ranks of a replica; different replicas may call this method at different times.
        """
        return self._evaluate(batch, head, together=False)

    def values(self, batch: Batch) -> Jagged:
        """Return the critic's value at every response token, float32, computed from the tokens before it."""
        outputs = self._of_samples(batch, Values())
        return outputs.like(outputs.values[:, 0].contiguous())

    def _of_samples(self, samples: Batch, head: Head, dtype: torch.dtype = torch.float32) -> Jagged:
        """Return the head's outputs [N, outputs] in `dtype` for the response tokens of samples."""
        return samples["response_ids"].like(self._evaluate(self.sequences.rows(samples), head, dtype=dtype).values)

    @torch.no_grad()
    def _evaluate(
        self, batch: Batch, head: Head, *, together: bool = True, dtype: torch.dtype = torch.float32
    ) -> Jagged:
        """Return the head's outputs [N, outputs] in `dtype` for all response tokens of `batch`, on its device.

        `together`: all data-parallel replicas make this call, each with its own batch; otherwise only this one does.
        """
        self.require(PARAMETERS)
        exchange = self._exchange(batch) if together else None
        if exchange is not None:
            batch = self._sent(exchange, batch)
        groups = self._plan(batch, together=together)
        micros, length = self._build(batch, groups)
        self._train_mode(False)
        where = batch["response_ids"].device
        last = functools.partial(self._collect, head, where, dtype)
        outputs = self._schedule(micros, length, last, forward_only=True)
        parts = [torch.zeros(0, head.outputs, dtype=dtype, device=where)]
        for at, micro in enumerate(micros):
            if micro.samples:
                part = outputs[at] if self.layout.is_last_stage else parts[0].new_empty(micro.tokens, head.outputs)
                if self.layout.pp_size > 1:  # the other stages get the outputs of the last one
                    part = self.layout.pp_group.broadcast(part.to(self.device), src=self.layout.pp_size - 1).to(where)
                parts.append(part)
        ordered = self._in_batch_order(torch.cat(parts), batch, groups)
        return ordered if exchange is None else exchange.restore(ordered)

    def _collect(self, head: Head, where: torch.device, dtype: torch.dtype, micro: MicroBatch, chunk: Any) -> Any:
        """Return a function that computes the head's outputs for a micro-batch's final hidden states, and moves them to
        the device `where`.

        Moving the outputs after each micro-batch saves device memory, which may be too small for all outputs."""

        def collect(hidden: Tensor, non_loss_data: bool = True) -> Tensor:
            outputs = self._outputs(head, hidden, chunk, micro)
            columns = [part if part.dim() == 2 else part[:, None] for part in outputs]
            return torch.cat(columns, 1).to(device=where, dtype=dtype)

        return collect

    @staticmethod
    def _in_batch_order(rows: Tensor, batch: Batch, groups: list[list[int]]) -> Jagged:
        """Reorder rows from micro-batch order to batch order."""
        responses = batch["response_ids"]
        ordered = [sample for group in groups for sample in group]
        back = torch.empty(len(ordered), dtype=torch.int64)
        back[torch.tensor(ordered, dtype=torch.int64)] = torch.arange(len(ordered))
        lengths = responses.lengths.cpu()[ordered].to(responses.device)
        return Jagged.from_lengths(rows.to(responses.device), lengths).select(back)

    def _policy_head(self, temperature: float, entropy: bool = True) -> Head:
        """Return the head that computes log-probs of response tokens: the sequence layout's own, or that of the
        vocabulary."""
        return self.sequences.head(entropy=entropy) or self._log_probs(temperature, entropy)

    def _log_probs(self, temperature: float, entropy: bool = True) -> LogProbs:
        chunk, columns = self.config.logits_chunk_tokens, self.sequences.columns
        return LogProbs(temperature, chunk, self.layout.tp_group, entropy, columns)

    def _outputs(self, head: Head, hidden: Tensor, chunk: Any, micro: MicroBatch) -> tuple[Tensor, ...]:
        """Return the head's outputs for the N response tokens of the micro-batch, on every rank of the last stage."""
        outputs = head(hidden[:, 0], chunk if isinstance(chunk, PolicyModel) else chunk.module, micro)
        if self.layout.cp_size == 1:
            return outputs
        return tuple(_AllTokens.apply(row, micro.order, micro.tokens, self.layout.cp_group) for row in outputs)

    # -- training ------------------------------------------------------------------------------------------------

    def train_step(
        self,
        batch: Batch,
        loss_fn: LossFn,
        temperature: float = 1.0,
        divisor: Divisor | None = None,
        targets: TeacherTargets | None = None,
        unit: int = 1,
    ) -> Metrics:
        """Take one optimizer step on this data-parallel rank's part of one mini-batch; the part may be empty.

        `loss_fn(logp [N], entropy [N], micro)` gets log-prob and entropy of the response tokens of a micro-batch, in
        order, and its samples `micro`. It returns a scalar, already a sum with global weights, and metrics. If a count
        is known only after the last forward pass, `divisor` computes it from the merged metrics, and the summed
        gradient is divided by it. With `targets` the call is `loss_fn(logp, entropy, policy, micro)`, see `SoftTargets`
        and `WholeVocabulary`. Every `unit` consecutive samples are in the same micro-batch.

        Returns:
            The metrics of all ranks merged, `<name>/grad_norm` (before clipping), `<name>/lr` and, with a draft
            head, `<name>/mtp_grad_norm`; equal on all ranks.

        Raises:
            NonFiniteError: the loss or a gradient norm is not finite; no parameter has changed.
        """
        return self._step(batch, loss_fn, self._policy_head(temperature), divisor, targets, unit)

    def value_step(self, batch: Batch, loss_fn: LossFn, unit: int = 1) -> Metrics:
        """Take an optimizer step like `train_step` for an engine with a value head: `loss_fn(values [N], micro)`."""
        return self._step(batch, loss_fn, Values(), unit=unit)

    def sft_step(self, batch: Batch) -> Metrics:
        """Take one optimizer step on -sum(loss_weights * logp); `loss_weights` is a field over response tokens."""

        def loss(logp: Tensor, entropy: Tensor, micro: Batch) -> tuple[Tensor, Metrics]:
            weights = micro["loss_weights"].values.to(logp.device)
            value = -(weights * logp).sum()
            metrics = Metrics()
            metrics.sum("sft/loss", value.item())
            return value, metrics

        return self.train_step(batch, loss)

    def _step(
        self,
        batch: Batch,
        loss_fn: LossFn,
        head: Head,
        divisor: Divisor | None = None,
        targets: TeacherTargets | None = None,
        unit: int = 1,
    ) -> Metrics:
        self._optim_settings()
        self.require(*self._needed_to_step)
        batch = self.sequences.rows(batch)
        for chunk in self.wrapped:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        if self._draft_loss is not None:
            batch = batch.copy()
            self._draft_loss.weigh(batch, self.layout.dp_group)
            self._lend_embedding()
        exchange = self._exchange(batch, unit)
        if exchange is not None:
            batch = self._sent(exchange, batch)
        if targets is not None:
            assert isinstance(head, LogProbs), "only a policy has a teacher"
            head = self._teacher_head(head, batch[targets.field], targets.terms)
        with phase("forward_backward"):
            groups = self._plan(batch, unit=unit)
            micros, length = self._build(batch, groups)
            self._train_mode(True)
            results = self._schedule(micros, length, functools.partial(self._loss, batch, loss_fn, head))
        self.chunks[-1].lent_embedding = None
        metrics = self._merge(Metrics(), results)
        if divisor is not None:
            self._divide_gradients(divisor(metrics))
        with phase("optimizer"):
            numbers = self._update(batch, groups, [loss for loss, _ in results])
        for name, number in numbers.items():
            metrics.mean(f"{self.name}/{name}", number, 1)
        if exchange is not None:
            metrics.mean(f"perf/imbalance/{self.name}", exchange.after, 1)
            metrics.mean(f"perf/imbalance_given/{self.name}", exchange.before, 1)
        return metrics

    @functools.cached_property
    def _draft_loss(self) -> DraftLoss | None:
        """The loss of the draft head; None: the model has none."""
        return None if self._mtp is None else DraftLoss(self._mtp.loss_weight)

    def _lend_embedding(self) -> None:
        """Send the embedding to the last pipeline stage for this step; a stage with a tied head has a copy already."""
        first, last, ends = self.chunks[0], self.chunks[-1], self.layout.ends_group
        if self.layout.pp_size == 1 or ends is None or last.share_embeddings_and_output_weights:
            return
        rows = first.embedding.word_embeddings.weight if first.pre_process else last.output_layer.weight
        sent = ends.broadcast(rows.detach() if first.pre_process else torch.empty_like(rows))
        if last.post_process:
            last.lent_embedding = sent

    def _divide_gradients(self, divisor: float) -> None:
        """Divide the summed gradients, except the gradients of a draft head, whose loss is a mean already."""
        if self._draft_loss is not None and self.layout.is_last_stage:
            for parameter in self.chunks[-1].draft.parameters():
                parameter.main_grad.mul_(divisor)
        for wrapped in self.wrapped:
            wrapped.scale_gradients(1.0 / divisor)

    def _teacher_head(self, base: LogProbs, teacher: Jagged, terms: Terms | None) -> Head:
        if terms is None:
            return SoftTargets(base, teacher)
        weight = self.teacher_weight
        assert weight is not None or not self.layout.is_last_stage, "set when the run's models are built"
        other = TeacherHead(torch.empty(0) if weight is None else weight, terms, self.teacher_cap)
        return WholeVocabulary(base, teacher, other)

    def _loss(self, batch: Batch, loss_fn: LossFn, head: Head, micro: MicroBatch, chunk: Any) -> Any:
        def loss(hidden: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, Metrics]]:
            outputs = self._outputs(head, hidden, chunk, micro)
            samples = batch.select(list(micro.samples))
            if micro.samples:
                value, metrics = loss_fn(*outputs, samples)
            # A filler has no samples. Its loss is a zero that depends on the outputs, so that its backward pass runs
            # too: other ranks wait for this rank's gradients.
            else:
                value, metrics = outputs[0].sum() * 0.0, Metrics()
            if self.config.share_prefixes and micro.samples:
                metrics.mean(f"{self.name}/shared_tokens", *micro.packed.shared_tokens)
            if self._draft_loss is not None and micro.draft is not None:
                head_of_draft = DraftLogProbs(self.config.logits_chunk_tokens, self.layout.tp_group)
                (logp,) = self._outputs(head_of_draft, hidden, chunk, micro.draft)
                drafted, more = self._draft_loss(logp, micro, samples)
                value = value + drafted
                metrics.merge(more)
            return value, value.new_zeros((), dtype=torch.int), (value.detach(), metrics)

        return loss

    def _update(self, batch: Batch, groups: list[list[int]], losses: list[Tensor]) -> dict[str, float]:
        """Check, clip and apply the gradients; return the gradient norms and the learning rate by name."""
        optim = self._optim_settings()
        self.optimizer.prepare_grads()
        norm = float(self.optimizer.get_grad_norm())
        draft_norm = None if self._draft_loss is None else optimizer.draft_grad_norm(self.optimizer)
        ids = batch["sample_id"] if "sample_id" in batch else list(map(str, range(len(batch))))
        names = [[str(ids[sample]) for sample in group] for group in groups][: len(losses)]
        check_finite(losses, names, norm, self.chunks, self.step, self.layout.world, draft_norm)
        optimizer.clip(self.optimizer, norm, optim.clip_grad, draft_norm)
        rate = optimizer.learning_rate(optim, self.step, self.total_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        if self._stream is None:
            self.optimizer.step_with_ready_grads()
        else:
            self._stream.step()
            self._away[OPTIMIZER] = self._stream
        layout = self.layout
        update_corrections(self._routers, optim.expert_bias_rate, (layout.dp_group, layout.cp_group, layout.tp_group))
        self.step += 1
        numbers = {"grad_norm": norm, "lr": rate}
        return numbers if draft_norm is None else {**numbers, "mtp_grad_norm": draft_norm}

    def _merge(self, metrics: Metrics, results: list[tuple[Tensor, Metrics]]) -> Metrics:
        """Merge the metrics of all micro-batches and data-parallel ranks, on every rank."""
        for _, part in results:
            metrics.merge(part)
        if self.layout.is_last_stage:
            metrics = self.layout.dp_group.reduce_metrics(metrics)
        if self.layout.pp_size > 1:
            plain = self.layout.pp_group.broadcast_json(metrics.to_json(), src=self.layout.pp_size - 1)
            metrics = Metrics.from_json(plain)
        return metrics

    # -- schedule ------------------------------------------------------------------------------------------------

    def _schedule(
        self, micros: list[MicroBatch], length: int, last: Callable[[MicroBatch, Any], Any], forward_only: bool = False
    ) -> list[Any]:
        """Run all micro-batches through the pipeline, and return a result for each on the last stage, none elsewhere.

        `last(micro, chunk)` returns the function from final hidden states to the result.
        """

        def forward(iterator: Iterator[MicroBatch], chunk: Any) -> tuple[Tensor, Any]:
            beat()
            micro = next(iterator)
            hidden = chunk(
                input_ids=micro.input_ids,
                position_ids=micro.position_ids,
                attention_mask=None,
                packed_seq_params=micro.packed,
            )
            return hidden, last(micro, chunk)

        many = len(self.wrapped) > 1
        iterators = [iter(micros) for _ in self.wrapped]
        return get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=iterators if many else iterators[0],
            model=self.wrapped if many else self.wrapped[0],
            num_microbatches=len(micros),
            seq_length=length,  # ignored with `variable_seq_lengths`, where stages send shapes along with tensors
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )

    def _exchange(self, batch: Batch, unit: int = 1) -> RowExchange | None:
        """Plan which rows the data-parallel replicas exchange before a pass, so that all have about equally many
        tokens; None without `balance_replicas`. `unit`: rows per sample that stay together."""
        if self.layout.dp_size == 1 or not self.config.balance_replicas:
            return None
        budget, patch_tokens = self.config.micro_batch_tokens, self._patch_tokens
        units = microbatch.indivisible(batch, budget, self.sequences, unit=unit, patch_tokens=patch_tokens)
        return RowExchange.of(*units, self.layout.dp_group)

    def _sent(self, exchange: RowExchange, batch: Batch) -> Batch:
        """Exchange rows with the other replicas, and return the rows that this replica computes.

        Raises:
            ConfigError: a column has values that cannot be sent.
        """
        try:
            return exchange.send(batch)
        except ValueError as error:
            raise ConfigError(
                f"samples cannot be sent to other replicas: {error}",
                where=f"{self._where}.balance_replicas",
                found=True,
                allowed="false; true only if samples have no columns other than tensors and JSON values",
                fix=f"set {self._where}.balance_replicas=false",
            ) from error

    def _plan(self, batch: Batch, *, together: bool = True, unit: int = 1) -> list[list[int]]:
        return microbatch.plan(
            batch,
            self.config.micro_batch_tokens,
            self.layout,
            self.device,
            self.sequences,
            together=together,
            unit=unit,
            patch_tokens=self._patch_tokens,
        )

    def _build(self, batch: Batch, groups: list[list[int]]) -> tuple[list[MicroBatch], int]:
        unit = fp8_unit(self.config)
        micros, length = microbatch.build_all(batch, groups, self.layout, self.device, self.sequences, unit)
        # Megatron's schedule reads this flag in every pass: if set, pipeline stages send the shape of each tensor.
        self.model_config.variable_seq_lengths = length is None
        return micros, length or 1

    def _train_mode(self, on: bool) -> None:
        """Switch all modules to training or evaluation mode, if needed: the switch is slow for robot policies."""
        if self.chunks[0].training != on:
            for chunk in self.chunks:
                chunk.train(on)

    # -- memory --------------------------------------------------------------------------------------------------

    @property
    def parts(self) -> frozenset[str]:
        """The parts (`megarl.system.offload_schedule.PARTS`) of this engine; a frozen engine has parameters only."""
        return frozenset((PARAMETERS,) if self.optimizer is None else PARTS)

    @property
    def held(self) -> frozenset[str]:
        """The parts of this engine that are on the device."""
        return self.parts - self._away.keys()

    def hold(self, *parts: str) -> None:
        """Move `parts` to the device, and all other parts off it; training results do not change.

        Parameters and optimizer state move to host memory; gradients are dropped.

        Raises:
            ValueError: a part is requested without the parameters, whose storage it may share.
        """
        wanted = self.parts.intersection(parts)
        if wanted and PARAMETERS not in wanted:
            raise ValueError(
                f"the {self.name} engine can hold its {' and '.join(sorted(wanted))} on the device only together with "
                "its parameters"
            )
        if self._stream is not None and GRADIENTS in wanted:
            wanted -= {OPTIMIZER}  # the optimizer step itself moves the state through the device, piece by piece
        for part in reversed(PARTS):
            if part in self.parts - wanted and part not in self._away:
                self._away[part] = self._leave(part)
        for part in PARTS:
            if part in wanted and part in self._away:
                self._away[part].restore()
                del self._away[part]

    @property
    def _needed_to_step(self) -> tuple[str, ...]:
        """The parts that have to be on the device before an optimizer step. A streamed optimizer's state need not be,
        because the step moves it through the device."""
        return PARTS if self._stream is None else (PARAMETERS, GRADIENTS)

    def _leave(self, part: str) -> offload.OffloadedPart | StreamedOptimizer:
        """Move a part off the device; return an object whose `restore` moves it back."""
        if part == OPTIMIZER and self._stream is not None:
            self._stream.leave()
            return self._stream
        return offload.offload_part(self.wrapped, self.optimizer, part, self._arenas[part])

    def require(self, *parts: str) -> None:
        """Raise RuntimeError if one of the engine's `parts` is offloaded."""
        missing = [part for part in PARTS if part in self.parts.intersection(parts) - self.held]
        if missing:
            raise RuntimeError(
                f"the {self.name} engine's {' and '.join(missing)} are not on the device: call this inside a phase of "
                "megarl.system.offload_schedule that loads them"
            )


def _sum_gradients(chunks: list[Any], num_tokens: Tensor | None = None, **kwargs: Any) -> None:
    """Sum gradients over dp, cp, tied embeddings and sequence-parallel norms as Megatron does, but without dividing."""
    finalize_model_grads(chunks, None, **kwargs)


class _AllTokens(torch.autograd.Function):
    """Gathers the values [n] of each context-parallel rank's rows into values [N] of all rows, on every rank.

    The backward pass returns this rank's part of the gradient without a sum over ranks: all ranks compute the same
    loss, so a sum would count it cp times."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, order: Tensor, tokens: int, group: WorkerGroup) -> Tensor:
        ctx.save_for_backward(order)
        return group.all_reduce(values.new_zeros(tokens, *values.shape[1:]).index_copy_(0, order, values))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (order,) = ctx.saved_tensors
        return grad[order], None, None, None
