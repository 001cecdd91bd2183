"""The few fields of an X.509 certificate that explain why it is not trusted: its times and its host names. Pure.

Python's ``ssl`` decodes a certificate only after it has verified it, which is when nobody needs an explanation.
Sources: RFC 5280, 4.1 (Certificate), 4.1.2.5 (Validity), 4.2.1.6 (Subject Alternative Name); X.690, 8.1 (DER).
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime

from buildkit.errors import FormatError, one_line

_SEQUENCE, _OCTETS, _OID, _UTC_TIME, _GENERAL_TIME = 0x30, 0x04, 0x06, 0x17, 0x18
_VERSION, _EXTENSIONS, _DNS_NAME, _IP = 0xA0, 0xA3, 0x82, 0x87
_SUBJECT_ALT_NAME = bytes((0x55, 0x1D, 0x11))
_MOST_NAMES = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class CertificateFacts:
    """Unix times, and host names and addresses as written."""

    not_before: float
    not_after: float
    names: tuple[str, ...]


def read_certificate(der: bytes) -> CertificateFacts:
    """From DER as it comes in a handshake. Raises FormatError for anything else."""
    try:
        fields = list(_items(_only(_only(der, _SEQUENCE), _SEQUENCE, whole=False)))
        if fields and fields[0][0] == _VERSION:
            fields = fields[1:]
        # serialNumber, signature, issuer, validity, subject, subjectPublicKeyInfo, …
        not_before, not_after = (_time(tag, value) for tag, value in _items(fields[3][1]))
        names = tuple(name for tag, value in fields[6:] if tag == _EXTENSIONS for name in _names(value))
    except (IndexError, ValueError) as error:
        raise FormatError("does not parse", where="a certificate") from error
    return CertificateFacts(not_before=not_before, not_after=not_after, names=names)


def _items(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Tag and content of each element that ``data`` consists of."""
    position = 0
    while position < len(data):
        tag, length = data[position], data[position + 1]
        position += 2
        if length & 0x80:
            count = length & 0x7F
            if not 1 <= count <= 4:
                raise ValueError("length")
            length = int.from_bytes(data[position : position + count])
            position += count
        if position + length > len(data):
            raise ValueError("cut off")
        yield tag, data[position : position + length]
        position += length


def _only(data: bytes, tag: int, *, whole: bool = True) -> bytes:
    """The content of the first element, which must have this tag (and be the only one, where ``whole``)."""
    items = list(_items(data))
    if not items or items[0][0] != tag or (whole and len(items) != 1):
        raise ValueError("structure")
    return items[0][1]


def _time(tag: int, value: bytes) -> float:
    text = value.decode("ascii")
    if tag == _UTC_TIME:  # two digits of the year: 50 and above are of the last century
        text = ("19" if int(text[:2]) >= 50 else "20") + text
    elif tag != _GENERAL_TIME:
        raise ValueError("time")
    return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC).timestamp()


def _names(extensions: bytes) -> Iterator[str]:
    for _, extension in _items(_only(extensions, _SEQUENCE)):
        parts = list(_items(extension))
        if parts[0] != (_OID, _SUBJECT_ALT_NAME) or parts[-1][0] != _OCTETS:
            continue
        for tag, value in list(_items(_only(parts[-1][1], _SEQUENCE)))[:_MOST_NAMES]:
            if tag == _DNS_NAME:
                yield one_line(value.decode("ascii", "replace"), 253)
            elif tag == _IP:
                yield str(ipaddress.ip_address(value))
