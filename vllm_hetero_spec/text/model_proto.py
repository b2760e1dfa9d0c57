# SPDX-License-Identifier: Apache-2.0
"""Reading the normalization settings of a SentencePiece model.

The library applies these settings but does not expose them, so they are read from the serialized
message. ModelProto.normalizer_spec is field 3. In it, name is field 1, precompiled_charsmap is
field 2 and remove_extra_whitespaces is field 4.
"""

from collections.abc import Iterator

# A ModelProto fragment {normalizer_spec {add_dummy_prefix: false}}. Appended to a serialized model,
# it overrides this one field, because concatenated protobuf messages merge.
NO_DUMMY_PREFIX = b"\x1a\x02\x18\x00"

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


def lossy_reason(proto: bytes) -> str:
    """Return a description of how a serialized model changes text, or "" if it does not."""
    spec: dict[int, int | bytes] = {4: 1}  # remove_extra_whitespaces is true by default
    for number, value in _fields(proto):
        if number == 3 and isinstance(value, bytes):
            spec |= dict(_fields(value))
    losses = []
    if spec.get(2):
        name = spec.get(1, b"")
        losses.append(f"applies {name.decode() if isinstance(name, bytes) and name else 'a map'}")
    if spec[4]:
        losses.append("removes white space, except single spaces inside a text")
    return ", ".join(losses)


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield number and value of each field of a protobuf message, fixed-width values as bytes."""
    position = 0
    while position < len(message):
        key, position = _varint(message, position)
        kind = key & 7
        if kind == _VARINT:
            value, position = _varint(message, position)
            yield key >> 3, value
            continue
        if kind == _BYTES:
            size, position = _varint(message, position)
        elif kind in (_FIXED32, _FIXED64):
            size = 4 if kind == _FIXED32 else 8
        else:
            raise ValueError(f"a SentencePiece model has no fields of wire type {kind}")
        yield key >> 3, message[position : position + size]
        position += size


def _varint(message: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
