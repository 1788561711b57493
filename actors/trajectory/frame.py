"""The bytes around a record batch: what is refused before Arrow interprets anything.

    [schema message][record batch message][end of stream][trailer]

The first three are a plain Arrow IPC stream. The trailer (16 bytes, which Arrow readers ignore)
holds a magic word, a CRC-32 of the stream and its length. A checksum finds damage, not malice:
whoever can write to the queue can also sum, so `open_frame` trusts nothing that it covers.
"""

from __future__ import annotations

import struct
import zlib

import pyarrow as pa

from actors.trajectory.schema import HEAD_SCHEMA, SCHEMA, SCHEMA_VERSION, VERSION_KEY
from correction.errors import TrajectoryError

MAX_GROUP_BYTES = 64 * 2**20
"""Largest encoded group that is accepted unless the caller says otherwise, in bytes."""

MAX_SCHEMA_BYTES = 64 * 2**10
"""Largest schema message, group description included, in bytes."""

_TRAILER = struct.Struct("<4sIQ")  # magic, CRC-32 of the stream, stream length in bytes
_MAGIC = b"LGW1"
_END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"
_EXTENSION_KEY = b"ARROW:extension"
_ARROW_ERRORS = (pa.ArrowException, OSError, EOFError, UnicodeError)  # of pyarrow

# Places in Arrow's flatbuffers (format/Message.fbs), as vtable slots.
_MESSAGE_HEADER_SLOT = 2
_BATCH_COMPRESSION_SLOT = 3


def close_frame(schema: pa.Schema, batch: pa.RecordBatch) -> bytes:
    """One framed stream of one batch. Raises TrajectoryError where the schema is too large."""
    schema_message = schema.serialize()
    if schema_message.size > MAX_SCHEMA_BYTES:
        raise TrajectoryError("oversize", f"group description of {schema_message.size} bytes")
    parts = (schema_message, batch.serialize(), _END_OF_STREAM)
    checksum = 0
    for part in parts:
        checksum = zlib.crc32(part, checksum)
    return b"".join((*parts, _TRAILER.pack(_MAGIC, checksum, sum(map(len, parts)))))


def open_frame(data: bytes | memoryview, max_bytes: int) -> tuple[pa.Schema, pa.RecordBatch]:
    """The schema with its metadata, and the batch, which shares memory with `data`.

    The batch has been validated in full by Arrow: offsets, lengths, UTF-8, no extension types,
    no compressed buffers. Raises TrajectoryError.
    """
    stream = _checked_stream(memoryview(data).cast("B"), max_bytes)
    source = pa.BufferReader(stream)
    try:
        schema, layout = _read_schema(pa.ipc.read_message(source))
        message = pa.ipc.read_message(source)
        _check_batch_message(message)
        if bytes(stream[source.tell() :]) != _END_OF_STREAM:
            raise TrajectoryError("bad_stream", "expected the end of the stream after one batch")
        batch = pa.ipc.read_record_batch(message, layout)
        batch.validate(full=True)
    except _ARROW_ERRORS as error:
        raise TrajectoryError("bad_stream", _short(error)) from error
    return schema, batch


def _checked_stream(view: memoryview, max_bytes: int) -> pa.Buffer:
    if len(view) > max_bytes:
        raise TrajectoryError("oversize", f"{len(view)} bytes, at most {max_bytes} are accepted")
    if len(view) < _TRAILER.size:
        raise TrajectoryError("truncated", f"{len(view)} bytes are too few for a group")
    magic, checksum, length = _TRAILER.unpack_from(view, len(view) - _TRAILER.size)
    if magic != _MAGIC or length != len(view) - _TRAILER.size:
        raise TrajectoryError("truncated", "no trailer at the end: cut, or not a group")
    stream = view[:length]
    if zlib.crc32(stream) != checksum:
        raise TrajectoryError("bad_checksum", "the bytes are not those that were written")
    return pa.py_buffer(stream)


def _read_schema(message: pa.ipc.Message) -> tuple[pa.Schema, pa.Schema]:
    """The schema of a message that is small and names no extension type, and ours equal to it.

    Extension types are looked for in the raw bytes because reading a schema already hands them
    to whatever code has registered the type, in this process or by a library.
    """
    if message.type != "schema" or message.metadata.size > MAX_SCHEMA_BYTES:
        raise TrajectoryError("bad_stream", "expected a schema message of reasonable size")
    if _EXTENSION_KEY in message.metadata.to_pybytes():
        raise TrajectoryError("unknown_schema", "extension types are not accepted")
    schema = pa.ipc.read_schema(message)
    version = (schema.metadata or {}).get(VERSION_KEY, b"none")[:20]
    if version != str(SCHEMA_VERSION).encode():
        detail = f"schema version {version!r}, this reader knows {SCHEMA_VERSION}"
        raise TrajectoryError("unknown_schema", detail)
    for layout in (SCHEMA, HEAD_SCHEMA):
        if schema.equals(layout, check_metadata=False):
            return schema, layout
    raise TrajectoryError("wrong_columns", _difference(schema))


def _difference(schema: pa.Schema) -> str:
    missing = [name for name in SCHEMA.names if name not in schema.names]
    extra = [name[:40] for name in schema.names if name not in SCHEMA.names]
    return f"missing columns {missing}, extra {extra[:5]}, else another order or type"


def _check_batch_message(message: pa.ipc.Message) -> None:
    """Refuse compressed buffers: their claimed size is not bounded by the bytes received."""
    if message.type != "record batch":
        raise TrajectoryError("bad_stream", f"expected a record batch, found a {message.type}")
    flatbuffer = message.metadata.to_pybytes()
    root = struct.unpack_from("<I", flatbuffer)[0]
    batch = _table_field(flatbuffer, root, _MESSAGE_HEADER_SLOT)
    batch += struct.unpack_from("<I", flatbuffer, batch)[0]
    if _table_field(flatbuffer, batch, _BATCH_COMPRESSION_SLOT):
        raise TrajectoryError("compressed", "compressed buffers are not accepted")


def _table_field(flatbuffer: bytes, table: int, slot: int) -> int:
    """Position of a field in a flatbuffer that Arrow has verified; 0 where it is absent."""
    vtable = table - struct.unpack_from("<i", flatbuffer, table)[0]
    if 4 + 2 * slot >= struct.unpack_from("<H", flatbuffer, vtable)[0]:
        return 0
    offset = struct.unpack_from("<H", flatbuffer, vtable + 4 + 2 * slot)[0]
    return table + offset if offset else 0


def _short(error: BaseException) -> str:
    return str(error).partition("\n")[0][:200]
