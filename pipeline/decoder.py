"""What an actor process decodes with: a warm engine behind its thread, as the plan wants it.

`pipeline.actor` puts one on Ray; any other Decoder may take its place there.
"""

from __future__ import annotations

import logging
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import torch

from esp_worker.accel import accelerate
from esp_worker.calibrate import cost_key, step_cost
from esp_worker.checkpoint import resolve
from esp_worker.engine import Engine, RequestError
from esp_worker.memory import cache_budget
from esp_worker.model import CausalModel, load_model
from esp_worker.prime import successors
from esp_worker.sampling import NoTokenError
from esp_worker.service import EngineService
from esp_worker.types import Completion, Request, SamplingParams
from pipeline.methods import make_drafters
from pipeline.plan import Plan

logger = logging.getLogger(__name__)

WARMUP_TOKENS = 8


# What only the row itself is to blame for; behind any other error the engine may be broken.
ROW_ERRORS = (RequestError, NoTokenError)


class Decoder(Protocol):
    """Decodes requests side by side. load_s, warmup_s: what it took until the first could come."""

    load_s: float
    warmup_s: float

    def submit(self, request: Request, method: str | None = None) -> Future[Completion]:
        """Queue a request for a method's lane; the future's exception is what is wrong with that request."""
        ...

    def probe(self) -> Future[Completion]:
        """Decode something harmless: where this fails, nothing else can be decoded."""
        ...


class EngineDecoder:
    """The Decoder of every real job."""

    def __init__(self, plan: Plan) -> None:
        """Loads the model and warms the engine."""
        began = time.perf_counter()
        torch.set_num_threads(plan.threads)
        # In a thread that ends: OpenMP's threads belong to the one that they work for. Were there those of two, and
        # more than cores, they would sleep between a step's operators, which takes a third of a CPU's speed.
        with ThreadPoolExecutor(1, "esp-load") as loading:
            self._engine = loading.submit(_load, plan).result()
            loaded = time.perf_counter()
            loading.submit(self._warm_up).result()
        self.load_s = loaded - began
        self.warmup_s = time.perf_counter() - loaded
        self._service = EngineService(self._engine)
        logger.info(self._engine.memory_plan)

    def submit(self, request: Request, method: str | None = None) -> Future[Completion]:
        return self._service.submit(request, method)

    def probe(self) -> Future[Completion]:
        return self._service.submit(self._harmless())

    def _warm_up(self) -> None:
        """A few steps of every lane, so that allocation and kernel choice are not charged to the first row."""
        for method in self._engine.methods:
            for _ in self._engine.generate([self._harmless()], method):
                pass

    def _harmless(self) -> Request:
        engine = self._engine
        prompt = tuple(token % engine.model.vocab_size for token in range(1, min(WARMUP_TOKENS + 1, engine.max_length)))
        return Request("warm-up", prompt, SamplingParams(max_new_tokens=WARMUP_TOKENS))


def _load(plan: Plan) -> Engine:
    config, settings = plan.config, plan.config.engine
    checkpoint = resolve(config.model.path, config.model.revision)
    if checkpoint.identity != plan.model_identity:
        raise RuntimeError(
            f"this node's files of {config.model.path} ({checkpoint.identity}) are not the driver's "
            f"({plan.model_identity}); all nodes must see the same model"
        )
    trust = config.model.trust_remote_code
    model = load_model(checkpoint.folder, dtype=plan.dtype, device=plan.device, trust_remote_code=trust)
    kernels = accelerate(model) if settings.kernels == "auto" else "stock kernels"
    key = cost_key(model, checkpoint.identity, kernels)
    cache_bytes = _cache_bytes(plan, model)  # of what is free before drafters measure steps with caches of their own
    engine = Engine(
        model,
        make_drafters(
            config.decoder,
            model,
            lambda: step_cost(model, key, settings.slots, plan.max_length),
            lambda: successors(model, checkpoint.identity),
        ),
        slots=settings.slots,
        max_length=plan.max_length,
        prefill_tokens=settings.prefill_tokens,
        prefix_reuse=settings.prefix_reuse,
        cache_bytes=cache_bytes,
    )
    logger.info("engine loaded: %s, %s, %d threads, %s", plan.dtype, plan.device, plan.threads, kernels)
    return engine


def _cache_bytes(plan: Plan, model: CausalModel) -> int:
    """engine.cache_gib, or this actor's part of what its device has free.

    On a CPU as if all actors were on one machine: which share one is Ray's business, and not known here.
    """
    wanted = plan.config.engine.cache_gib
    if wanted is not None:
        return int(wanted * 2**30)
    shared_gpu = round(1 / plan.num_gpus) if 0 < plan.num_gpus < 1 else 1
    return cache_budget(model.device, engines=plan.config.cluster.actors if plan.device == "cpu" else shared_gpu)
