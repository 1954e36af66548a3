"""A phone on the same network: this machine's address, a code to scan, and a certificate, so that the camera works."""

from __future__ import annotations

import io
import ipaddress
import os
import socket
from datetime import UTC, datetime, timedelta
from pathlib import Path

from vqprompt.core.errors import UserError

DAYS = 397  # that a certificate is valid; phones refuse longer ones
MEANS = (
    "Scan the code with a phone on the same network, or type the address. The phone warns that it does not know the "
    "certificate: this computer made it. Go on; the connection is encrypted. Whoever has this address can teach and "
    "change the models until you stop the server."
)


def network_address() -> str:
    """This machine's address in its network."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(("192.0.2.1", 9))  # sends nothing; the system only chooses a way
            address = str(probe.getsockname()[0])
    except OSError:
        raise UserError("--lan: this machine is in no network; connect it to the network that the phone uses") from None
    if not ipaddress.ip_address(address).is_private:
        raise UserError(
            f"--lan: this machine's address {address} can be reached from all of the internet; put a proxy in front of "
            "the server instead, and name it with --allow-host"
        )
    return address


def code_for_terminal(url: str) -> str:
    """A code to scan, as text."""
    import segno

    text = io.StringIO()
    segno.make(url, error="l", micro=False).terminal(text, border=2, compact=True)
    return text.getvalue()


def code_for_page(url: str) -> str:
    """A code to scan, as the address of a picture."""
    import segno

    return str(segno.make(url, error="l", micro=False).svg_data_uri(scale=4, border=3, light="white"))


def certificate(address: str, folder: Path) -> Path:
    """A file with a key and a certificate for it that names the address. It is made once and kept, so that a phone that
    trusts it warns only once."""
    file = folder / f"{address}.pem"
    if file.exists() and datetime.now().timestamp() - file.stat().st_mtime < (DAYS - 30) * 86400:
        return file
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, f"vqprompt on {socket.gethostname()}"[:64])])
    names: list[x509.GeneralName] = [x509.IPAddress(ipaddress.ip_address(address)), x509.DNSName("localhost")]
    made = (
        x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
        .serial_number(x509.random_serial_number()).not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=DAYS - 1)).add_extension(x509.SubjectAlternativeName(names), False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), True).sign(key, hashes.SHA256())
    )  # fmt: skip
    pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    secret = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain) + made.public_bytes(pem)
    file.unlink(missing_ok=True)
    with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as target:
        target.write(secret)
    return file
