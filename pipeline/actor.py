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
from collections.abc import Awaitable
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import ray
import torch
import xxhash

from esp_worker.accel import accelerate
from esp_worker.checkpoint import resolve
from esp_worker.drafters.base import Drafter
from esp_worker.drafters.none import NoDrafter
from esp_worker.drafters.probe import ProbeDrafter
from esp_worker.engine import Engine
from esp_worker.model import CausalModel, load_model
from esp_worker.service import EngineService, ServiceClosedError
from esp_worker.stopping import StopStrings
from esp_worker.types import Completion, Request, SamplingParams
from pipeline.config import DecoderConfig
from pipeline.errors import RowErrorType
from pipeline.plan import Plan
from pipeline.prepare import load_tokenizer
from pipeline.progress import Tally
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
        self._carried = [field.name for field in IDENTITY_FIELDS] + list(config.input.keep_columns)
        self._tokenizer = load_tokenizer(checkpoint.folder, trust)
        self._stop = StopStrings(config.sampling.stop, self._text) if config.sampling.stop else None
        model = load_model(checkpoint.folder, dtype=plan.dtype, device=plan.device, trust_remote_code=trust)
        kernels = accelerate(model) if config.engine.kernels == "auto" else "stock kernels"
        self._method = config.decoder.method
        self._engine = Engine(
            model, make_drafters(config.decoder, model), slots=config.engine.slots, max_length=plan.max_length
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
        carried = {name: row[name] for name in self._carried} | {"sample_index": 0} | self._about
        if row["error_type"] is not None:
            self._report(Tally(rows=1, failed=1))
            return carried | _failure(row["error_type"], row["error"])
        seed = row_seed(self._plan.config.sampling.seed, row["row_id"])
        request = self._request(row, seed)
        compared = self._method != NoDrafter.name and is_compared(row["row_key"], self._plan.config.compare.fraction)
        decodings = [self._decode(request, self._method)]  # the method first: its lane runs before the comparison's
        if compared:
            decodings.append(self._decode(request, NoDrafter.name))
        try:
            done = await asyncio.gather(*decodings)
            result = self._result(*done[0]) | {"seed": seed, "prompt_tokens": len(request.prompt_ids)}
            if compared:
                result |= _comparison(done[0][0], *done[1])
        except ServiceClosedError:
            raise  # the engine is gone, which is no row's fault: Ray starts the actor and the rows again
        except Exception as error:
            message = f"{row['source_file']}, row {row['row_id']}: {type(error).__name__}: {error}"
            logger.warning("decoding failed: %s", message)
            self._report(Tally(rows=1, failed=1))
            return carried | _failure(RowErrorType.DECODE, message)
        tokens = result["output_tokens"]
        self._report(Tally(rows=1, tokens=tokens, committed=tokens - 1, decode_calls=result["decode_calls"]))
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

    def _request(self, row: dict[str, Any], seed: int) -> Request:
        sampling = self._plan.config.sampling
        params = SamplingParams(
            max_new_tokens=sampling.max_new_tokens,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            seed=seed,
            eos_token_ids=frozenset(self._plan.eos_token_ids),
        )
        return Request(row["row_id"], tuple(row["prompt_ids"]), params, self._stop)

    def _text(self, token_ids: Any) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True))

    def _result(self, completion: Completion, finished: datetime) -> dict[str, Any]:
        stats = completion.stats
        return {
            "text": completion.stop.text if completion.stop else self._text(completion.token_ids),
            "token_ids": completion.token_ids,
            "finish_reason": completion.finish_reason,
            "output_tokens": len(completion.token_ids),
            "decode_calls": stats.decode_calls,
            "prefill_calls": stats.prefill_calls,
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


def _failure(kind: str, message: str) -> dict[str, Any]:
    return {"finish_reason": "error", "error": message, "error_type": kind}


def _comparison(method: Completion, plain: Completion, finished: datetime) -> dict[str, Any]:
    """Columns that set a row beside its plain decoding."""
    divergence = first_divergence(method.token_ids, plain.token_ids)
    return {
        "ar_decode_calls": plain.stats.decode_calls,
        "ar_latency_s": plain.latency_s,
        "ar_finished_at": finished,
        "ar_engine_s": plain.stats.engine_s,
        "ar_mean_batch": plain.stats.mean_batch,
        "ar_output_tokens": len(plain.token_ids),
        "exact_match": divergence is None,
        "first_divergence": divergence,
    }


def first_divergence(a: tuple[int, ...], b: tuple[int, ...]) -> int | None:
    """First position at which two outputs differ (a shorter one differs at its end); None where they are equal."""
    if a == b:
        return None
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def is_compared(row_key: int, fraction: float) -> bool:
    """Whether a row is in the sample that plain decoding decodes too; the key decides, so a resume picks the same."""
    return xxhash.xxh3_64_intdigest(row_key.to_bytes(8, "big")) < fraction * 2**64


def row_seed(seed: int, row_id: str) -> int:
    """A row's own seed: equal prompts under other ids differ, and order does not matter."""
    return xxhash.xxh3_64_intdigest(f"{seed}\0{row_id}".encode())


def worker_name() -> str:
    """Unique per actor start: host, process, actor."""
    actor = ray.get_runtime_context().get_actor_id() or "driver"
    return f"{socket.gethostname()}-{os.getpid()}-{actor[:12]}"


def make_drafters(config: DecoderConfig, model: CausalModel) -> list[Drafter]:
    """The engine's lanes: the configured method first, plain decoding beside it."""
    if config.method == NoDrafter.name:
        return [NoDrafter()]
    assert config.block_complexity is not None
    probe = ProbeDrafter(
        model.embed,
        masks=config.masks,
        block_complexity=config.block_complexity,
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
    return [probe, NoDrafter()]
