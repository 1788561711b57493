"""One shared-memory segment per node and broadcast: written once, mapped by every engine.

    SegmentStore.write ──▶ file in shared memory ──▶ open_segment: tensors by name, no copy

Layout: one header page (magic, length, JSON with run, version and bucket sizes), then the buckets
end to end. A reader holds a shared lock on the segment while it uses the tensors; the writer only
overwrites a segment that it can lock alone. The kernel drops the locks of a process that dies, so
neither side can leave the other waiting. Nothing here ever waits: what cannot be had is refused.
"""

from __future__ import annotations

import errno
import fcntl
import json
import mmap
import os
import re
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from actors.scratch import empty_folder, own_folder, remove_folder, remove_orphans
from actors.weight_packing import ByteBuffer, as_uint8, bucket_starts, checksum, tensor_view
from actors.weights import WeightManifest
from correction.errors import InputError, SwapRefused

if TYPE_CHECKING:
    import torch

HEADER_BYTES = 4096
_DIRECTORY_PREFIX = "lagwise-"
_MAGIC = b"lagwise1"
_PREFIX = struct.Struct("<8sI")
_NAME = re.compile(r"segment-[0-9]{1,9}-[0-9]{1,9}")
_OPEN_FLAGS = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW


def default_segment_directory(run_id: str) -> Path:
    """Where the segments of a run lie on this node: shared memory where there is some."""
    import tempfile

    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,100}", run_id):
        raise InputError(f"run id {run_id!r} is not fit for a directory name")
    shared_memory = Path("/dev/shm")
    usable = shared_memory.is_dir() and os.access(shared_memory, os.W_OK)
    return (
        shared_memory if usable else Path(tempfile.gettempdir())
    ) / f"{_DIRECTORY_PREFIX}{run_id}"


class SegmentStore:
    """The writing side: a small pool of mapped segments, reused because page faults are dear.

    Exactly one store at a time owns a directory; what dead owners left there and beside it is
    removed. Not thread-safe. max_segments bounds the memory: the newest version, and those that a
    slow reader still holds.
    """

    def __init__(self, directory: Path, run_id: str, max_segments: int = 4) -> None:
        """Raises SwapRefused ("busy") while another live process owns the directory."""
        self._directory = directory
        self._run_id = run_id
        self._max_segments = max_segments
        self._segments: list[_Segment] = []  # oldest content first
        self._made = 0
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        owned = own_folder(directory)
        if owned is None:
            raise SwapRefused("busy", f"another process owns the segments in {directory}")
        self._lock_fd = owned
        empty_folder(directory, _is_segment)
        remove_orphans(directory.parent, _DIRECTORY_PREFIX, _is_segment)

    def write(self, manifest: WeightManifest, buckets: Sequence[ByteBuffer]) -> str:
        """Make `buckets` readable as one segment; returns its name.

        Raises SwapRefused: "corrupt" when the buckets are not what the manifest says, "no_room"
        when every segment is in use or shared memory is full. Then nothing has changed.
        """
        if manifest.run_id != self._run_id:
            raise InputError(f"manifest of run {manifest.run_id!r} in a store of {self._run_id!r}")
        _check_buckets(manifest, buckets)
        segment = self._claim(HEADER_BYTES + manifest.total_bytes)
        try:
            segment.fill(manifest, buckets)
        except BaseException:
            segment.delete()
            raise
        fcntl.flock(segment.fd, fcntl.LOCK_UN)
        self._segments.append(segment)
        return segment.name

    def remove_all(self) -> None:
        """Unmap and delete everything and give up the directory. Idempotent.

        Readers that have a segment mapped keep its memory until they let go.
        """
        for segment in self._segments:
            segment.close()
        self._segments.clear()
        if self._lock_fd >= 0:
            remove_folder(self._directory, _is_segment)
            os.close(self._lock_fd)
            self._lock_fd = -1

    def _claim(self, size_bytes: int) -> _Segment:
        """A segment locked for this writer and taken from the list, large enough."""
        # The newest content comes last, so that it survives as long as another one is free.
        keep_newest = len(self._segments) < self._max_segments
        for segment in self._segments[: -1 if keep_newest else None]:
            if _lock(segment.fd, fcntl.LOCK_EX):
                self._segments.remove(segment)
                return self._resized(segment, size_bytes)
        if not keep_newest:
            raise SwapRefused("no_room", f"all {self._max_segments} segments are being read")
        self._made += 1
        name = f"segment-{os.getpid()}-{self._made}"
        fd = os.open(self._directory / name, _OPEN_FLAGS | os.O_CREAT | os.O_EXCL, 0o600)
        fcntl.flock(fd, fcntl.LOCK_EX)
        return self._resized(_Segment(self._directory / name, fd), size_bytes)

    def _resized(self, segment: _Segment, size_bytes: int) -> _Segment:
        try:
            segment.reserve(size_bytes)
        except OSError as failure:
            segment.delete()
            if failure.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
                raise
            raise SwapRefused("no_room", f"{size_bytes} bytes of shared memory: {failure}") from (
                failure
            )
        return segment


@contextmanager
def open_segment(
    directory: Path, name: str, manifest: WeightManifest, verify: bool = True
) -> Iterator[dict[str, torch.Tensor]]:
    """Map a segment; yields its tensors by name, valid inside the context only.

    verify: compare every bucket with its checksum; one reader of several may do it for all. The
    mapping is private: writing to a tensor changes nobody else's memory. Raises SwapRefused:
    "missing", "superseded" (another version lies there, or is being written), "corrupt".
    """
    fd = _open_for_reading(directory, name)
    try:
        if not _lock(fd, fcntl.LOCK_SH):
            raise SwapRefused("superseded", f"{name} is being overwritten")
        _check_header(fd, name, manifest)
        # Left to the garbage collector: a tensor that outlives the context must not crash.
        memory = mmap.mmap(fd, 0, access=mmap.ACCESS_COPY)
        starts = [HEADER_BYTES + start for start in bucket_starts(manifest.bucket_bytes)]
        if verify:
            view = memoryview(memory)
            _check_buckets(
                manifest,
                [
                    view[start : start + size]
                    for start, size in zip(starts, manifest.bucket_bytes, strict=True)
                ],
            )
        yield {e.name: tensor_view(memory, e, starts[e.bucket]) for e in manifest.tensors}
    finally:
        os.close(fd)


class _Segment:
    """One mapped file of the pool."""

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self.fd = fd
        self._memory: mmap.mmap | None = None

    @property
    def name(self) -> str:
        return self.path.name

    def reserve(self, size_bytes: int) -> None:
        """Grow to at least `size_bytes`. Allocated now: a full tmpfs is an error, not a SIGBUS."""
        if self._memory is not None and len(self._memory) >= size_bytes:
            return
        os.posix_fallocate(self.fd, 0, size_bytes)
        if self._memory is not None:
            self._memory.close()
        self._memory = mmap.mmap(self.fd, size_bytes)

    def fill(self, manifest: WeightManifest, buckets: Sequence[ByteBuffer]) -> None:
        """Header last: a segment half written by a process that died has no valid header."""
        assert self._memory is not None
        self._memory[:HEADER_BYTES] = bytes(HEADER_BYTES)
        target = as_uint8(self._memory)
        for start, bucket in zip(bucket_starts(manifest.bucket_bytes), buckets, strict=True):
            source = as_uint8(bucket)
            target[HEADER_BYTES + start : HEADER_BYTES + start + source.nbytes] = source
        del target  # an exported buffer would keep the mapping from being closed
        self._memory[:HEADER_BYTES] = _header(manifest)

    def close(self) -> None:
        if self._memory is not None:
            self._memory.close()
        os.close(self.fd)

    def delete(self) -> None:
        self.path.unlink(missing_ok=True)
        self.close()


def _header(manifest: WeightManifest) -> bytes:
    identity = json.dumps(_identity(manifest)).encode()
    if _PREFIX.size + len(identity) > HEADER_BYTES:
        raise InputError(f"segment header of {len(identity)} bytes: use fewer, larger buckets")
    return (_PREFIX.pack(_MAGIC, len(identity)) + identity).ljust(HEADER_BYTES, b"\0")


def _identity(manifest: WeightManifest) -> dict[str, str | int]:
    """What makes a segment the one that a manifest describes."""
    digest = checksum(json.dumps([manifest.bucket_bytes, manifest.bucket_checksums]).encode())
    return {
        "run_id": manifest.run_id,
        "version": str(manifest.version),
        "total_bytes": manifest.total_bytes,
        "digest": digest,
    }


def _check_header(fd: int, name: str, manifest: WeightManifest) -> None:
    header = os.pread(fd, HEADER_BYTES, 0)
    wanted = _identity(manifest)
    if header == _header(manifest):
        if os.fstat(fd).st_size < HEADER_BYTES + manifest.total_bytes:
            raise SwapRefused("corrupt", f"{name} is shorter than its header says")
        return
    if len(header) < HEADER_BYTES or not header.startswith(_MAGIC):
        raise SwapRefused("superseded", f"{name} holds no finished version; wanted {wanted}")
    raise SwapRefused("superseded", f"{name} does not hold {wanted}")


def _check_buckets(manifest: WeightManifest, buckets: Sequence[ByteBuffer]) -> None:
    if len(buckets) != len(manifest.bucket_bytes):
        raise SwapRefused(
            "corrupt", f"{len(buckets)} buckets; the manifest has {len(manifest.bucket_bytes)}"
        )
    expected = zip(buckets, manifest.bucket_bytes, manifest.bucket_checksums, strict=True)
    for number, (bucket, size_bytes, digest) in enumerate(expected):
        found_bytes = as_uint8(bucket).nbytes
        if found_bytes != size_bytes or checksum(bucket) != digest:
            raise SwapRefused(
                "corrupt", f"bucket {number} ({found_bytes} bytes) of {manifest.version} is damaged"
            )


def _open_for_reading(directory: Path, name: str) -> int:
    if not _NAME.fullmatch(name):
        raise InputError(f"{name!r} is not the name of a segment")
    try:
        return os.open(directory / name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError as failure:
        raise SwapRefused("missing", f"{name} is gone") from failure


def _is_segment(path: Path) -> bool:
    return _NAME.fullmatch(path.name) is not None


def _lock(fd: int, kind: int) -> bool:
    """Take a lock of the open file without waiting; False when someone else has it."""
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
