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
    request: Request  # under an id of its own: submitters may use equal ones
    method: str | None
    future: Future[Completion]
    asked_id: str


class EngineService:
    """Owns an engine; `submit` from any thread. Use as a context manager, or call `close`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._inbox: queue.SimpleQueue[_Submission | str | None] = (
            queue.SimpleQueue()
        )  # a str: the id of a cancelled one
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
        """Queue a request for the lane of `method`; the future raises RequestError if it can never be decoded.

        Cancelling the future takes the request out of its slot before the next step.
        """
        future: Future[Completion] = Future()
        key = str(next(self._ids))
        future.add_done_callback(lambda done: self._inbox.put(key) if done.cancelled() else None)
        with self._gate:
            if self._closed:
                raise ServiceClosedError("the engine service is closed")
            self._inbox.put(_Submission(replace(request, request_id=key), method, future, request.request_id))
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
                    submission = self._pending.pop(completion.request_id, None)  # None: cancelled as it ended
                    if submission and submission.future.set_running_or_notify_cancel():
                        submission.future.set_result(replace(completion, request_id=submission.asked_id))
        finally:
            with self._gate:
                self._closed = True
            self._abandon()

    def _receive(self) -> bool:
        """Take what has been submitted, waiting for it only when the engine has nothing to do. False: closed."""
        while True:
            try:
                message = self._inbox.get(block=not self._engine.busy)
            except queue.Empty:
                return True
            if message is None:
                return False
            if isinstance(message, _Submission):
                self._enqueue(message)
            elif submission := self._pending.pop(message, None):
                submission.future.set_running_or_notify_cancel()  # tells those that wait for it
                self._engine.cancel(message)

    def _enqueue(self, submission: _Submission) -> None:
        try:
            self._engine.submit(submission.request, submission.method)
        except Exception as error:  # whatever a bad request raises is its own
            _fail(submission.future, error)
        else:
            self._pending[submission.request.request_id] = submission

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
                if submission := self._pending.pop(key, None):  # None: cancelled meanwhile
                    _fail(submission.future, error)
            if not running:  # nothing to blame: the engine itself is broken
                raise
            return []

    def _abandon(self) -> None:
        for submission in self._pending.values():
            _fail(submission.future, ServiceClosedError("the engine stopped before this request ended"))
        self._pending.clear()
        while True:
            try:
                left = self._inbox.get_nowait()
            except queue.Empty:
                return
            if isinstance(left, _Submission):
                _fail(left.future, ServiceClosedError("the engine stopped before this request began"))


def _fail(future: Future[Completion], error: Exception) -> None:
    if future.set_running_or_notify_cancel():  # else it was cancelled, and nobody waits
        future.set_exception(error)
