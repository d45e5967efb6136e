"""Reads a model's configuration, whatever the file.

Part of the models stage. `settings.SETTINGS` says where both kinds of file keep a setting; `gguf_config.py` and
`hf_config.py` add what they say in different ways.
"""

from __future__ import annotations

from abc import abstractmethod
from math import inf, sqrt

from rlx.models.config import Experts, Latent, Layer, ModelConfig, Recurrence, sources
from rlx.models.keys import HEADS, WIDTH, Keys
from rlx.models.rope import Rope
from rlx.models.settings import Settings

#: The sizes that may differ between layers: heads of keys and values, numbers in a head, width of the dense block.
Sizes = tuple[int, int, int]


class Reader(Settings):
    """Reads the configuration of one model.

    Attributes:
        layers, hidden, heads, head_dim: of the model; `head_dim` of layers without a window.
        windows: the window of each layer, or None.
        source: for each layer the one whose keys and values it reads.
        latent: as in `ModelConfig`.
    """

    hidden: int
    heads: int
    head_dim: int
    windows: list[int | None]
    source: list[int]
    latent: Latent | None

    # -- the whole ----------------------------------------------------------------------------------------------------

    def read(self) -> ModelConfig:
        """The configuration; errors as `from_gguf` and `from_hf`."""
        row, keys = self.row, self.keys
        self.refuse()
        blocks = self.integer("layers")
        # MTP blocks come last and are not layers of the model.
        self.layers = blocks - keys.integer("nextn_predict_layers", (0, min(blocks - 1, 64)), 0)
        self.hidden, self.heads = self.integer("hidden"), self.same("heads")
        self.latent = _latent(self) if row.latent else None
        context, self.head_dim = self.integer("context"), self._head_dim()
        experts = self._experts()
        each = self._layers(experts)
        ropes = self.ropes(each, context)
        caps = row.gguf_caps if keys.prefix else (0.0, 0.0)
        return ModelConfig(
            arch=self.arch,
            family=row.runner,
            vocab_size=self.vocab_size(),
            hidden=self.hidden,
            heads=self.heads,
            each=each,
            context=context,
            eps=self.number("eps"),
            activation=self.activation(),
            rope_style=row.gguf_rope if keys.prefix else row.hf_rope,
            rope=ropes[0],
            local_rope=ropes[1],
            attention_scale=self._attention_scale(),
            attention_softcap=self.number("attention_softcap", caps[0]) or None if row.gguf_caps[0] else None,
            logit_softcap=self.number("logit_softcap", caps[1]) or None,
            tied=self.tied(),
            embedding_scale=self.number("embedding_scale", sqrt(self.hidden) if row.scales_embedding else 1.0),
            norm=row.norm,
            norm_offset=0.0 if keys.prefix else row.norm_offset,
            plain_norms=() if keys.prefix else row.plain_norms,
            biases=self._biases(experts),
            experts=experts,
            recurrence=self._recurrence(each),
            latent=self.latent,
            per_layer=self.integer("per_layer") if row.shares_kv else 0,
            streams=self.integer("streams") if row.streams else 1,
            bf16=row.bf16,
            stream_scale=keys.flag("altup_correct_scale", True),
            two_way=self.two_way(),
            fused_ffn=row.fused_ffn,
            gated_ffn=row.gated_ffn,
            own=self.own(),
        )

    def _head_dim(self) -> int:
        if self.latent is not None:
            return self.latent.width
        if self.at("head_dim") not in self.keys and self.hidden % self.heads:
            expected = f"a multiple of {self.at('heads')}, which is {self.heads}"
            self.keys.wrong(self.at("hidden"), self.hidden, expected)
        return self.keys.even(self.at("head_dim"), HEADS, self.hidden // self.heads)

    def _attention_scale(self) -> float:
        scale = self.number("attention_scale", self.row.attention_scale or 0.0)
        wide = self.layers == self.row.wide_scale_layers
        usual = self.hidden / self.heads if wide else float(self.head_dim)
        if self.latent is not None:
            usual = float(self.latent.plain + self.latent.rope)
        return scale or float(self.number("query_scalar", usual) ** -0.5)

    def _biases(self, experts: Experts | None) -> tuple[str, ...]:
        """The linear layers that must have a bias: the architecture's, those of its switches, of its router."""
        found = [each for key, names in self.row.hf_biases.items() if self.keys.flag(key, False) for each in names]
        if self.row.router == "either" and experts is not None and experts.router == "sigmoid":
            found.append("exp_probs_b")
        return tuple(dict.fromkeys((*self.row.biases, *found)))

    def _layers(self, experts: Experts | None) -> tuple[Layer, ...]:
        row = self.row
        self.windows, recurrent = self.find_windows(), self.recurrent()
        shared = self.integer("shared_kv", (0, self.layers - 1)) if row.shares_kv else 0
        self.source = sources(self.windows, shared, self.keys.where)
        sparse, has_rope = self.sparse(experts), row.rope_layers(self.keys, self.windows)
        sparsity = self.sparsity() if row.streams else [None] * self.layers
        each = []
        for i, (kv_heads, head_dim, ffn) in enumerate(self.sizes()):
            if self.latent is not None:
                kv_heads, head_dim = 1, self.latent.width
            attends = not recurrent[i] and not (row.single_blocks and not kv_heads)
            if attends and (not kv_heads or self.heads % kv_heads):
                expected = f"a divisor of {self.at('heads')}, which is {self.heads}, for layer {i}"
                self.keys.wrong(self.at("kv_heads"), kv_heads, expected)
            each.append(
                Layer(
                    kv_heads=kv_heads if attends else 0,
                    head_dim=head_dim,
                    ffn=ffn,
                    source=self.source[i],
                    window=self.windows[i],
                    has_rope=has_rope[i],
                    recurrent=recurrent[i],
                    sparse=sparse[i],
                    keys_as_values=self.keys_as_values(i),
                    sparsity=sparsity[i],
                )
            )
        return tuple(each)

    def _experts(self) -> Experts | None:
        must = self.row.experts == "must"
        if self.row.experts == "none" or not self.keys.flag("enable_moe_block", True):
            return None
        count = self.keys.integer(self.at("experts"), (1 if must else 0, 1024), None if must else 0)
        if not count:
            return None
        used, ffn = self.same("experts_used", (1, count)), self.same("expert_ffn")
        router = self.router()
        groups, kept = _groups(self, count, used, router)
        if must and self.at("expert_ffn") == "feed_forward_length":
            ffn //= used
        return Experts(
            count,
            used,
            ffn,
            self._shared_ffn(ffn),
            shared_gate=self.row.shared_expert == "gated",
            normalize=self.keys.flag(self.at("normalize"), True),
            scale=self.number("expert_scale", 0.0) or 1.0,
            router=router,
            in_turns=self.row.in_turns,
            groups=groups,
            kept=kept,
        )

    def _shared_ffn(self, ffn: int) -> int:
        """The width of the expert that every token uses: its own, or that of several experts beside one another."""
        kind = self.row.shared_expert
        if kind == "gated" or (kind == "may" and self.at("shared_ffn") in self.keys):
            return self.same("shared_ffn", (int(kind == "gated"), WIDTH[1]))
        return ffn * self.integer("shared_experts") if kind == "may" else 0

    def _recurrence(self, each: tuple[Layer, ...]) -> Recurrence | None:
        """The sizes of the recurrent layers."""
        if not any(layer.recurrent for layer in each) or self.row.hybrid == "convolution":
            return None
        heads, groups = self.integer("value_heads"), self.integer("key_heads")
        if heads % groups:
            self.keys.wrong(self.at("value_heads"), heads, f"a multiple of {self.at('key_heads')}, which is {groups}")
        return Recurrence(
            groups,
            heads,
            self.integer("key_dim"),
            self.value_dim(heads),
            self.integer("taps"),
            self.row.gguf_heads if self.keys.prefix else "grouped",
            log_decay=not self.keys.prefix,
            corrects=self.row.hybrid == "delta rule",
            steps=self._steps(),
        )

    def _steps(self) -> tuple[float, float]:
        """The limits of time steps; for infinity there is an object."""
        key = "time_step_limit"
        limits = self.keys.get(key, [0.0, inf])
        if isinstance(limits, list):
            limits = [inf if each == {"__float__": "Infinity"} else each for each in limits]
        low, high = Keys({key: limits}, self.keys.where).elements(key, lambda each: each.number(key, (0.0, inf)), 2)
        if low > high:
            self.keys.wrong(key, [low, high], "the shortest time step, then the longest")
        return low, high

    def sparse(self, experts: Experts | None) -> list[bool]:
        """Which layers have experts."""
        if experts is None:
            return [False] * self.layers
        first, step = self.integer("dense_layers"), self.integer("expert_step")
        return [layer >= first and (layer + 1) % step == 0 for layer in range(self.layers)]

    def widths(self) -> tuple[int, ...]:
        """The width of each layer's dense block; a model with experts in every layer may have none."""
        must = self.row.experts == "must"
        allowed = (0 if must or self.row.single_blocks else WIDTH[0], WIDTH[1])
        return self.keys.integers(self.at("ffn"), allowed, self.layers, 0 if must else None)

    # -- what the two kinds of file say in different ways --------------------------------------------------------------

    @abstractmethod
    def refuse(self) -> None:
        """Raises `UnsupportedModelError` for keys that change the computation in a way that rlx does not support."""

    @abstractmethod
    def vocab_size(self) -> int: ...
    @abstractmethod
    def tied(self) -> bool: ...
    @abstractmethod
    def activation(self) -> str: ...
    @abstractmethod
    def router(self) -> str: ...
    @abstractmethod
    def two_way(self) -> str: ...
    @abstractmethod
    def find_windows(self) -> list[int | None]: ...
    @abstractmethod
    def recurrent(self) -> list[bool]: ...
    @abstractmethod
    def value_dim(self, heads: int) -> int: ...
    @abstractmethod
    def sparsity(self) -> list[float | None]: ...
    @abstractmethod
    def sizes(self) -> list[Sizes]: ...
    @abstractmethod
    def keys_as_values(self, layer: int) -> bool: ...
    @abstractmethod
    def ropes(self, each: tuple[Layer, ...], context: int) -> tuple[Rope, Rope | None]: ...


def _latent(found: Settings) -> Latent:
    """The sizes of latent attention; GGUF has those of whole heads, checkpoints those of their parts."""
    keys, rope = found.integer("latent_keys"), found.keys.even(found.at("latent_rope"), HEADS)
    plain = found.integer("latent_head") - rope if found.keys.prefix else found.integer("latent_plain")
    if plain < 1:
        found.keys.wrong(found.at("latent_head"), plain + rope, f"more than {found.at('latent_rope')}, which is {rope}")
    return Latent(keys, rope, plain, found.integer("latent_values"), found.integer("latent_queries"))


def _groups(found: Settings, count: int, used: int, router: str) -> tuple[int, int]:
    """The groups of experts, and how many of them are searched for the used ones."""
    groups, kept = found.integer("expert_groups"), found.integer("kept_groups")
    if router != "sigmoid":
        found.keys.require(found.at("expert_groups"), 1, "experts in groups are only supported with a sigmoid router")
    if count % groups or (groups > 1 and count // groups < 2):
        found.keys.wrong(found.at("expert_groups"), groups, f"a divisor of {found.at('experts')}, which is {count}")
    least = -(-used * groups // count)
    if groups > 1 and not least <= kept <= groups:
        found.keys.wrong(found.at("kept_groups"), kept, f"from {least} to {groups}, of {groups} groups of experts")
    return groups, kept
