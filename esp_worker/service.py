"""An engine behind a thread: many submitters, one step loop, a future for each request.

The loop keeps slots full across batches: whoever has rows submits them and waits only for its own. A step that fails
costs no row but the one that fails alone: its sequences start again one at a time, and only a request whose step
fails with nothing beside it gets the error.
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
from concurrent.futures import Future
from dataclasses import dataclass, replace

from esp_worker.engine import Engine
from esp_worker.types import Completion, Request

logger = logging.getLogger(__name__)


class ServiceClosedError(RuntimeError):
    """The service was closed before this request ended."""


@dataclass(frozen=True, slots=True)
class _Submission:
    request: Request
    method: str | None
    future: Future[Completion]


class EngineService:
    """Owns an engine; `submit` from any thread. Use as a context manager, or call `close`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._inbox: queue.SimpleQueue[_Submission | None] = queue.SimpleQueue()
        self._pending: dict[str, _Submission] = {}
        self._ids = itertools.count()
        self._gate = threading.Lock()  # over _closed and the inbox: what is put is seen, or the submitter is told
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="esp-engine", daemon=True)
        self._thread.start()

    def __enter__(self) -> EngineService:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def submit(self, request: Request, method: str | None = None) -> Future[Completion]:
        """Queue a request for the lane of `method`; the future raises RequestError if it can never be decoded."""
        future: Future[Completion] = Future()
        with self._gate:
            if self._closed:
                raise ServiceClosedError("the engine service is closed")
            self._inbox.put(_Submission(request, method, future))
        return future

    def close(self) -> None:
        """Stop after the current step; requests that have not ended get ServiceClosedError."""
        with self._gate:
            self._closed = True
            self._inbox.put(None)
        self._thread.join()

    def _run(self) -> None:
        try:
            while self._receive():
                for completion in self._step():
                    submission = self._pending.pop(completion.request_id)
                    submission.future.set_result(replace(completion, request_id=submission.request.request_id))
        finally:
            with self._gate:
                self._closed = True
            self._abandon()

    def _receive(self) -> bool:
        """Take what has been submitted, waiting for it only when the engine has nothing to do. False: closed."""
        wait = not self._engine.busy
        while True:
            try:
                submission = self._inbox.get(block=wait)
            except queue.Empty:
                return True
            if submission is None:
                return False
            wait = False
            self._enqueue(submission)

    def _enqueue(self, submission: _Submission) -> None:
        if not submission.future.set_running_or_notify_cancel():
            return  # cancelled while it waited; from here on it cannot be
        key = str(next(self._ids))  # submitters may use equal ids; the engine's are unique
        try:
            self._engine.submit(replace(submission.request, request_id=key), submission.method)
        except Exception as error:  # whatever a bad request raises is its own
            submission.future.set_exception(error)
        else:
            self._pending[key] = submission

    def _step(self) -> list[Completion]:
        try:
            return self._engine.step()
        except Exception as error:
            running = self._engine.running
            if len(running) > 1:
                logger.exception("a step with %d sequences failed; each starts again alone", len(running))
                self._engine.restart_alone()
                return []
            logger.exception("a step failed with one sequence in it")
            self._engine.drop_running()
            for key in running:
                self._pending.pop(key).future.set_exception(error)
            if not running:  # nothing to blame: the engine itself is broken
                raise
            return []

    def _abandon(self) -> None:
        for submission in self._pending.values():
            submission.future.set_exception(ServiceClosedError("the engine stopped before this request ended"))
        self._pending.clear()
        while True:
            try:
                left = self._inbox.get_nowait()
            except queue.Empty:
                return
            if left is not None and left.future.set_running_or_notify_cancel():
                left.future.set_exception(ServiceClosedError("the engine stopped before this request began"))
