"""A stock Hugging Face causal LM behind the few calls that the decoder needs. The only file that knows HF's details.

R rows of any sequences, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, PreTrainedModel

from esp_worker.attention import ATTENTION_NAME, reads_keys_by_dimension, tree_attention
from esp_worker.block import Block
from esp_worker.cache import SlotCache
from esp_worker.checkpoint import ModelError, progress_bars_on_terminals_only

AttentionInterface.register(ATTENTION_NAME, tree_attention)

# Each is tested token for token against its own stock forward (tests/equivalence). Others are refused by name.
SUPPORTED = (
    "cohere",
    "cohere2",
    "gemma",
    "gemma2",
    "gemma3_text",
    "glm4",
    "gpt2",
    "gpt_neox",
    "granite",
    "llama",
    "ministral",
    "mistral",
    "mixtral",
    "olmo2",
    "olmo3",
    "phi",
    "phi3",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "smollm3",
    "starcoder2",
)
# Frequencies that depend on the longest position of the batch would let a neighbour change a row's tokens.
_STATIC_ROPE = {"default", "linear", "llama3", "yarn"}
# Layers whose whole state is the KV of the tokens that a row sees.
_LAYER_TYPES = {"full_attention", "sliding_attention"}

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def resolve_device(device: str) -> torch.device:
    """`auto` is CUDA where there is one, else the CPU."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ModelError(f"model.device: {device}: no CUDA device here")
    return torch.device(device)


def resolve_dtype(dtype: str, device: torch.device, checkpoint_dtype: torch.dtype | None) -> torch.dtype:
    """`auto` is the checkpoint's own on a GPU and float32 on a CPU, where 16 bits are slower and not exact."""
    if dtype != "auto":
        return DTYPES[dtype]
    return torch.float32 if device.type == "cpu" else checkpoint_dtype or torch.bfloat16


def load_model(
    folder: Path, *, dtype: str = "auto", device: str = "auto", trust_remote_code: bool = False
) -> CausalModel:
    """Load safetensors from a local folder. Raises ModelError for an architecture that the decoder does not support."""
    config = read_config(folder, trust_remote_code)
    where = resolve_device(device)
    with progress_bars_on_terminals_only():
        hf, loading = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=resolve_dtype(dtype, where, getattr(config, "dtype", None)),
            use_safetensors=True,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
        )
    lacking = sorted(map(str, [*loading["missing_keys"], *loading["mismatched_keys"]]))
    if lacking:  # transformers would go on with random numbers in their place
        raise ModelError(
            f"model {folder}: {len(lacking)} weights are missing or of another shape, such as {lacking[0]}"
        )
    return CausalModel(hf.to(where))


def read_config(folder: Path, trust_remote_code: bool = False) -> Any:
    """The checkpoint's configuration. Raises ModelError when it cannot be read or is of an unsupported architecture."""
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except (ValueError, OSError, KeyError) as error:
        raise ModelError(f"model {folder}: its config.json cannot be used ({str(error).splitlines()[0]})") from error
    check_supported(config)
    return config


def check_supported(config: Any) -> None:
    """Refuse, with one line, what tree attention over a slot cache would silently get wrong."""
    kind = config.model_type
    for reason in _refusals(config):
        raise ModelError(f"model type {kind} with {reason}")
    if kind not in SUPPORTED:
        raise ModelError(f"model type {kind} is not supported; supported are: {', '.join(SUPPORTED)}")


def _refusals(config: Any) -> Iterator[str]:
    """What a checkpoint of any type has that is not supported: such settings come before the type, as they say more."""
    if getattr(config, "is_encoder_decoder", False) or getattr(config, "add_cross_attention", False):
        yield "an encoder or cross-attention is not supported: only decoders are"
    if getattr(config, "use_bidirectional_attention", False) or not getattr(config, "is_causal", True):
        yield "bidirectional attention is not supported: a token must not see later ones"
    layer_types = set(getattr(config, "layer_types", None) or [])
    if other := sorted(layer_types - _LAYER_TYPES):
        yield f"{other[0]} layers is not supported: layers must be of {' or '.join(sorted(_LAYER_TYPES))}"
    window_on = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    if "sliding_attention" in layer_types and not window_on:
        yield "sliding_attention layers but no window is not supported: set sliding_window (and use_sliding_window)"
    if getattr(config, "reorder_and_upcast_attn", False):
        yield "reorder_and_upcast_attn is not supported"
    for rope in _rope_types(config):
        if rope not in _STATIC_ROPE:
            yield f"rope type {rope} is not supported: its frequencies change with the longest position in a batch"


def _rope_types(config: Any) -> Iterator[str]:
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    for entry in nested or [parameters]:
        yield entry.get("rope_type", "default")


def check_class(hf: PreTrainedModel) -> None:
    """Refuse a checkpoint's own modelling code: it need not call the attention that is registered here."""
    kind = type(hf)
    if not kind.__module__.startswith("transformers.models."):
        raise ModelError(
            f"model class {kind.__name__} of {kind.__module__} is not transformers' own, and its attention would not "
            f"see the tree; for transformers' class of type {hf.config.model_type} set model.trust_remote_code: false"
        )


def _after_head(config: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """What a family does to its lm_head's logits. By family: others ignore these settings where a config has them."""
    match config.model_type:
        case "gemma2" | "gemma3_text" if config.final_logit_softcapping is not None:
            cap = config.final_logit_softcapping
            return lambda logits: torch.tanh(logits / cap) * cap
        case "granite":
            return lambda logits: logits / config.logits_scaling
        case "cohere" | "cohere2":
            return lambda logits: logits * config.logit_scale
    return lambda logits: logits


class KeyValues(Protocol):
    """What layers see of a cache."""

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer: int, *_args: object, **_kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store a layer's key, value [1, G, R, D]; return those of all columns, [B, G, T, D]."""
        ...


Attend = Callable[..., Any]  # attention.tree_attention, or what a benchmark puts around it
# All layers and the last norm: rows [R, H], cache, block, attention -> [R, H].
Layers = Callable[[torch.Tensor, KeyValues, Block, Attend], torch.Tensor]


class _FiniteCache:
    """What the model sees of a float16 cache: keys and values that overflowed are stored as the largest number.

    A masked column is still multiplied, by zero: one infinity would make NaN of every row that must not see it.
    """

    def __init__(self, cache: SlotCache) -> None:
        self._cache = cache

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer: int, *_args: object, **_kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self._cache.update(key.nan_to_num(), value.nan_to_num(), layer)


class CausalModel:
    """Embeddings, block forward and logits of one frozen model."""

    def __init__(self, hf: PreTrainedModel) -> None:
        check_supported(hf.config)
        check_class(hf)
        self._hf: Any = hf.eval().requires_grad_(False)
        self._hf.set_attn_implementation(ATTENTION_NAME)
        if hf.dtype is torch.float64:  # the grouped kernels of mixtures of experts have no float64
            self._hf.set_experts_implementation("eager")
        self._backbone = self._hf.base_model
        self._embedding = self._hf.get_input_embeddings()
        self.num_parameters = sum(weight.numel() for weight in self._hf.parameters())  # tied ones once
        self._after_head = _after_head(hf.config)
        self._attend: Attend = tree_attention
        self._layers: Layers | None = None

    def swap_layers(self, layers: Layers | None) -> None:
        """Let `layers` do what Hugging Face's forward does for forward_block; None: undo that."""
        self._layers = layers

    @property
    def module(self) -> torch.nn.Module:
        """The Hugging Face model, for kernel swaps (accel/)."""
        return self._hf

    @property
    def config(self) -> Any:
        return self._hf.config

    @property
    def device(self) -> torch.device:
        return self._hf.device

    @property
    def dtype(self) -> torch.dtype:
        return self._hf.dtype

    @property
    def vocab_size(self) -> int:
        return self._embedding.weight.shape[0]

    @property
    def context_length(self) -> int:
        return self.config.max_position_embeddings

    def new_cache(self, slots: int) -> SlotCache:
        config = self.config
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return SlotCache(
            layers=config.num_hidden_layers,
            slots=slots,
            kv_heads=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
            head_dim=head_dim,
            dtype=self.dtype,
            device=self.device,
            by_dimension=reads_keys_by_dimension(self.device, self.dtype),
        )

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """[..] token ids -> [.., H], by the model's own module (some scale inside)."""
        return self._embedding(ids)

    @torch.inference_mode()
    def embedding_moments(self) -> tuple[torch.Tensor, torch.Tensor]:
        """[H], [H]: mean and standard deviation of each dimension over the embeddings of the whole vocabulary."""
        total = square = torch.zeros((), dtype=torch.float64, device=self.device)
        for ids in torch.arange(self.vocab_size, device=self.device).split(4096):
            embeds = self.embed(ids).double()
            total, square = total + embeds.sum(0), square + embeds.square().sum(0)
        mean = total / self.vocab_size
        return mean, (square / self.vocab_size - mean.square()).clamp(min=0).sqrt()

    def forward_block(self, cache: SlotCache, block: Block, embeds: torch.Tensor) -> torch.Tensor:
        """[R, H] -> hidden states [R, H] of the block's rows, whose KV is written behind their slots' contexts."""
        if self._layers is not None:
            return self._layers(embeds, self._begun(cache, block), block, self._attend)
        return self._run(cache, block, embeds).last_hidden_state[0]

    def forward_layers(self, cache: SlotCache, block: Block, embeds: torch.Tensor) -> torch.Tensor:
        """[R, H] -> [layers + 1, R, H]: what goes into the first layer, what each layer gives, and in the last one's
        place what forward_block does, as in Hugging Face's output_hidden_states."""
        return torch.cat(self._run(cache, block, embeds, output_hidden_states=True).hidden_states)

    def _run(self, cache: SlotCache, block: Block, embeds: torch.Tensor, **also: bool) -> Any:
        seen = self._begun(cache, block)
        return self._backbone(
            inputs_embeds=embeds[None], position_ids=block.positions, cache=seen, use_cache=True, block=block, **also
        )

    def _begun(self, cache: SlotCache, block: Block) -> KeyValues:
        cache.begin(block)
        return _FiniteCache(cache) if self.dtype is torch.float16 else cache

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[R, H] -> [R, V], with all that the model does after its lm_head."""
        return self._after_head(self._hf.get_output_embeddings()(hidden))

    @contextmanager
    def stock(self) -> Iterator[Any]:
        """The untouched Hugging Face model with its own attention, for the reference.

        Its SDPA does not have the soft-cap; its eager attention does.
        """
        capped = getattr(self.config, "attn_logit_softcapping", None) is not None
        self._hf.set_attn_implementation("eager" if capped else "sdpa")
        try:
            yield self._hf
        finally:
            self._hf.set_attn_implementation(ATTENTION_NAME)

    @contextmanager
    def attention_within(self, wrap: Callable[[Attend], Attend]) -> Iterator[None]:
        """Run wrap(tree attention) in its place."""
        name, before = f"{ATTENTION_NAME}_wrapped", (self.config._attn_implementation, self._attend)
        self._attend = wrap(tree_attention)
        AttentionInterface.register(name, self._attend)
        self._hf.set_attn_implementation(name)
        try:
            yield
        finally:
            AttentionInterface.register(name, tree_attention)  # the registry would keep what `wrap` holds
            implementation, self._attend = before
            self._hf.set_attn_implementation(implementation)
