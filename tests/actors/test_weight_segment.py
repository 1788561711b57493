"""A segment is read whole and unmixed, or refused by name; memory is reused, bounded, released."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterator
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest
import torch

from actors.weight_packing import PackedWeights, pack
from actors.weight_segment import SegmentStore, default_segment_directory, open_segment
from actors.weights import Canary, WeightManifest
from correction.errors import InputError, SwapRefused
from correction.versions import PolicyVersion

RUN = "run-under-test"


def weights_of(
    step: int, size: int = 3000, run_id: str = RUN
) -> tuple[WeightManifest, PackedWeights]:
    generator = torch.Generator().manual_seed(step)
    tensors = {f"w{n}": torch.randn(size + n, generator=generator) for n in range(3)}
    packed = pack(tensors.items(), bucket_bytes=4096)
    manifest = WeightManifest(
        run_id=run_id,
        version=PolicyVersion(0, step),
        tensors=packed.entries,
        bucket_bytes=tuple(bucket.nbytes for bucket in packed.buckets),
        bucket_checksums=packed.checksums,
        canary=Canary((1, 2), (-0.5,), 1e-3),
    )
    return manifest, packed


def expected(step: int, size: int = 3000) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {f"w{n}": torch.randn(size + n, generator=generator) for n in range(3)}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SegmentStore]:
    store = SegmentStore(tmp_path / "segments", RUN, max_segments=3)
    yield store
    store.remove_all()


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "segments"


def assert_holds(directory: Path, name: str, manifest: WeightManifest, step: int) -> None:
    with open_segment(directory, name, manifest) as tensors:
        assert list(tensors) == ["w0", "w1", "w2"]
        assert all(torch.equal(tensors[key], value) for key, value in expected(step).items())


def test_reader_sees_exactly_what_was_written(store: SegmentStore, directory: Path) -> None:
    manifest, packed = weights_of(1)
    assert_holds(directory, store.write(manifest, packed.buckets), manifest, 1)


def test_memory_is_reused_and_the_newest_version_survives(
    store: SegmentStore, directory: Path
) -> None:
    names = []
    for step in range(6):
        manifest, packed = weights_of(step)
        names.append(store.write(manifest, packed.buckets))
        assert_holds(directory, names[-1], manifest, step)
    assert len(set(names)) == 2
    assert names[-1] != names[-2]


def test_late_reader_learns_that_its_version_was_superseded(
    store: SegmentStore, directory: Path
) -> None:
    first, packed = weights_of(0)
    name = store.write(first, packed.buckets)
    while True:
        manifest, packed = weights_of(1)
        if store.write(manifest, packed.buckets) == name:
            break
    with pytest.raises(SwapRefused) as refusal, open_segment(directory, name, first):
        pass
    assert refusal.value.reason == "superseded"


def test_segment_in_use_is_never_overwritten(store: SegmentStore, directory: Path) -> None:
    manifest, packed = weights_of(0)
    name = store.write(manifest, packed.buckets)
    with open_segment(directory, name, manifest) as tensors:
        for step in range(1, 8):
            newer, newer_packed = weights_of(step)
            assert store.write(newer, newer_packed.buckets) != name
        assert all(torch.equal(tensors[key], value) for key, value in expected(0).items())


def test_writer_refuses_when_every_segment_is_read(store: SegmentStore, directory: Path) -> None:
    manifest, packed = weights_of(0)
    readers = []
    for _ in range(3):
        reader = open_segment(directory, store.write(manifest, packed.buckets), manifest)
        reader.__enter__()
        readers.append(reader)
    with pytest.raises(SwapRefused) as refusal:
        store.write(manifest, packed.buckets)
    assert refusal.value.reason == "no_room"
    readers[0].__exit__(None, None, None)
    store.write(manifest, packed.buckets)
    for reader in readers[1:]:
        reader.__exit__(None, None, None)


def _hold_until_killed(directory: Path, name: str, manifest: WeightManifest, ready: Event) -> None:
    with open_segment(directory, name, manifest):
        ready.set()
        time.sleep(600)


def test_dead_reader_does_not_keep_a_segment(tmp_path: Path) -> None:
    directory = tmp_path / "segments"
    context = multiprocessing.get_context("spawn")
    store = SegmentStore(directory, RUN, max_segments=1)
    manifest, packed = weights_of(0)
    name = store.write(manifest, packed.buckets)
    ready = context.Event()
    process = context.Process(target=_hold_until_killed, args=(directory, name, manifest, ready))
    process.start()
    assert ready.wait(60)
    with pytest.raises(SwapRefused, match="no_room"):
        store.write(manifest, packed.buckets)
    process.kill()
    process.join(60)
    assert store.write(manifest, packed.buckets) == name
    store.remove_all()


def test_segment_grows_for_a_larger_model_and_serves_a_smaller_one(
    store: SegmentStore, directory: Path
) -> None:
    for size in (3000, 9000, 100):
        for _ in range(3):
            manifest, packed = weights_of(5, size)
            name = store.write(manifest, packed.buckets)
            with open_segment(directory, name, manifest) as tensors:
                wanted = expected(5, size)
                assert all(torch.equal(tensors[key], wanted[key]) for key in wanted)


@pytest.mark.parametrize("where", [0, 20, 4096, -1])
def test_flipped_byte_is_found_before_a_tensor_is_seen(
    store: SegmentStore, directory: Path, where: int
) -> None:
    manifest, packed = weights_of(0)
    name = store.write(manifest, packed.buckets)
    path = directory / name
    content = bytearray(path.read_bytes())
    content[where] ^= 0x40
    path.write_bytes(content)
    with pytest.raises(SwapRefused) as refusal, open_segment(directory, name, manifest):
        pytest.fail("a damaged segment was opened")
    assert refusal.value.reason in ("corrupt", "superseded")


def test_truncated_segment_is_refused_not_a_bus_error(store: SegmentStore, directory: Path) -> None:
    manifest, packed = weights_of(0)
    name = store.write(manifest, packed.buckets)
    os.truncate(directory / name, 8192)
    with pytest.raises(SwapRefused, match="corrupt"), open_segment(directory, name, manifest):
        pass


def test_writer_refuses_buckets_that_are_not_the_manifest_s(store: SegmentStore) -> None:
    manifest, _ = weights_of(0)
    _, other = weights_of(1)
    with pytest.raises(SwapRefused, match="corrupt"):
        store.write(manifest, other.buckets)
    with pytest.raises(SwapRefused, match="corrupt"):
        store.write(manifest, other.buckets[:-1])


def test_manifest_of_another_run_is_refused(store: SegmentStore) -> None:
    manifest, packed = weights_of(0, run_id="other")
    with pytest.raises(InputError, match="other"):
        store.write(manifest, packed.buckets)


@pytest.mark.parametrize(
    "name", ["../segment-1-1", "segment-1-1/../../x", "/etc/passwd", "", ".", "segment-1-1\n"]
)
def test_name_that_leaves_the_directory_is_refused(directory: Path, name: str) -> None:
    manifest, _ = weights_of(0)
    with pytest.raises(InputError), open_segment(directory, name, manifest):
        pass


def test_symlink_is_not_followed(store: SegmentStore, directory: Path, tmp_path: Path) -> None:
    manifest, packed = weights_of(0)
    name = store.write(manifest, packed.buckets)
    (tmp_path / "elsewhere").write_bytes((directory / name).read_bytes())
    (directory / "segment-9-9").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic"), open_segment(directory, "segment-9-9", manifest):
        pass


def test_directory_has_one_owner_and_its_leftovers_are_removed(tmp_path: Path) -> None:
    first = SegmentStore(tmp_path / "segments", RUN)
    manifest, packed = weights_of(0)
    name = first.write(manifest, packed.buckets)
    with pytest.raises(SwapRefused, match="busy"):
        SegmentStore(tmp_path / "segments", RUN)
    os.close(first._lock_fd)  # what the kernel does when the owner dies
    second = SegmentStore(tmp_path / "segments", RUN)
    with (
        pytest.raises(SwapRefused, match="missing"),
        open_segment(tmp_path / "segments", name, manifest),
    ):
        pass
    second.remove_all()


def test_remove_all_leaves_nothing_and_readers_unharmed(tmp_path: Path) -> None:
    store = SegmentStore(tmp_path / "segments", RUN)
    manifest, packed = weights_of(3)
    with open_segment(tmp_path / "segments", store.write(manifest, packed.buckets), manifest) as t:
        store.remove_all()
        store.remove_all()
        assert not (tmp_path / "segments").exists()
        assert torch.equal(t["w0"], expected(3)["w0"])


def test_full_shared_memory_is_an_error_not_a_crash(
    store: SegmentStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, offset: int, length: int) -> None:
        raise OSError(28, "No space left on device")

    manifest, packed = weights_of(0)
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(SwapRefused, match="no_room"):
        store.write(manifest, packed.buckets)
    monkeypatch.undo()
    store.write(manifest, packed.buckets)


def test_writing_to_a_view_changes_nobody_else_s_weights(
    store: SegmentStore, directory: Path
) -> None:
    manifest, packed = weights_of(2)
    name = store.write(manifest, packed.buckets)
    with open_segment(directory, name, manifest) as tensors:
        tensors["w0"].zero_()
    assert_holds(directory, name, manifest, 2)


def test_default_directory_is_named_after_the_run_and_checked() -> None:
    assert default_segment_directory("demo-1").name == "lagwise-demo-1"
    with pytest.raises(InputError):
        default_segment_directory("../x")


def test_what_killed_runs_left_in_shared_memory_is_removed(tmp_path: Path) -> None:
    dead, alive, young = (tmp_path / f"lagwise-{name}" for name in ("dead", "alive", "young"))
    manifest, packed = weights_of(1)
    for folder in (dead, young):
        folder.mkdir()
        (folder / "segment-1-1").write_bytes(b"x")
    living = SegmentStore(alive, RUN)
    living.write(manifest, packed.buckets)
    for folder in (dead, alive):
        os.utime(folder, (0, 0))
    store = SegmentStore(tmp_path / "lagwise-new", RUN)
    assert not dead.exists()
    assert list(alive.glob("segment-*"))  # its owner holds the lock
    assert list(young.glob("segment-*"))
    living.remove_all()
    store.remove_all()
