"""`ModelConfig`: what the decoder needs to know about a model, and how it is read from a checkpoint.

A config is checked when it is made, wherever it comes from, so that nothing behind it has to ask again.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from models._untrusted import Fields, shown
from models.errors import CheckpointError
from models.rope import RopeScaling, rope_from_gguf, rope_from_hf

FAMILIES = ("llama", "qwen3", "deepseek", "mistral", "gemma3", "gpt_oss")
SWIGLU_ALPHA, SWIGLU_LIMIT = 1.702, 7.0  # gpt_oss: gate * sigmoid(alpha * gate), both factors cut at the limit
ACTIVATIONS = ("silu", "gelu_tanh", "clamped_swiglu")

# Largest accepted value of each size: far above real models, low enough that arithmetic on a lie stays small.
_CAPS = {
    "vocab_size": 1 << 22,
    "hidden_size": 1 << 17,
    "intermediate_size": 1 << 20,
    "num_layers": 1 << 10,
    "num_heads": 1 << 10,
    "num_kv_heads": 1 << 10,
    "head_dim": 1 << 12,
    "v_head_dim": 1 << 12,
    "max_context_len": 1 << 24,
    "kv_lora_rank": 1 << 14,
    "q_lora_rank": 1 << 14,
    "qk_nope_head_dim": 1 << 12,
    "qk_rope_head_dim": 1 << 12,
    "window": 1 << 24,
    "num_experts": 1 << 12,
    "experts_per_token": 1 << 8,
}
_OPTIONAL = (
    *("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim"),
    *("window", "num_experts", "experts_per_token"),
)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes and switches of one decoder; hashable, so that it can be static data of a jitted function.

    Raises `CheckpointError` when made from values that do not fit together.
    """

    family: str  # one of FAMILIES
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int  # of q and k; under MLA the rotary part alone (= qk_rope_head_dim), as transformers has it
    v_head_dim: int
    rms_norm_eps: float = 1e-6  # of the block norms; MLA's inner norms (q_a, kv_a) always use 1e-6
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    rope_interleaved: bool = False  # pairs (0, 1), (2, 3), ... rotate (MLA); else i and i + head_dim / 2
    tie_word_embeddings: bool = False
    qk_norm: bool = False  # per-head RMS norm of q and k before the rotation (qwen3)
    attention_bias: bool = False  # on q, k, v and o
    mlp_bias: bool = False  # on gate, up and down
    max_context_len: int = 2048  # tokens
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    # MLA only, else None. q_lora_rank None: q is not compressed.
    kv_lora_rank: int | None = None
    q_lora_rank: int | None = None
    qk_nope_head_dim: int | None = None
    qk_rope_head_dim: int | None = None
    # Sliding windows: None and () where every layer sees the whole row.
    window: int | None = None  # tokens that a window layer sees, the newest included
    window_layers: tuple[int, ...] = ()  # ids of the layers that slide, ascending
    window_rope_theta: float | None = None  # of the window layers, without scaling (gemma3); None: as everywhere
    # What single families do differently.
    activation: str = "silu"  # one of ACTIVATIONS; clamped_swiglu is gpt_oss's
    attention_sinks: bool = False  # a learned score per query head that takes part in the softmax, without a value
    attention_softcap: float | None = None  # scores become cap * tanh(score / cap)
    logit_softcap: float | None = None  # the same of the final logits
    query_scalar: float | None = None  # the scale is its inverse root (gemma3); None: of the head size
    embed_scale: float = 1.0  # factor on the embedding (gemma3)
    zero_centred_norms: bool = False  # norms multiply by 1 + weight (gemma3)
    sandwich_norms: bool = False  # attention and MLP results are normed too, before they are added (gemma3)
    num_experts: int | None = None  # None: a dense MLP
    experts_per_token: int | None = None

    @property
    def is_mla(self) -> bool:
        return self.kv_lora_rank is not None

    @property
    def full_layers(self) -> tuple[int, ...]:
        """Ids of the layers that see the whole row."""
        return tuple(i for i in range(self.num_layers) if i not in self.window_layers)

    @property
    def attention_scale(self) -> float:
        """Factor on q . k: the inverse square root of the whole q and k head size, or of what the model names."""
        if self.query_scalar is not None:
            return self.query_scalar**-0.5
        return ((self.qk_nope_head_dim or 0) + self.head_dim) ** -0.5

    def __post_init__(self):
        if self.family not in FAMILIES:
            raise CheckpointError(f"Model family {shown(self.family)} is unknown; {', '.join(FAMILIES)} are built.")
        for name, cap in _CAPS.items():
            value = getattr(self, name)
            if value is None and name in _OPTIONAL:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= cap:
                raise CheckpointError(f"The model's {name} is {shown(value)}; an integer from 1 to {cap} was expected.")
        if self.num_heads % self.num_kv_heads:
            raise CheckpointError(
                f"The model has {self.num_heads} attention heads over {self.num_kv_heads} KV heads; "
                "a whole number of heads per KV head was expected."
            )
        if self.head_dim % 2:
            raise CheckpointError(f"The model's head_dim is {self.head_dim}; rotation needs an even one.")
        if not 0 < self.rms_norm_eps < 1:
            raise CheckpointError(f"The model's rms_norm_eps is {self.rms_norm_eps}; a value in (0, 1) was expected.")
        if not 1 < self.rope_theta <= 1e12:
            raise CheckpointError(f"The model's rope_theta is {self.rope_theta}; a value in (1, 1e12] was expected.")
        factors = self.rope_scaling.factors if self.rope_scaling is not None else ()
        if factors and len(factors) != self.head_dim // 2:
            raise CheckpointError(
                f"The model has {len(factors)} rope factors; head_dim / 2 = {self.head_dim // 2} were expected."
            )
        self._check_mla()
        self._check_window()
        if self.activation not in ACTIVATIONS:
            raise CheckpointError(
                f"Activation {shown(self.activation)} is unknown; {', '.join(ACTIVATIONS)} are built."
            )
        if (self.num_experts is None) != (self.experts_per_token is None):
            raise CheckpointError("A model with experts needs num_experts and experts_per_token, both or neither.")
        if self.num_experts is not None and (self.experts_per_token or 0) > self.num_experts:
            raise CheckpointError(
                f"The model asks for {self.experts_per_token} experts per token of {self.num_experts}; at most as many "
                "as there are were expected."
            )
        tokens = (*self.eos_token_ids, *(() if self.bos_token_id is None else (self.bos_token_id,)))
        for token in tokens:
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < self.vocab_size:
                raise CheckpointError(
                    f"A special token of the model has id {shown(token)}; "
                    f"an integer from 0 to {self.vocab_size - 1} was expected."
                )

    def _check_window(self):
        ids = self.window_layers
        if (self.window is None) != (not ids):
            raise CheckpointError(f"The model has window {self.window} and window layers {ids}; both or neither.")
        if list(ids) != sorted(set(ids)) or not all(0 <= i < self.num_layers for i in ids):
            raise CheckpointError(
                f"The model's window layers are {shown(ids)}; ascending ids below {self.num_layers} were expected."
            )
        if self.window is not None and self.is_mla:
            raise CheckpointError("A deepseek model came with a sliding window; MLA sees the whole row here.")
        positive = (self.attention_softcap, self.logit_softcap, self.query_scalar, self.embed_scale)
        if not all(value is None or 0 < value < 1e6 for value in positive):
            raise CheckpointError(f"The model has soft caps and scales {positive}; values in (0, 1e6) were expected.")
        theta = self.window_rope_theta
        if theta is not None and not 1 < theta <= 1e12:
            raise CheckpointError(f"The model's window rope_theta is {theta}; a value in (1, 1e12] was expected.")

    def _check_mla(self):
        sizes = (self.kv_lora_rank, self.qk_nope_head_dim, self.qk_rope_head_dim)
        if self.family == "deepseek":
            if None in sizes or self.qk_rope_head_dim != self.head_dim or self.num_kv_heads != self.num_heads:
                raise CheckpointError(
                    "A deepseek model needs kv_lora_rank, qk_nope_head_dim and qk_rope_head_dim, with head_dim "
                    f"equal to the latter and a KV head per head; they came as {sizes}, head_dim as {self.head_dim}."
                )
            if self.attention_bias:
                raise CheckpointError("A deepseek model with attention_bias came; MLA is built without biases.")
        elif any(size is not None for size in (*sizes, self.q_lora_rank)):
            raise CheckpointError(f"A {self.family} model came with MLA sizes; they belong to family deepseek.")


# transformers' model_type: (family, architecture class)
_HF_KINDS = {
    "llama": ("llama", "LlamaForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "deepseek_v2": ("deepseek", "DeepseekV2ForCausalLM"),
    "deepseek_v3": ("deepseek", "DeepseekV3ForCausalLM"),
    "mistral": ("mistral", "MistralForCausalLM"),
    "gemma3_text": ("gemma3", "Gemma3ForCausalLM"),
    "gpt_oss": ("gpt_oss", "GptOssForCausalLM"),
}
_HEAD_DIMS = {"qwen3": 128, "gemma3": 256, "gpt_oss": 64}  # of configs that do not say; others divide the hidden size


def from_hf(config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None) -> ModelConfig:
    """The `ModelConfig` of a transformers config.json (and generation_config.json, which may add end tokens)."""
    fields = Fields(config, "config.json")
    model_type = fields.text("model_type")
    architectures = fields.sequence("architectures", [])
    family, architecture = _HF_KINDS.get(model_type, (None, None))
    if family is None or (architectures and architectures != [architecture]):
        raise CheckpointError(
            f"config.json describes model_type {shown(model_type)} with architectures {shown(architectures)}; "
            f"supported are {', '.join(name for _, name in _HF_KINDS.values())}."
        )
    num_layers, num_heads = fields.integer("num_hidden_layers"), fields.integer("num_attention_heads")
    _refuse_hf_features(fields, family, num_layers)

    hidden_size = fields.integer("hidden_size")
    sizes: dict[str, Any] = {}
    if family == "deepseek":
        for name in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"):
            sizes[name] = fields.integer(name)
        sizes["q_lora_rank"] = fields.integer("q_lora_rank", None)
        sizes["head_dim"] = sizes["qk_rope_head_dim"]
        # V2 has no such field and always rotates neighbouring pairs.
        sizes["rope_interleaved"] = fields.flag("rope_interleave", True)
    else:
        default = _HEAD_DIMS.get(family) or _head_dim(hidden_size, num_heads, "config.json")
        sizes["head_dim"] = sizes["v_head_dim"] = fields.integer("head_dim", default)
    if family in _PER_FAMILY:
        sizes |= _PER_FAMILY[family](fields, num_layers, hidden_size)
    theta, scaling, window_theta = rope_from_hf(fields, per_layer=family == "gemma3", yarn=family == "gpt_oss")
    if window_theta is not None:
        sizes["window_rope_theta"] = window_theta
    eos = _hf_eos(config, "config.json")
    if generation_config is not None:
        eos += _hf_eos(generation_config, "generation_config.json")
    return ModelConfig(
        family=family,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_heads if family == "deepseek" else fields.integer("num_key_value_heads", num_heads),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        tie_word_embeddings=fields.flag("tie_word_embeddings", family == "gemma3"),
        qk_norm=family in ("qwen3", "gemma3"),
        attention_bias=fields.flag("attention_bias", family == "gpt_oss"),
        mlp_bias=fields.flag("mlp_bias", False),
        max_context_len=fields.integer("max_position_embeddings", 2048),
        eos_token_ids=tuple(dict.fromkeys(eos)),
        bos_token_id=fields.integer("bos_token_id", None),
        **sizes,
    )


def _window_layers(fields: Fields, num_layers: int, pattern: int) -> dict[str, Any]:
    """window and window_layers. pattern: every so many layers one sees the whole row, where `layer_types` is absent."""
    window = fields.integer("sliding_window", None)
    if window is None:
        return {}
    kinds = fields.sequence("layer_types", [])
    kinds = kinds or ["sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(num_layers)]
    if len(kinds) != num_layers or not set(kinds) <= {"sliding_attention", "full_attention"}:
        raise CheckpointError(
            f"{fields.where} has layer_types {shown(kinds)}; sliding_attention or full_attention was expected for each "
            f"of {num_layers} layers."
        )
    ids = tuple(i for i, kind in enumerate(kinds) if kind == "sliding_attention")
    return {"window": window, "window_layers": ids} if ids else {}


def _mistral(fields: Fields, num_layers: int, hidden_size: int) -> dict[str, Any]:
    return _window_layers(fields, num_layers, num_layers + 1)  # every layer slides


def _gemma3(fields: Fields, num_layers: int, hidden_size: int) -> dict[str, Any]:
    if fields.flag("use_bidirectional_attention", False):
        raise CheckpointError(f"{fields.where} asks for attention in both directions; causal attention is built.")
    return {
        **_window_layers(fields, num_layers, fields.integer("sliding_window_pattern", 6)),
        "activation": "gelu_tanh",
        "attention_softcap": fields.number("attn_logit_softcapping", None),
        "logit_softcap": fields.number("final_logit_softcapping", None),
        "query_scalar": fields.number("query_pre_attn_scalar", 256.0),
        "embed_scale": hidden_size**0.5,
        "zero_centred_norms": True,
        "sandwich_norms": True,
    }


def _gpt_oss(fields: Fields, num_layers: int, hidden_size: int) -> dict[str, Any]:
    alpha, limit = fields.number("swiglu_alpha", SWIGLU_ALPHA), fields.number("swiglu_limit", SWIGLU_LIMIT)
    if (alpha, limit) != (SWIGLU_ALPHA, SWIGLU_LIMIT):
        raise CheckpointError(
            f"{fields.where} has swiglu_alpha {alpha} and swiglu_limit {limit}; {SWIGLU_ALPHA} and {SWIGLU_LIMIT} are "
            "built."
        )
    return {
        **_window_layers(fields, num_layers, 2),
        "activation": "clamped_swiglu",
        "attention_sinks": True,
        "num_experts": fields.integer("num_local_experts", 128),
        "experts_per_token": fields.integer("num_experts_per_tok", 4),
    }


_PER_FAMILY = {"mistral": _mistral, "gemma3": _gemma3, "gpt_oss": _gpt_oss}


def _refuse_hf_features(fields: Fields, family: str, num_layers: int) -> None:
    """Names what would make this decoder compute something else than the checkpoint means."""
    layer_types = [] if family in _PER_FAMILY else fields.sequence("layer_types", [])
    if any(kind != "full_attention" for kind in layer_types) or fields.flag("use_sliding_window", False):
        raise CheckpointError(
            "config.json asks for sliding-window or other attention layers; only full ones are built."
        )
    # Qwen configs carry a window together with the switch that turns it off.
    window = None if family in _PER_FAMILY else fields.integer("sliding_window", None)
    if window is not None and "use_sliding_window" not in fields.values:
        raise CheckpointError("config.json sets sliding_window; only full attention is built.")
    if family == "deepseek" and fields.integer("n_routed_experts", 0) > 0:
        # Absent means 0 in transformers: experts from the first layer on.
        first_dense = fields.integer("first_k_dense_replace", 0)
        if first_dense < num_layers:
            raise CheckpointError(
                f"config.json has experts in layers {first_dense} to {num_layers - 1}; only dense layers are built "
                "(first_k_dense_replace >= num_hidden_layers)."
            )
    name, known = "hidden_act", ("silu", "swish")
    if family == "gemma3":
        name, known = "hidden_activation", ("gelu_pytorch_tanh",)
    activation = fields.text(name, known[0])
    if activation not in known:
        raise CheckpointError(f"config.json has {name} {shown(activation)}; {known[0]} is built.")
    if fields.mapping("quantization_config", None) is not None:
        raise CheckpointError(
            "config.json has a quantization_config; store the weights as float32, float16 or bfloat16."
        )


def _hf_eos(config: Mapping[str, Any], where: str) -> list[int]:
    value = config.get("eos_token_id")
    value = [] if value is None else value if isinstance(value, list) else [value]
    if len(value) > 64 or not all(isinstance(token, int) and not isinstance(token, bool) for token in value):
        raise CheckpointError(f"{where} has eos_token_id {shown(value)}; an id or a list of ids was expected.")
    return value


def from_gguf(metadata: Mapping[str, Any], tensor_names: Collection[str]) -> ModelConfig:
    """The `ModelConfig` of GGUF metadata; the tensor names tell which optional weights the file has."""
    fields = Fields(metadata, "The GGUF metadata")
    family = fields.text("general.architecture")
    if family not in ("llama", "qwen3"):
        raise CheckpointError(f"The GGUF file holds architecture {shown(family)}; llama and qwen3 are supported.")
    if fields.integer(f"{family}.expert_count", 0) > 0:
        raise CheckpointError("The GGUF file holds a model with experts; only dense layers are built.")
    if fields.integer(f"{family}.attention.sliding_window", 0) > 0:
        raise CheckpointError("The GGUF file asks for a sliding window; only full attention is built.")
    hidden_size, num_heads = (
        fields.integer(f"{family}.embedding_length"),
        fields.integer(f"{family}.attention.head_count"),
    )
    head_dim = fields.integer(f"{family}.attention.key_length", None)
    if head_dim is None:
        head_dim = _head_dim(hidden_size, num_heads, "The GGUF metadata")
    rotated = fields.integer(f"{family}.rope.dimension_count", head_dim)
    if rotated != head_dim:
        raise CheckpointError(
            f"The GGUF file rotates {rotated} of {head_dim} dimensions; partial rotation is not built."
        )
    theta, scaling = rope_from_gguf(fields, family)
    tokens = fields.sequence("tokenizer.ggml.tokens", [])
    # Llama 3 ends a turn with a second token, which GGUF names "end of turn".
    ends = [fields.integer(f"tokenizer.ggml.{kind}_token_id", None) for kind in ("eos", "eot")]
    return ModelConfig(
        family=family,
        vocab_size=fields.integer(f"{family}.vocab_size", len(tokens)),
        hidden_size=hidden_size,
        intermediate_size=fields.integer(f"{family}.feed_forward_length"),
        num_layers=fields.integer(f"{family}.block_count"),
        num_heads=num_heads,
        num_kv_heads=fields.integer(f"{family}.attention.head_count_kv", num_heads),
        head_dim=head_dim,
        v_head_dim=fields.integer(f"{family}.attention.value_length", head_dim),
        rms_norm_eps=fields.number(f"{family}.attention.layer_norm_rms_epsilon"),
        rope_theta=theta,
        rope_scaling=scaling,
        tie_word_embeddings="output.weight" not in tensor_names,
        qk_norm=family == "qwen3",
        attention_bias="blk.0.attn_q.bias" in tensor_names,
        mlp_bias="blk.0.ffn_gate.bias" in tensor_names,
        max_context_len=fields.integer(f"{family}.context_length"),
        eos_token_ids=tuple(dict.fromkeys(token for token in ends if token is not None)),
        bos_token_id=fields.integer("tokenizer.ggml.bos_token_id", None),
    )


def _head_dim(hidden_size: int, num_heads: int, where: str) -> int:
    if num_heads < 1 or hidden_size % num_heads:
        raise CheckpointError(
            f"{where} has hidden size {hidden_size} over {num_heads} heads and no head size; a whole one was expected."
        )
    return hidden_size // num_heads
