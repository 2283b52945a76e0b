"""The engine actor: one warm engine, several Ray batches at once. The only file that knows both Ray and the decoder.

A batch's rows go to the engine's queue together and come back as they end, so slots stay full across batches. Rows
picked for comparison are decoded a second time by plain decoding, in the same engine's other lane, never in one step
with the method's rows.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from functools import lru_cache, partial
from typing import Any, Literal

import pyarrow as pa
import ray
import torch
import xxhash

from esp_worker.accel import accelerate
from esp_worker.budget import MAX_ROWS, AutoBudget
from esp_worker.calibrate import cost_key, step_cost
from esp_worker.checkpoint import resolve
from esp_worker.cost import StepCost
from esp_worker.drafters.base import Drafter
from esp_worker.drafters.budgeted import BudgetedDrafter
from esp_worker.drafters.hybrid import HybridDrafter
from esp_worker.drafters.lade import Lookahead
from esp_worker.drafters.none import NoDrafter
from esp_worker.drafters.pld import PromptLookup
from esp_worker.drafters.probe import ProbeDrafter
from esp_worker.drafters.recycle import TokenRecycling
from esp_worker.drafters.stand import Stand
from esp_worker.engine import Engine
from esp_worker.memory import cache_budget
from esp_worker.model import CausalModel, load_model
from esp_worker.prime import Successors, successors
from esp_worker.rows import BestRows, FixedRows, Rows
from esp_worker.service import EngineService, ServiceClosedError
from esp_worker.stopping import StopStrings
from esp_worker.types import Completion, Request, SamplingParams, TokenLogprobs
from pipeline.config import DecoderConfig
from pipeline.errors import RowErrorType
from pipeline.plan import Plan
from pipeline.prepare import load_tokenizer
from pipeline.progress import Tally
from pipeline.sampling import bad_word_ids, row_sampling, row_seed
from pipeline.schema import IDENTITY_FIELDS, output_schema

logger = logging.getLogger(__name__)

WARMUP_TOKENS = 8


class DecodeActor:
    """A Ray Data stage over an actor pool: rows of prepared_schema in, rows of output_schema out."""

    def __init__(self, plan: Plan, board: Any = None) -> None:
        """Loads the model and warms the engine. board: handle of a ProgressBoard actor, or None."""
        began = time.perf_counter()
        _log_to_stderr()
        torch.set_num_threads(plan.threads)
        checkpoint = resolve(plan.config.model.path, plan.config.model.revision)
        if checkpoint.identity != plan.model_identity:
            raise RuntimeError(
                f"this node's files of {plan.config.model.path} ({checkpoint.identity}) are not the driver's "
                f"({plan.model_identity}); all nodes must see the same model"
            )
        config = plan.config
        trust = config.model.trust_remote_code
        self._plan = plan
        self._board = board
        self._schema = output_schema(config.input.keep_columns)
        self._carried = [field.name for field in IDENTITY_FIELDS] + list(config.input.keep_columns) + ["sample_index"]
        self._tokenizer = load_tokenizer(checkpoint.folder, trust)
        self._bad_word_ids = lru_cache(maxsize=64)(partial(bad_word_ids, self._tokenizer))  # mostly the job's own
        model = load_model(checkpoint.folder, dtype=plan.dtype, device=plan.device, trust_remote_code=trust)
        kernels = accelerate(model) if config.engine.kernels == "auto" else "stock kernels"
        key = cost_key(model, checkpoint.identity, kernels)
        self._method = config.decoder.method
        engine = config.engine
        self._engine = Engine(
            model,
            make_drafters(
                config.decoder,
                model,
                lambda: step_cost(model, key, engine.slots, plan.max_length),
                lambda: successors(model, checkpoint.identity),
            ),
            slots=engine.slots,
            max_length=plan.max_length,
            prefill_tokens=engine.prefill_tokens,
            prefix_reuse=engine.prefix_reuse,
            cache_bytes=_cache_bytes(plan, model),
        )
        loaded = time.perf_counter()
        self._warm_up(model)
        self._service = EngineService(self._engine)
        self._about = {
            "worker": worker_name(),
            "worker_load_s": loaded - began,
            "worker_warmup_s": time.perf_counter() - loaded,
        }
        logger.info("engine ready: %s, %s, %d threads, %s", plan.dtype, plan.device, plan.threads, kernels)
        logger.info(self._engine.memory_plan)

    async def __call__(self, batch: pa.Table) -> pa.Table:
        records = await asyncio.gather(*(self._row(row) for row in batch.to_pylist()))
        return pa.Table.from_pylist(records, schema=self._schema)

    def _warm_up(self, model: CausalModel) -> None:
        """A few steps of every lane, so that allocation and kernel choice are not charged to the first row."""
        prompt = tuple(token % model.vocab_size for token in range(1, 9))
        tokens = min(WARMUP_TOKENS, self._plan.max_length - len(prompt))
        if tokens < 1:
            return
        request = Request("warm-up", prompt, SamplingParams(max_new_tokens=tokens))
        for method in self._engine.methods:
            for _ in self._engine.generate([request], method):
                pass

    async def _row(self, row: dict[str, Any]) -> dict[str, Any]:
        carried = {name: row[name] for name in self._carried} | self._about
        if row["error_type"] is not None:
            self._report(Tally(rows=1, failed=1))
            return carried | _failure(row["error_type"], row["error"])
        compared = self._method != NoDrafter.name and is_compared(row["row_key"], self._plan.config.compare.fraction)
        try:
            request = self._request(row)
            decodings = [self._decode(request, self._method)]  # the method first: its lane runs before the comparison's
            if compared:
                decodings.append(self._decode(request, NoDrafter.name))
            done = await asyncio.gather(*decodings)
            result = self._result(*done[0])
            result |= {"seed": request.sampling.seed, "prompt_tokens": len(request.prompt_ids)}
            if compared:
                result |= await self._comparison(request, done[0][0], *done[1])
        except ServiceClosedError:
            raise  # the engine is gone, which is no row's fault: Ray starts the actor and the rows again
        except Exception as error:
            message = f"{row['source_file']}, row {row['row_id']}: {type(error).__name__}: {error}"
            logger.warning("decoding failed: %s", message)
            self._report(Tally(rows=1, failed=1))
            return carried | _failure(RowErrorType.DECODE, message)
        committed = sum(result["accept_lengths"])
        calls = result["decode_calls"]
        self._report(Tally(rows=1, tokens=result["output_tokens"], committed=committed, decode_calls=calls))
        return carried | result

    def _decode(self, request: Request, method: str) -> Awaitable[tuple[Completion, datetime]]:
        """Queue a request now; the result is its completion and when it ended."""
        ended: list[datetime] = []
        future = self._service.submit(request, method)
        future.add_done_callback(lambda _: ended.append(datetime.now(UTC)))  # on the engine's thread, at once

        async def wait() -> tuple[Completion, datetime]:
            completion = await asyncio.wrap_future(future)
            return completion, ended[0]

        return wait()

    def _request(self, row: dict[str, Any]) -> Request:
        """The row as the decoder takes it, its own sampling settings over the job's."""
        job = self._plan.config.sampling
        sampling = row_sampling(job, row["sampling"])
        params = sampling.params(
            seed=row_seed(job, row["sampling"], row["row_id"]),
            sample_index=row["sample_index"],
            eos_token_ids=frozenset(self._plan.eos_token_ids),
            bad_words=self._bad_word_ids(tuple(sampling.bad_words)),
        )
        stop = None
        if sampling.stop:
            stop = StopStrings(sampling.stop, self._text, keep=sampling.keep_stop)
        return Request(row["row_id"], tuple(row["prompt_ids"]), params, stop)

    def _text(self, token_ids: Any) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True))

    def _result(self, completion: Completion, finished: datetime) -> dict[str, Any]:
        stats = completion.stats
        return {
            "text": completion.stop.text if completion.stop else self._text(completion.token_ids),
            "token_ids": completion.token_ids,
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop and completion.stop.reason,
            **logprob_columns(completion.logprobs),
            "output_tokens": len(completion.token_ids),
            "decode_calls": stats.decode_calls,
            "plain_steps": stats.plain_steps,
            "prefill_calls": stats.prefill_calls,
            "prefill_tokens": stats.prefill_tokens,
            "cached_tokens": stats.cached_tokens,
            "rows_computed": stats.rows_computed,
            "accept_lengths": stats.accept_lengths,
            "tau": stats.tau,
            "drafted_tokens": stats.drafted_tokens,
            "accepted_tokens": stats.accepted_tokens,
            "method": self._method,
            "latency_s": completion.latency_s,
            "engine_s": stats.engine_s,
            "mean_batch": stats.mean_batch,
            "finished_at": finished,
        }

    async def _comparison(
        self, request: Request, method: Completion, plain: Completion, finished: datetime
    ) -> dict[str, Any]:
        """Columns that set a row beside its plain decoding."""
        divergence = first_divergence(method.token_ids, plain.token_ids)
        asked = margin_request(request, method, plain)
        return {
            "ar_decode_calls": plain.stats.decode_calls,
            "ar_latency_s": plain.latency_s,
            "ar_finished_at": finished,
            "ar_engine_s": plain.stats.engine_s,
            "ar_mean_batch": plain.stats.mean_batch,
            "ar_output_tokens": len(plain.token_ids),
            "exact_match": divergence is None,
            "first_divergence": divergence,
            "divergence_margin": None if asked is None else margin((await self._decode(asked, NoDrafter.name))[0]),
        }

    def _report(self, done: Tally) -> None:
        if self._board is not None:
            self._board.add.remote(done)  # fire and forget


def _log_to_stderr() -> None:
    """Ray brings a worker's stderr to the driver; its own logging set-up would keep our lines from it."""
    for name in ("pipeline", "esp_worker"):
        package = logging.getLogger(name)
        package.setLevel(logging.INFO)
        if not package.handlers:
            package.addHandler(logging.StreamHandler())
            package.propagate = False


def _cache_bytes(plan: Plan, model: CausalModel) -> int:
    """engine.cache_gib, or this actor's part of what its device has free.

    On a CPU as if all actors were on one machine: which share one is Ray's business, and not known here.
    """
    wanted = plan.config.engine.cache_gib
    if wanted is not None:
        return int(wanted * 2**30)
    shared_gpu = round(1 / plan.num_gpus) if 0 < plan.num_gpus < 1 else 1
    return cache_budget(model.device, engines=plan.config.cluster.actors if plan.device == "cpu" else shared_gpu)


def _failure(kind: str, message: str) -> dict[str, Any]:
    return {"finish_reason": "error", "error": message, "error_type": kind}


def logprob_columns(logprobs: tuple[TokenLogprobs, ...] | None) -> dict[str, Any]:
    if logprobs is None:
        return {"logprobs": None, "top_logprobs": None}
    tops = [[{"token_id": token, "logprob": logprob} for token, logprob in at.top] for at in logprobs]
    return {"logprobs": [at.logprob for at in logprobs], "top_logprobs": tops}


def margin_request(request: Request, method: Completion, plain: Completion) -> Request | None:
    """What plain decoding is asked for where two outputs first differ: its two best tokens there, from one prefill.

    None where there is no such position: equal outputs; an output that only goes on where the other has been cut or
    has ended (the tokens that led there are not known); draws and edited logits, whose best token is not the model's.
    """
    at = first_divergence(method.token_ids, plain.token_ids)
    greedy = request.sampling.temperature == 0 and not request.sampling.edits_logits
    if at is None or at >= min(len(method.token_ids), len(plain.token_ids)) or not greedy:
        return None
    best_two = SamplingParams(max_new_tokens=1, logprobs=2)
    return Request(request.request_id, (*request.prompt_ids, *plain.token_ids[:at]), best_two)


def margin(best_two: Completion) -> float:
    """How near a tie was: the difference of the two best log-probabilities."""
    assert best_two.logprobs is not None
    (_, best), (_, second) = best_two.logprobs[0].top
    return best - second


def first_divergence(a: tuple[int, ...], b: tuple[int, ...]) -> int | None:
    """First position at which two outputs differ (a shorter one differs at its end); None where they are equal."""
    if a == b:
        return None
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def is_compared(row_key: int, fraction: float) -> bool:
    """Whether a row is in the sample that plain decoding decodes too; the key decides, so a resume picks the same."""
    return xxhash.xxh3_64_intdigest(row_key.to_bytes(8, "big")) < fraction * 2**64


def worker_name() -> str:
    """Unique per actor start: host, process, actor."""
    actor = ray.get_runtime_context().get_actor_id() or "driver"
    return f"{socket.gethostname()}-{os.getpid()}-{actor[:12]}"


def make_drafters(
    config: DecoderConfig,
    model: CausalModel,
    step_cost: Callable[[], StepCost] | None = None,
    successors: Callable[[], Successors] | None = None,
) -> list[Drafter]:
    """The engine's lanes: the configured method first, plain decoding beside it.

    step_cost: what steps cost here, asked for where block_complexity is auto.
    """
    if config.method == NoDrafter.name:
        return [NoDrafter()]
    rows = config.block_complexity
    assert rows is not None
    if config.method == HybridDrafter.name:
        known = {} if successors is None else {"successors": successors().of}
        return [HybridDrafter(model.embed, _hybrid_rows(rows, step_cost), **known), NoDrafter()]
    if config.method != ProbeDrafter.name:
        assert rows != "auto"
        return [_baseline(config, rows, model.vocab_size), NoDrafter()]
    widest = (config.masks + 1) * MAX_ROWS  # leaves a node for every row but the root: the budget deals out the probes
    probe = ProbeDrafter(
        model.embed,
        masks=config.masks,
        block_complexity=widest if rows == "auto" else rows,
        tree=config.tree,
        branches=config.branches,
        probe_owners=config.owner_count,
        prune=config.prune,
        ema=config.ema,
        init=config.init,
        init_offset=config.init_offset,
        impl=config.impl,
        table=model.embedding_moments,
    )
    if rows != "auto":
        return [probe, NoDrafter()]
    assert step_cost is not None, "auto needs the costs of steps"
    return [BudgetedDrafter(probe, AutoBudget(step_cost(), config.masks)), NoDrafter()]


def _hybrid_rows(rows: int | Literal["auto"], step_cost: Callable[[], StepCost] | None) -> Rows:
    if rows != "auto":
        return FixedRows(rows)
    assert step_cost is not None, "auto needs the costs of steps"
    return BestRows(step_cost())


def _baseline(config: DecoderConfig, rows: int, vocab_size: int) -> Drafter:
    """The drafter of a method without probes."""
    if config.method == PromptLookup.name:
        return PromptLookup(ngram=config.ngram, depth=config.depth)
    if config.method == Lookahead.name:
        assert config.lookahead is not None
        return Lookahead(lookahead=config.lookahead)
    if config.method == Stand.name:
        return Stand(ngram=config.ngram, block_complexity=rows)
    return TokenRecycling(vocab_size, block_complexity=rows)
