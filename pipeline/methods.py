"""From the decoder's settings to the engine's lanes: which drafter each method is, and what it takes from where."""

from __future__ import annotations

from collections.abc import Callable

from esp_worker.budget import AutoBudget
from esp_worker.cost import MAX_ROWS, StepCost
from esp_worker.drafters.base import Drafter
from esp_worker.drafters.budgeted import BudgetedDrafter
from esp_worker.drafters.hybrid import HybridDrafter
from esp_worker.drafters.lade import Lookahead
from esp_worker.drafters.none import NoDrafter
from esp_worker.drafters.pld import PromptLookup
from esp_worker.drafters.probe import ProbeDrafter
from esp_worker.drafters.recycle import TokenRecycling
from esp_worker.drafters.stand import Stand
from esp_worker.model import CausalModel
from esp_worker.prime import Successors
from esp_worker.rows import BestRows, FixedRows
from pipeline.decoder_config import AUTO, DecoderConfig


def make_drafters(
    config: DecoderConfig,
    model: CausalModel,
    step_cost: Callable[[], StepCost],
    successors: Callable[[], Successors],
) -> list[Drafter]:
    """The engine's lanes: the configured method first, plain decoding beside it.

    step_cost: what steps cost here, asked for where block_complexity is auto; successors: the model's own, asked for by
    hybrid.
    """
    if config.method == NoDrafter.name:
        return [NoDrafter()]
    return [_drafter(config, model, step_cost, successors), NoDrafter()]


def _drafter(
    config: DecoderConfig, model: CausalModel, step_cost: Callable[[], StepCost], successors: Callable[[], Successors]
) -> Drafter:
    rows = config.block_complexity
    assert rows is not None
    match config.method:
        case HybridDrafter.name:
            chosen = BestRows(step_cost()) if rows == AUTO else FixedRows(rows)
            return HybridDrafter(model.embed, chosen, successors().of)
        case ProbeDrafter.name if rows == AUTO:
            # The widest block leaves a node for every row but the root: the budget deals out the probes.
            probe = _probe(config, model, (config.masks + 1) * MAX_ROWS)
            return BudgetedDrafter(probe, AutoBudget(step_cost(), config.masks))
    assert rows != AUTO
    match config.method:
        case ProbeDrafter.name:
            return _probe(config, model, rows)
        case PromptLookup.name:
            return PromptLookup(ngram=config.ngram, depth=config.depth)
        case Lookahead.name:
            assert config.lookahead is not None
            return Lookahead(lookahead=config.lookahead)
        case Stand.name:
            return Stand(ngram=config.ngram, block_complexity=rows)
        case TokenRecycling.name:
            return TokenRecycling(model.vocab_size, block_complexity=rows)
    raise AssertionError(f"no drafter of method {config.method}")


def _probe(config: DecoderConfig, model: CausalModel, rows: int) -> ProbeDrafter:
    return ProbeDrafter(
        model.embed,
        masks=config.masks,
        block_complexity=rows,
        tree=config.tree,
        branches=config.branches,
        probe_owners=config.owner_count,
        prune=config.prune,
        ema=config.ema,
        init=config.init,
        init_offset=config.init_offset,
        init_moments=config.init_moments,
        impl=config.impl,
        table=model.embedding_moments,
    )
