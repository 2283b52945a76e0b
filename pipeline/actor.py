"""The decoding stage as Ray runs it: one warm decoder a process, several Ray batches at once.

A batch's rows go to the decoder's queue together and come back as they end, so slots stay full across batches. Rows
picked for comparison are decoded a second time by plain decoding, in the same engine's other lane, never in one step
with the method's rows.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from functools import lru_cache, partial
from typing import Any

import pyarrow as pa
import ray

from esp_worker.drafters.none import NoDrafter
from esp_worker.service import ServiceClosedError
from esp_worker.stopping import StopStrings
from esp_worker.types import Completion, Request
from pipeline.columns import comparison_columns, is_compared, margin_request, result_columns
from pipeline.decoder import Decoder, EngineDecoder
from pipeline.errors import RowErrorType
from pipeline.plan import Plan, find_checkpoint
from pipeline.prepare import load_tokenizer
from pipeline.progress import Tally
from pipeline.sampling import bad_word_ids, row_sampling, row_seed
from pipeline.schema import IDENTITY_FIELDS, output_schema

logger = logging.getLogger(__name__)


class DecodeActor:
    """A Ray Data stage over an actor pool: rows of prepared_schema in, rows of output_schema out."""

    def __init__(self, plan: Plan, board: Any = None, decoder: Callable[[Plan], Decoder] = EngineDecoder) -> None:
        """board: handle of a ProgressBoard actor, or None. decoder: makes what this process decodes with."""
        _log_to_stderr()
        config = plan.config
        self._plan = plan
        self._board = board
        self._method = config.decoder.method
        self._schema = output_schema(config.input.keep_columns)
        self._carried = [field.name for field in IDENTITY_FIELDS] + list(config.input.keep_columns) + ["sample_index"]
        self._tokenizer = load_tokenizer(find_checkpoint(config).folder, config.model.trust_remote_code)
        self._bad_word_ids = lru_cache(maxsize=64)(partial(bad_word_ids, self._tokenizer))  # mostly the job's own
        self._decoder = decoder(plan)
        self._about = {
            "worker": worker_name(),
            "worker_load_s": self._decoder.load_s,
            "worker_warmup_s": self._decoder.warmup_s,
        }

    async def __call__(self, batch: pa.Table) -> pa.Table:
        records = await asyncio.gather(*(self._row(row) for row in batch.to_pylist()))
        return pa.Table.from_pylist(records, schema=self._schema)

    async def _row(self, row: dict[str, Any]) -> dict[str, Any]:
        carried = {name: row[name] for name in self._carried} | self._about
        if row["error_type"] is not None:
            self._report(Tally(rows=1, failed=1))
            return carried | _failure(row["error_type"], row["error"])
        try:
            result = await self._decoded(row)
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

    async def _decoded(self, row: dict[str, Any]) -> dict[str, Any]:
        """The columns of a row's output, and of its plain decoding where the row is compared."""
        compared = self._method != NoDrafter.name and is_compared(row["row_key"], self._plan.config.compare.fraction)
        request = self._request(row)
        decodings = [self._decode(request, self._method)]  # the method first: its lane runs before the comparison's
        if compared:
            decodings.append(self._decode(request, NoDrafter.name))
        done = await asyncio.gather(*decodings)
        completion, finished = done[0]
        text = completion.stop.text if completion.stop else self._text(completion.token_ids)
        result = result_columns(completion, finished, self._method, text)
        result |= {"seed": request.sampling.seed, "prompt_tokens": len(request.prompt_ids)}
        if compared:
            plain, plain_finished = done[1]
            asked = margin_request(request, completion, plain)
            best_two = None if asked is None else (await self._decode(asked, NoDrafter.name))[0]
            result |= comparison_columns(completion, plain, plain_finished, best_two)
        return result

    def _decode(self, request: Request, method: str) -> Awaitable[tuple[Completion, datetime]]:
        """Queue a request now; the result is its completion and when it ended."""
        ended: list[datetime] = []
        future = self._decoder.submit(request, method)
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


def worker_name() -> str:
    """Unique per actor start: host, process, actor."""
    actor = ray.get_runtime_context().get_actor_id() or "driver"
    return f"{socket.gethostname()}-{os.getpid()}-{actor[:12]}"
