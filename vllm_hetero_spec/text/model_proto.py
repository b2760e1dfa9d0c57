# SPDX-License-Identifier: Apache-2.0
"""What a SentencePiece model file says of its normalisation.

The library applies it but does not tell it, so the few fields are read from the serialized message:
ModelProto.normalizer_spec is field 3; in it name is 1, precompiled_charsmap 2 and
remove_extra_whitespaces 4.
"""

from collections.abc import Iterator

# A ModelProto fragment {normalizer_spec {add_dummy_prefix: false}}: appended to a serialized model
# it overrides that one field, because concatenated protobuf messages merge.
NO_DUMMY_PREFIX = b"\x1a\x02\x18\x00"

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


def lossy_reason(proto: bytes) -> str:
    """What a serialized model does to text before it looks for pieces, empty where nothing."""
    spec: dict[int, int | bytes] = {4: 1}  # removes white space unless it says otherwise
    for number, value in _fields(proto):
        if number == 3 and isinstance(value, bytes):
            spec |= dict(_fields(value))
    losses = []
    if spec.get(2):
        name = spec.get(1, b"")
        losses.append(f"applies {name.decode() if isinstance(name, bytes) and name else 'a map'}")
    if spec[4]:
        losses.append("removes white space but for single spaces inside a text")
    return ", ".join(losses)


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Number and value of each field of a protobuf message; fixed-width values as bytes."""
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
