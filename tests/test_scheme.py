"""Scheme: closed sets, immutability, arithmetic and a dictionary form that evaluates nothing."""

from __future__ import annotations

import dataclasses
import itertools
import json

import pytest
import torch

from sparse_marlin import Scheme

FIELDS = {
    "num_bits": (4, 8),
    "group_size": (-1, 32, 64, 128),
    "sparsity": (None, "2:4"),
    "symmetric": (True, False),
    "dtype": (torch.float16, torch.bfloat16, torch.float32),
}
LEGAL = [
    dict(zip(FIELDS, values, strict=True))
    for values in itertools.product(*FIELDS.values())
    if not (values[2] == "2:4" and values[3] is False)
]


@pytest.mark.parametrize("fields", LEGAL, ids=lambda f: "-".join(map(str, f.values())))
def test_every_legal_scheme_survives_json(fields: dict) -> None:
    scheme = Scheme(**fields)
    text = json.dumps(scheme.to_dict())
    assert Scheme.from_dict(json.loads(text)) == scheme
    assert hash(Scheme.from_dict(json.loads(text))) == hash(scheme)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("num_bits", v) for v in (0, 1, 2, 3, 5, 16, -4, True, False, 4.0, "4", None, [4], torch.tensor(4))),
        *(("group_size", v) for v in (0, 1, 16, 256, -2, True, 128.0, -1.0, "128", None, [128])),
        *(("sparsity", v) for v in ("", "4:8", "1:2", "2:4 ", "dense", 0, 2, True, False, ("2:4",), {})),
        *(("symmetric", v) for v in (1, 0, None, "yes", "False", 1.0)),
        *(("dtype", v) for v in (torch.float64, torch.int8, torch.float8_e4m3fn, "float16", float, None)),
    ],
    ids=repr,
)
def test_values_outside_the_closed_sets_are_refused(field: str, value: object) -> None:
    name = field.removeprefix("num_")
    with pytest.raises(ValueError, match=name):
        Scheme(**{"sparsity": None, field: value})  # type: ignore[arg-type]


def test_an_error_names_the_choices_and_the_value() -> None:
    with pytest.raises(ValueError, match=r"group_size.*-1.*32.*64.*128.*48"):
        Scheme(group_size=48)
    with pytest.raises(ValueError, match="float16, bfloat16, float32"):
        Scheme(dtype=torch.float64)


def test_an_asymmetric_sparse_scheme_is_refused() -> None:
    with pytest.raises(ValueError, match="symmetric"):
        Scheme(symmetric=False)
    with pytest.raises(ValueError, match="symmetric"):
        dataclasses.replace(Scheme(sparsity=None, symmetric=False), sparsity="2:4")


def test_a_scheme_is_frozen() -> None:
    scheme = Scheme()
    for field in FIELDS:
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(scheme, field, getattr(scheme, field))


@pytest.mark.parametrize("num_bits", [4, 8])
def test_codes(num_bits: int) -> None:
    scheme = Scheme(num_bits)
    assert (scheme.zero_code, scheme.max_code) == {4: (8, 15), 8: (128, 255)}[num_bits]


@pytest.mark.parametrize("group_size", FIELDS["group_size"])
@pytest.mark.parametrize("k", [1, 4, 31, 32, 48, 64, 96, 128, 576, 1000, 7392, 8256, 11008, 28672])
def test_fit_takes_the_largest_group_that_divides(k: int, group_size: int) -> None:
    fitted = Scheme(8, group_size, None, False, torch.bfloat16).fit(k)
    dividing = [g for g in (32, 64, 128) if g <= group_size and k % g == 0]
    assert fitted == Scheme(8, max(dividing, default=-1), None, False, torch.bfloat16)
    assert fitted.why_not(16, k) is None
    width = fitted.group_width(k)
    assert width * fitted.num_groups(k) == k
    assert width == (k if fitted.group_size == -1 else fitted.group_size)


@pytest.mark.parametrize("scheme", [Scheme(**f) for f in LEGAL if f["dtype"] is torch.float16], ids=str)
def test_why_not(scheme: Scheme) -> None:
    for k in (0, 1, 2, 3, 4, 6, 30, 32, 34, 60, 64, 100, 128, 192, 7392):
        whole_quads = not scheme.sparsity or k % 4 == 0
        whole_groups = scheme.group_size == -1 or k % scheme.group_size == 0
        reason = scheme.why_not(5, k)
        assert (reason is None) == (k > 0 and whole_quads and whole_groups), k
        assert reason is None or str(k) in reason
    assert scheme.why_not(0, 128) is not None


def test_why_not_says_what_to_do() -> None:
    assert "skip=" in str(Scheme().why_not(8, 4098))
    assert "group_size=64 would fit" in str(Scheme().why_not(8, 576))
    assert "group_size=32 would fit" in str(Scheme().why_not(8, 7392))
    assert "group_size=-1 would fit" in str(Scheme().why_not(8, 100))


@pytest.mark.parametrize(
    ("scheme", "k", "bits"),
    [
        (Scheme(), 4096, 3 + 16 / 128),
        (Scheme(sparsity=None), 4096, 4 + 16 / 128),
        (Scheme(8), 4096, 5 + 16 / 128),
        (Scheme(8, -1, None), 4096, 8 + 16 / 4096),
        (Scheme(4, 32, None, False, torch.bfloat16), 4096, 4 + 24 / 32),
        (Scheme(4, -1, "2:4", True, torch.float32), 64, 3 + 32 / 64),
    ],
    ids=str,
)
def test_bits_per_weight(scheme: Scheme, k: int, bits: float) -> None:
    assert scheme.bits_per_weight(k) == bits


GOOD = Scheme().to_dict()


@pytest.mark.parametrize(
    "hostile",
    [
        None,
        [],
        "2:4",
        {},
        {k: v for k, v in GOOD.items() if k != "symmetric"},
        {**GOOD, "extra": 1},
        {**GOOD, 1: 2},
        {**GOOD, "num_bits": True},
        {**GOOD, "num_bits": "4"},
        {**GOOD, "num_bits": 4.0},
        {**GOOD, "num_bits": [4]},
        {**GOOD, "group_size": None},
        {**GOOD, "group_size": 10**30},
        {**GOOD, "sparsity": {"2:4": 1}},
        {**GOOD, "sparsity": ""},
        {**GOOD, "symmetric": 1},
        {**GOOD, "symmetric": "true"},
        {**GOOD, "symmetric": None},
        {**GOOD, "symmetric": False},
        {**GOOD, "dtype": torch.float16},
        {**GOOD, "dtype": "torch.float16"},
        {**GOOD, "dtype": "load"},
        {**GOOD, "dtype": "float16; raise SystemExit"},
        {**GOOD, "dtype": "__class__"},
        {**GOOD, "dtype": None},
        {**GOOD, "dtype": ["float16"]},
    ],
    ids=repr,
)
def test_a_hostile_dictionary_is_refused(hostile: object) -> None:
    with pytest.raises(ValueError):
        Scheme.from_dict(hostile)  # type: ignore[arg-type]


def test_str_names_what_differs() -> None:
    assert len({str(Scheme(**f)) for f in LEGAL}) == len(LEGAL) // 3  # everything but the dtype
    assert "2:4" in str(Scheme()) and "INT4" in str(Scheme()) and "128" in str(Scheme())
