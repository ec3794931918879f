"""Checkpoints of other tools: each decodes to exactly the weights that its tool makes of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import fixtures
import pytest
import torch
from torch import Tensor, nn

import sparse_marlin
from sparse_marlin import CompressedLinear, Scheme
from sparse_marlin.checkpoints import CheckpointError, describe, is_checkpoint, words
from sparse_marlin.checkpoints.compressed_tensors import from_pack_quantized, to_pack_quantized
from sparse_marlin.checkpoints.gptq import from_gptq
from sparse_marlin.cli import main
from sparse_marlin.packed import PackedWeight

FORMATS = {"gptq": "gptq", "awq": "awq", "ct": "compressed-tensors", "llmc": "compressed-tensors", "marlin": "marlin"}


@pytest.mark.parametrize("name", fixtures.ALL)
def test_weights_are_those_of_the_tool(name: str) -> None:
    expected = fixtures.reference(name)["weights"]
    path = fixtures.DATA / name
    assert is_checkpoint(path)
    assert describe(path).format == FORMATS[name.partition("-")[0]]
    model = sparse_marlin.load(path)
    assert fixtures.digests(model, expected) == {layer: e["sha256"] for layer, e in expected.items()}
    compressed = {n for n, m in model.named_modules() if isinstance(m, CompressedLinear)}
    assert compressed == (set() if name in fixtures.FLOATING else set(expected))
    now = getattr(model.config, "quantization_config", {})  # of the tool nothing is left
    assert now.get("quant_method") == ("sparse_marlin" if compressed else None)


@pytest.mark.parametrize("name", fixtures.ALL)
def test_logits_are_those_of_the_tool(name: str) -> None:
    reference = fixtures.reference(name)
    dtypes = {layer: getattr(torch, e["dtype"]) for layer, e in reference["weights"].items()}
    model = sparse_marlin.load(fixtures.DATA / name, dtype=torch.float32)
    expected = torch.tensor(reference["logits"])
    with torch.no_grad():
        own = model(fixtures.TOKENS).logits[0]
        torch.testing.assert_close(fixtures.twin(model, dtypes)(fixtures.TOKENS).logits[0], expected, rtol=0, atol=1e-4)
    # In float32 a weight is integer times scale, which the tool has rounded once more.
    assert float((own - expected).norm() / expected.norm()) < 0.02


@pytest.mark.parametrize("name", fixtures.ALL)
def test_schemes_are_known_from_the_headers(name: str) -> None:
    planned = describe(fixtures.DATA / name).layers
    model = sparse_marlin.load(fixtures.DATA / name)
    for layer, stored in planned.items():
        m = model.get_submodule(layer)
        if stored.scheme is None:
            assert type(m) is nn.Linear
        else:
            found = m.scheme
            # Zeros and zero points are seen in the values only: 2:4 and symmetric are found later.
            assert (found.num_bits, found.group_size, found.dtype) == (
                stored.scheme.num_bits,
                stored.scheme.group_size,
                stored.scheme.dtype,
            )


@pytest.mark.parametrize("name", ["ct-marlin-24", "ct-marlin-24-channel", "marlin-24", "ct-pack-24"])
def test_2_4_is_kept(name: str) -> None:
    model = sparse_marlin.load(fixtures.DATA / name)
    schemes = [m.scheme for m in model.modules() if isinstance(m, CompressedLinear)]
    assert schemes
    assert {s.sparsity for s in schemes} == {"2:4"}


@pytest.mark.parametrize("name", fixtures.FLOATING)
def test_floating_point_2_4_stays_as_it_is(name: str) -> None:
    model = sparse_marlin.load(fixtures.DATA / name)
    for layer in fixtures.reference(name)["weights"]:
        weight = model.get_submodule(layer).weight
        assert int(weight.view(-1, 4).count_nonzero(dim=1).max()) == 2


def test_tokens_of_marlin_24_are_those_of_the_dequantized_twin() -> None:
    path = fixtures.DATA / "ct-marlin-24"
    model: Any = sparse_marlin.load(path, dtype=torch.float32)
    layers = dict.fromkeys(fixtures.reference("ct-marlin-24")["weights"], torch.float32)
    twin: Any = fixtures.twin(sparse_marlin.load(path, dtype=torch.float32), layers)
    options = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    prompts = torch.arange(8).view(4, 2)
    assert torch.equal(model.generate(prompts, **options), twin.generate(prompts, **options))


def test_plain_checkpoint(tmp_path: Path) -> None:
    """A dense checkpoint without any block loads, and one with a block that says nothing."""
    path = fixtures.copy("ct-dense-24", tmp_path / "m")
    for edit in (
        lambda c: c.pop("quantization_config"),
        lambda c: c.update(sparsity_config={"format": "dense", "sparsity_structure": "2:4"}),
        lambda c: c.update(compression_config=c.pop("sparsity_config")),
    ):
        fixtures.edit_config(path, edit)
        expected = fixtures.reference("ct-dense-24")["weights"]
        assert fixtures.digests(sparse_marlin.load(path), expected) == {n: e["sha256"] for n, e in expected.items()}
    fixtures.edit_config(path, lambda c: c.pop("compression_config"))
    assert describe(path).format == "plain"
    assert not is_checkpoint(path), "transformers may load it"


@pytest.mark.parametrize("name", fixtures.ALL)
def test_inspect(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(fixtures.DATA / name)]) == 0
    out = capsys.readouterr().out
    assert f"format: {FORMATS[name.partition('-')[0]]}" in out
    assert ("model.layers.*.mlp.down_proj" in out) == (name != "ct-dense-24")


def test_unsupported_bits_say_what_to_do() -> None:
    with pytest.raises(CheckpointError, match=r"gptq-3bit/config.json: 3-bit weights .*sparse-marlin compress"):
        sparse_marlin.load(fixtures.DATA / "gptq-3bit")


# ------------------------------------------------------------------------------------------- what older tools did


@pytest.mark.parametrize(("name", "file"), [("gptq-v1", "quantize_config.json"), ("awq", "quant_config.json")])
def test_config_in_a_file_of_its_own(name: str, file: str, tmp_path: Path) -> None:
    path = fixtures.copy(name, tmp_path / "m")

    def edit(config: dict[str, Any]) -> None:
        block = config.pop("quantization_config")
        del block["quant_method"]
        if name == "awq":
            block["w_bit"], block["q_group_size"] = block.pop("bits"), block.pop("group_size")
        (path / file).write_text(json.dumps(block))

    fixtures.edit_config(path, edit)
    (path / "model.safetensors").rename(path / "gptq_model-4bit-128g.safetensors")
    expected = fixtures.reference(name)["weights"]
    assert fixtures.digests(sparse_marlin.load(path), expected) == {n: e["sha256"] for n, e in expected.items()}


def test_biases_of_zeros_and_stored_buffers_are_dropped(tmp_path: Path) -> None:
    path = fixtures.copy("gptq-v1", tmp_path / "m")
    fixtures.edit_config(path, lambda c: c.update(torch_dtype=c.pop("dtype")))
    bias = "model.layers.0.mlp.up_proj.bias"
    extra = {bias: torch.zeros(256).half(), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.rand(16)}
    fixtures.edit_tensors(path, lambda t: t.update(extra))
    assert sparse_marlin.load(path).get_submodule("model.layers.0.mlp.up_proj").bias is None
    fixtures.edit_tensors(path, lambda t: t[bias].fill_(1e-3))
    with pytest.raises(CheckpointError, match=f"model.safetensors: tensor {bias} is not zero"):
        sparse_marlin.load(path)


def test_zero_points_before_they_were_packed(tmp_path: Path) -> None:
    path = fixtures.copy("ct-pack", tmp_path / "m")

    def edit(tensors: dict[str, Tensor]) -> None:
        for name in list(tensors):
            if name.endswith("weight_zero_point"):
                n = tensors[name.replace("zero_point", "scale")].shape[0]
                zeros = words.unpack_words(tensors[name].t(), 4)[:, :n].t()
                tensors[name] = (zeros.short() - 8).to(torch.int8)

    fixtures.edit_tensors(path, edit)
    expected = fixtures.reference("ct-pack")["weights"]
    assert fixtures.digests(sparse_marlin.load(path), expected) == {n: e["sha256"] for n, e in expected.items()}


def test_gptq_zero_point_of_zero_borrows_from_its_neighbour() -> None:
    """Version 1 subtracts one from a whole word, and readers add it to a whole word."""
    zeros = torch.tensor([[0, 3, 15, 0, 0, 8, 1, 0]], dtype=torch.uint8)
    word = sum(int(z) << 4 * i for i, z in enumerate(zeros[0])) - 0x11111111
    stored = {
        "qweight": torch.randint(-(1 << 31), 1 << 31, (4, 8)).int(),
        "qzeros": torch.tensor([[(word + (1 << 31)) % (1 << 32) - (1 << 31)]], dtype=torch.int32),
        "scales": torch.ones(1, 8).half(),
        "g_idx": torch.zeros(32, dtype=torch.int32),
    }
    packed = from_gptq(stored, 4, -1, minus_one=True)
    assert packed.zero_point is not None
    assert torch.equal(packed.zero_point.t(), zeros)


# ------------------------------------------------------------------------------------------------ sizes of groups


@pytest.mark.parametrize(
    ("columns", "group", "expected"),
    [
        (512, 128, 128),
        (512, 256, 128),
        (512, 512, -1),
        (512, 1024, -1),
        (512, -1, -1),
        (576, 128, 64),
        (576, 192, 64),
        (96, 64, 32),
        (512, 32, 32),
    ],
)
def test_groups_of_other_sizes_are_held_exactly(columns: int, group: int, expected: int) -> None:
    assert words.canonical_group(columns, group) == expected
    groups = words.num_groups(columns, group)
    codes = torch.randint(0, 16, (5, columns), dtype=torch.uint8)
    scales, zeros = torch.rand(5, groups), torch.randint(0, 16, (5, groups), dtype=torch.uint8)
    packed = words.canonical(codes[:, ::2] | codes[:, 1::2] << 4, scales, columns, 4, group, zeros)
    which = torch.arange(columns) // (columns if group == -1 else group)
    assert torch.equal(packed.dequantize(), (codes.float() - zeros[:, which]) * scales[:, which])
    if group > 0 and columns % group == 0:
        g_idx = which[torch.randperm(columns)]
        packed = words.canonical(codes[:, ::2] | codes[:, 1::2] << 4, scales, columns, 4, group, zeros, g_idx)
        packed.check_indices()
        assert torch.equal(packed.dequantize(), (codes.float() - zeros[:, g_idx]) * scales[:, g_idx])


@pytest.mark.parametrize(("columns", "group"), [(512, 16), (512, 48), (100, 64), (80, 32)])
def test_groups_that_cannot_be_held(columns: int, group: int) -> None:
    with pytest.raises(ValueError, match=rf"groups of {group} columns in rows of {columns} .*32, 64, 128"):
        words.canonical_group(columns, group)


def test_2_4_is_found_in_dense_weights() -> None:
    codes = torch.randint(0, 16, (40, 64), dtype=torch.uint8)
    quads = codes.view(-1, 4)
    quads.scatter_(1, torch.rand(quads.shape).argsort(1)[:, :2], 8)
    quads[:5] = 8
    scheme = Scheme(4, 32, None)
    packed = PackedWeight.pack(codes, torch.randn(40, 2), scheme)
    kept = words.keep_24(packed)
    assert kept.scheme == Scheme(4, 32, "2:4")
    assert torch.equal(kept.dequantize(), packed.dequantize())
    codes[39, 60:] = torch.tensor([1, 2, 3, 8])
    assert words.keep_24(PackedWeight.pack(codes, torch.randn(40, 2), scheme)).scheme == scheme


# -------------------------------------------------------------------------------------------------------- export


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("n", "k"), [(7, 36), (64, 128), (9, 12)])
@pytest.mark.parametrize("kind", ["2:4", "dense", "asymmetric"])
def test_pack_quantized_round_trip(bits: int, n: int, k: int, kind: str) -> None:
    scheme = Scheme(bits, -1, "2:4" if kind == "2:4" else None, kind != "asymmetric")
    mask = torch.rand(n, k // 4, 4).argsort(-1).lt(2).view(n, k) if kind == "2:4" else None
    codes = torch.randint(0, 1 << bits, (n, k), dtype=torch.uint8)
    zeros = torch.randint(0, 1 << bits, (n, 1), dtype=torch.uint8) if kind == "asymmetric" else None
    packed = PackedWeight.pack(codes, torch.rand(n, 1), scheme, mask, zeros)
    stored = to_pack_quantized(packed)
    assert stored["weight_packed"].shape == (n, -(-k * bits // 32))
    again = from_pack_quantized(stored, n, k, bits, -1)
    assert torch.equal(again.dequantize(), packed.dequantize())
    if kind == "2:4":
        again = words.keep_24(again)
        assert again.scheme == scheme


def test_act_order_is_not_exported() -> None:
    scheme = Scheme(4, 32, None)
    codes = torch.randint(0, 16, (8, 64), dtype=torch.uint8)
    g_idx = (torch.randperm(64) // 32).int()
    with pytest.raises(ValueError, match=r"g_idx.*convert to sparse-marlin"):
        to_pack_quantized(PackedWeight.pack(codes, torch.rand(8, 2), scheme, g_idx=g_idx))
