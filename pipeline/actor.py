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
from typing import Any, NoReturn

import pyarrow as pa
import ray

from esp_worker.drafters.none import NoDrafter
from esp_worker.stopping import StopStrings
from esp_worker.types import Completion, Request
from pipeline.columns import comparison_columns, is_compared, margin_request, result_columns
from pipeline.decoder import ROW_ERRORS, Decoder, EngineDecoder
from pipeline.errors import RowErrorType, failure_line
from pipeline.lag import RowKey
from pipeline.ledger import DEATHS_ALONE, DEATHS_IN_A_ROW, Claim, Process
from pipeline.metrics import ActorMetrics
from pipeline.plan import Plan, find_checkpoint
from pipeline.prepare import load_tokenizer
from pipeline.progress import Tally
from pipeline.sampling import bad_word_ids, row_sampling, row_seed
from pipeline.schema import IDENTITY_FIELDS, output_schema
from pipeline.turns import Turns

logger = logging.getLogger(__name__)


REPORT_EVERY_S = 0.2
ASK_AGAIN_S = 0.1  # while writing lags behind


class ActorStartError(RuntimeError):
    """This job's actors cannot start or cannot live, and no row is to blame. One line; ends the job."""


class DecodeActor:
    """A Ray Data stage over an actor pool: rows of prepared_schema in, rows of output_schema out."""

    def __init__(self, plan: Plan, board: Any, decoder: Callable[[Plan], Decoder] = EngineDecoder) -> None:
        """board: handle of a Board actor. decoder: makes what this process decodes with."""
        _log_to_stderr()
        self._process = this_process()
        self._board = board
        deaths = ray.get(board.started.remote(self._process))
        if deaths >= DEATHS_IN_A_ROW:
            raise ActorStartError(
                f"actors die: the process of one was killed {deaths} times in a row and decoded no row in between, the "
                f"last time on {socket.gethostname()} (out of memory, a crash in a driver?)"
            )
        config = plan.config
        self._plan = plan
        self._turns = Turns()
        self._next_batch = asyncio.Lock()
        self._news: tuple[list[RowKey], Tally] = ([], Tally())  # rows decoded, and what these and others add
        self._method = config.decoder.method
        self._metrics = ActorMetrics(self._method)
        self._schema = output_schema(config.input.keep_columns)
        self._carried = [field.name for field in IDENTITY_FIELDS] + list(config.input.keep_columns) + ["sample_index"]
        self._tokenizer = load_tokenizer(find_checkpoint(config).folder, config.model.trust_remote_code)
        self._bad_word_ids = lru_cache(maxsize=64)(partial(bad_word_ids, self._tokenizer))  # mostly the job's own
        self._decoder = _started(decoder, plan)
        self._about = {
            "worker": self._process.start,
            "worker_load_s": self._decoder.load_s,
            "worker_warmup_s": self._decoder.warmup_s,
        }

    async def __call__(self, batch: pa.Table) -> pa.Table:
        rows = batch.to_pylist()
        claim = await self._claim(rows)
        with self._metrics.in_hand(len(rows)):
            records = await asyncio.gather(*(self._record(row, claim) for row in rows))
        self._report()
        return pa.Table.from_pylist(records, schema=self._schema)

    async def _claim(self, rows: list[dict[str, Any]]) -> Claim:
        """Take a batch, once writing has come near enough; new ones in the order that they came. One that Ray brings
        again, because its output went with a node, passes those that wait: they may wait for nothing else."""
        batch, decoded = [_key(row) for row in rows], [_key(row) for row in rows if row["error_type"] is None]
        claim: Claim | None = await self._board.claim.remote(self._process, batch, decoded)
        if claim is not None:
            return claim
        async with self._next_batch:
            while claim is None:
                await asyncio.sleep(ASK_AGAIN_S)
                claim = await self._board.claim.remote(self._process, batch, decoded)
        return claim

    async def _record(self, row: dict[str, Any], claim: Claim) -> dict[str, Any]:
        """A row's output, decoded when its turn comes."""
        carried = {name: row[name] for name in self._carried} | self._about
        if row["error_type"] is not None:
            self._tell_failure(row, row["error_type"], row["logged"])
            return carried | self._failed(row["error_type"], row["error"])
        if _key(row) in claim.condemned:
            message = (
                f"{row['source_file']}, row {row['row_id']}: the process that decodes it died {DEATHS_ALONE} times "
                "with nothing beside this row; it is not tried again"
            )
            self._tell_failure(row, RowErrorType.CRASH, message)
            return carried | self._failed(RowErrorType.CRASH, message)
        if _key(row) not in claim.suspects:
            async with self._turns.together():
                return carried | await self._tried(row)
        async with self._turns.alone():
            logger.info("decoded alone, since its process died: %s, row %s", row["source_file"], row["row_id"])
            self._report()  # no row that has ended is left to be blamed
            await self._board.alone.remote(self._process, _key(row))
            result = await self._tried(row)
            self._report()  # nor this one, should the next ones end the process
            return carried | result

    def _failed(self, kind: str, message: str) -> dict[str, Any]:
        """The columns of a row that is not decoded."""
        self._tell(Tally(rows=1, failed=1))
        return _failure(kind, message)

    def _tell_failure(self, row: dict[str, Any], kind: str, message: str) -> None:
        logger.warning(failure_line(row["source_file"], row["row_id"], kind, message))
        self._metrics.failed(kind)

    async def _tried(self, row: dict[str, Any]) -> dict[str, Any]:
        try:
            result = await self._decoded(row)
        except Exception as error:
            if not isinstance(error, ROW_ERRORS) and await self._is_broken():
                _end_process(error)
            message = f"{row['source_file']}, row {row['row_id']}: {type(error).__name__}: {error}"
            self._tell_failure(row, RowErrorType.DECODE, message)
            result, tally = _failure(RowErrorType.DECODE, message), Tally(rows=1, failed=1)
        else:
            committed, calls = sum(result["accept_lengths"]), result["decode_calls"]
            tally = Tally(rows=1, tokens=result["output_tokens"], committed=committed, decode_calls=calls)
            self._metrics.done(result)
        self._news[0].append(_key(row))
        self._tell(tally)
        return result

    def _tell(self, tally: Tally) -> None:
        """Tell the board, together with the rows that end about now: a message a row would cost more than a short row
        does."""
        if not self._news[1].rows:
            asyncio.get_running_loop().call_later(REPORT_EVERY_S, self._report)
        self._news[1].add(tally)

    def _report(self) -> None:
        (rows, tally), self._news = self._news, ([], Tally())
        if tally.rows:
            self._board.ended.remote(self._process, rows, tally)  # fire and forget

    async def _is_broken(self) -> bool:
        try:
            await asyncio.wrap_future(self._decoder.probe())
        except Exception as error:
            logger.error("the engine does not decode its warm-up request any more: %s: %s", type(error).__name__, error)
            return True
        return False

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


def _started(decoder: Callable[[Plan], Decoder], plan: Plan) -> Decoder:
    try:
        return decoder(plan)
    except Exception as error:
        reason = " ".join(str(error).split())
        raise ActorStartError(
            f"an actor could not start on {socket.gethostname()} with model.path {plan.config.model.path}: "
            f"{type(error).__name__}: {reason}"
        ) from error


def _end_process(error: Exception) -> NoReturn:
    """A new process is all that helps a broken device (CUDA's errors stay), and it helps every other engine too. Ray
    starts it, with the rows that were in hand."""
    logger.critical("the engine is broken; its process starts again", exc_info=error)
    logging.shutdown()
    os._exit(1)


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


def _key(row: dict[str, Any]) -> RowKey:
    return row["row_key"], row["sample_index"]


def this_process() -> Process:
    """start: host, process, actor; unique for each start of an actor."""
    context = ray.get_runtime_context()
    actor = context.get_actor_id()
    return Process(actor, f"{socket.gethostname()}-{os.getpid()}-{actor[:12]}", context.get_node_id())
