"""Packing is reversible, aligned, deterministic, and refuses what the wire cannot carry."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from actors.weight_packing import (
    ALIGNMENT_BYTES,
    bucket_starts,
    checksum,
    pack,
    tensor_view,
    unpack,
)
from actors.weights import DTYPES, TensorEntry
from correction.errors import InputError

SHAPES = st.lists(st.integers(0, 9), min_size=0, max_size=3).map(tuple)
SPECS = st.lists(st.tuples(SHAPES, st.sampled_from(DTYPES)), min_size=1, max_size=12)


def tensors_of(specs: list[tuple[tuple[int, ...], str]]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return {
        f"layer.{number}.weight": torch.randn(shape, generator=generator).to(getattr(torch, dtype))
        for number, (shape, dtype) in enumerate(specs)
    }


@given(specs=SPECS, bucket_bytes=st.integers(ALIGNMENT_BYTES, 2000))
def test_unpack_gives_back_every_tensor_bit_for_bit(
    specs: list[tuple[tuple[int, ...], str]], bucket_bytes: int
) -> None:
    tensors = tensors_of(specs)
    packed = pack(tensors.items(), bucket_bytes)
    back = unpack(packed.buckets, packed.entries)
    assert list(back) == list(tensors)
    for name, tensor in tensors.items():
        assert back[name].dtype == tensor.dtype
        assert torch.equal(back[name], tensor)


@given(specs=SPECS, bucket_bytes=st.integers(ALIGNMENT_BYTES, 2000))
def test_tensors_are_aligned_disjoint_and_inside_their_bucket(
    specs: list[tuple[tuple[int, ...], str]], bucket_bytes: int
) -> None:
    packed = pack(tensors_of(specs).items(), bucket_bytes)
    ends = [0] * len(packed.buckets)
    for entry in packed.entries:
        assert entry.offset_bytes % ALIGNMENT_BYTES == 0
        assert entry.offset_bytes >= ends[entry.bucket]
        ends[entry.bucket] = entry.offset_bytes + entry.size_bytes
    for bucket, end in zip(packed.buckets, ends, strict=True):
        assert end <= bucket.nbytes <= max(bucket_bytes, end) + ALIGNMENT_BYTES
        assert bucket.nbytes % ALIGNMENT_BYTES == 0


def test_large_tensor_gets_a_bucket_of_its_own() -> None:
    sizes = {"small": 10, "large": 1000, "next": 10}
    packed = pack([(name, torch.ones(size)) for name, size in sizes.items()], bucket_bytes=256)
    assert [entry.bucket for entry in packed.entries] == [0, 1, 2]


def test_equal_weights_give_equal_checksums_also_in_reused_memory() -> None:
    tensors = tensors_of([((3,), "bfloat16"), ((5, 7), "float32")])
    first = pack(tensors.items(), 128)
    dirty = tuple(np.full_like(bucket, 255) for bucket in first.buckets)
    second = pack(tensors.items(), 128, reuse=dirty)
    assert second.checksums == first.checksums
    assert all(a is b for a, b in zip(second.buckets, dirty, strict=True))


def test_one_flipped_bit_changes_the_checksum() -> None:
    (bucket,), _, (digest,) = pack([("w", torch.ones(64))], 1024)
    bucket[17] ^= 1
    assert checksum(bucket) != digest


def test_non_contiguous_tensor_is_packed_by_value() -> None:
    tensor = torch.arange(12.0).view(3, 4).t()
    packed = pack([("w", tensor)], 1024)
    assert torch.equal(unpack(packed.buckets, packed.entries)["w"], tensor)


def test_source_is_consumed_lazily_one_bucket_at_a_time() -> None:
    alive: list[torch.Tensor] = []
    freed: list[int] = []

    def source() -> object:
        for number in range(6):
            tensor = torch.full((16,), float(number))
            yield f"w{number}", tensor
            alive.append(tensor)
            freed.append(len(alive))

    packed = pack(source(), bucket_bytes=64)  # type: ignore[arg-type]
    assert len(packed.buckets) == 6
    assert freed == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64, torch.bool])
def test_dtype_outside_the_contract_is_refused_by_name(dtype: torch.dtype) -> None:
    with pytest.raises(InputError, match=r"head\.weight"):
        pack([("head.weight", torch.zeros(3, dtype=dtype))], 1024)


def test_duplicate_name_and_empty_source_are_refused() -> None:
    with pytest.raises(InputError, match="twice"):
        pack([("w", torch.ones(1)), ("w", torch.ones(1))], 1024)
    with pytest.raises(InputError, match="no tensors"):
        pack([], 1024)
    with pytest.raises(InputError, match="bucket_bytes"):
        pack([("w", torch.ones(1))], 0)


@pytest.mark.parametrize(
    "entry",
    [
        TensorEntry("w", "float32", (4,), 0, 0, 12),  # size contradicts the shape
        TensorEntry("w", "float32", (4,), 0, 2, 16),  # misaligned
        TensorEntry("w", "float32", (4,), 0, -4, 16),
        TensorEntry("w", "float32", (4,), 0, 60, 16),  # over the end
        TensorEntry("w", "int64", (2,), 0, 0, 16),
    ],
)
def test_entry_that_lies_is_refused(entry: TensorEntry) -> None:
    with pytest.raises(InputError):
        tensor_view(bytearray(64), entry, 0)


def test_bucket_starts_lie_end_to_end() -> None:
    assert bucket_starts((64, 128, 64)) == (0, 64, 192)
