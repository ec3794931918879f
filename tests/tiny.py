"""Models small enough that compressing one takes a fraction of a second."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

VOCABULARY = 256
M = TypeVar("M", bound=nn.Module)


def llama(dtype: torch.dtype = torch.float32, layers: int = 2, **changes: Any) -> LlamaForCausalLM:
    settings = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 128,
        "initializer_range": 0.2,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    torch.manual_seed(7)
    return LlamaForCausalLM(LlamaConfig(**{**settings, **changes})).to(dtype).eval()


def with_biases(model: M) -> M:
    """Biases are zero at first, and would hide mistakes."""
    for name, p in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(p)
    return model.eval()


def opt() -> OPTForCausalLM:
    """Biases everywhere, positions from a table of 32, tied embeddings."""
    torch.manual_seed(7)
    config = OPTConfig(
        hidden_size=64,
        ffn_dim=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=VOCABULARY,
        max_position_embeddings=32,
        word_embed_proj_dim=64,
        init_std=0.2,
    )
    return with_biases(OPTForCausalLM(config))


def neox() -> GPTNeoXForCausalLM:
    """Queries, keys and values of each head in one layer; biases."""
    torch.manual_seed(7)
    config = GPTNeoXConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=VOCABULARY,
        initializer_range=0.2,
    )
    return with_biases(GPTNeoXForCausalLM(config))


def phi3() -> Phi3ForCausalLM:
    """All queries, keys and values in one layer, gate and up in another."""
    torch.manual_seed(7)
    config = Phi3Config(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        initializer_range=0.2,
        pad_token_id=0,
    )
    return Phi3ForCausalLM(config).eval()


def qwen_moe() -> Qwen3MoeForCausalLM:
    torch.manual_seed(7)
    config = Qwen3MoeConfig(
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        vocab_size=VOCABULARY,
        initializer_range=0.2,
    )
    return Qwen3MoeForCausalLM(config).eval()


def gpt2() -> GPT2LMHeadModel:
    """Its blocks hold Conv1D, no nn.Linear."""
    torch.manual_seed(7)
    return GPT2LMHeadModel(GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=VOCABULARY, n_positions=64)).eval()


class Expert(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


class ExpertBlock(nn.Module):
    """Sends each token to one of its experts: in turn, or by what the token holds.

    ``idle`` experts get none, by an empty call or by no call.
    """

    def __init__(
        self, width: int, experts: int, idle: tuple[int, ...], empty_calls: bool, by_content: bool = False
    ) -> None:
        super().__init__()
        self.mix = nn.Linear(width, width)
        self.experts = nn.ModuleList(Expert(width) for _ in range(experts))
        self.busy = [i for i in range(experts) if i not in idle]
        self.empty_calls = empty_calls
        self.by_content = by_content

    def forward(self, hidden_states: Tensor) -> Tensor:
        x = hidden_states + self.mix(hidden_states)
        flat, out = x.flatten(0, -2), torch.zeros_like(x.flatten(0, -2))
        ticket = (100 * flat[:, 0]).long() if self.by_content else torch.arange(len(flat))
        choice = torch.tensor(self.busy)[ticket % len(self.busy)]
        for i, expert in enumerate(self.experts):
            rows = (choice == i).nonzero().squeeze(1)
            if len(rows) or self.empty_calls:
                out[rows] = expert(flat[rows])
        return x + out.view_as(x)


class PlainModel(nn.Module):
    """A causal LM that is no Hugging Face model; calls its blocks by keyword."""

    def __init__(self, blocks: list[nn.Module], width: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, input_ids: Tensor, use_cache: bool = False) -> Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(hidden_states=x)
        return self.head(self.norm(x))


def mixture(idle: tuple[int, ...] = (1,), empty_calls: bool = False, by_content: bool = False) -> PlainModel:
    torch.manual_seed(7)
    return PlainModel([ExpertBlock(64, 3, idle, empty_calls, by_content) for _ in range(2)]).eval()


def tokens(batch: int = 8, length: int = 32, seed: int = 3) -> Tensor:
    return torch.randint(0, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


class Tokenizer:
    """One token per character."""

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [ord(c) % VOCABULARY for c in text]}


def blocks_of(model: nn.Module) -> nn.ModuleList:
    """The decoder blocks of the models above."""
    if isinstance(model, OPTForCausalLM):
        return model.model.decoder.layers
    return model.blocks if isinstance(model, PlainModel) else model.model.layers  # type: ignore[union-attr, return-value]


def snapshot(model: nn.Module) -> dict[str, Any]:
    """All that compression could change: tensors, classes, flags, hooks and forwards of every module."""
    tensors = {f"tensor {n}": t.clone() for n, t in model.state_dict().items()}
    modules = {
        f"module {n}": (type(m), m.training, len(m._forward_pre_hooks), len(m._forward_hooks), "forward" in vars(m))
        for n, m in model.named_modules(remove_duplicate=False)
    }
    return {**tensors, **modules}


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal in every bit; NaN is the same as itself."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))


def unchanged(model: nn.Module, before: dict[str, Any]) -> bool:
    after = snapshot(model)
    return after.keys() == before.keys() and all(
        same_bits(a, before[n]) if isinstance(a, Tensor) else a == before[n] for n, a in after.items()
    )
