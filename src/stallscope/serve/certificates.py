"""Creates keys and certificates: self-signed, an authority, or signed by an authority. All in PEM.

Keys are on the curve P-256. A certificate is valid from one hour ago: the clocks of other machines may be behind.
"""

import datetime
import ipaddress
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # cryptography is imported only where a certificate is created
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

_BEHIND = datetime.timedelta(hours=1)


def self_signed(
    subject: str, names: Sequence[str], now: datetime.datetime, *, days: int
) -> tuple[bytes, bytes]:
    """Key and certificate of a server that is its own authority. names: host names and addresses."""
    from cryptography import x509

    key, name = _new_key(), _named(subject)
    builder = (
        _builder(key, name, now, days=days)
        .issuer_name(name)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs=True, signs_certificates=True), critical=True)
    )
    return _pem(key), _signed(_for_servers(builder, names), key)


def authority(now: datetime.datetime, *, days: int) -> tuple[bytes, bytes]:
    """Key and certificate of a new authority with a unique name."""
    from cryptography import x509

    key = _new_key()
    name = _named(f"stallscope nodes {x509.random_serial_number():x}"[:40])
    builder = (
        _builder(key, name, now, days=days)
        .issuer_name(name)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True, signs_lists=True), critical=True)
    )
    return _pem(key), _signed(builder, key)


def signed_by(
    ca_key: "EllipticCurvePrivateKey",
    ca: "x509.Certificate",
    names: Sequence[str],
    now: datetime.datetime,
    *,
    days: int,
) -> tuple[bytes, bytes]:
    """Key and certificate of a server. names: host names and addresses, the primary name first."""
    from cryptography import x509

    key = _new_key()
    builder = (
        _builder(key, _named(names[0]), now, days=days)
        .issuer_name(ca.subject)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False
        )
        .add_extension(_usage(signs=True), critical=True)
    )
    return _pem(key), _signed(_for_servers(builder, names), ca_key)


def _new_key() -> "EllipticCurvePrivateKey":
    from cryptography.hazmat.primitives.asymmetric import ec

    return ec.generate_private_key(ec.SECP256R1())


def _named(subject: str) -> "x509.Name":
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject[:64])])


def _builder(
    key: "EllipticCurvePrivateKey", subject: "x509.Name", now: datetime.datetime, *, days: int
) -> "x509.CertificateBuilder":
    from cryptography import x509

    public = key.public_key()
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _BEHIND)
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
    )


def _for_servers(builder: "x509.CertificateBuilder", names: Sequence[str]) -> "x509.CertificateBuilder":
    from cryptography import x509
    from cryptography.x509.oid import ExtendedKeyUsageOID

    return builder.add_extension(
        x509.SubjectAlternativeName([_alternative(name) for name in names]), critical=False
    ).add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)


def _alternative(name: str) -> "x509.GeneralName":
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _usage(
    *, signs: bool = False, signs_certificates: bool = False, signs_lists: bool = False
) -> "x509.KeyUsage":
    """signs_lists: whether the key may sign revocation lists."""
    from cryptography import x509

    return x509.KeyUsage(
        digital_signature=signs,
        key_cert_sign=signs_certificates,
        crl_sign=signs_lists,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _signed(builder: "x509.CertificateBuilder", key: "EllipticCurvePrivateKey") -> bytes:
    from cryptography.hazmat.primitives import hashes, serialization

    return builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def _pem(key: "EllipticCurvePrivateKey") -> bytes:
    from cryptography.hazmat.primitives import serialization

    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
