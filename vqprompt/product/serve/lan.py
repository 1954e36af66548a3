"""A phone on the same network: this machine's address, a code to scan, and a certificate, so that the camera works."""

from __future__ import annotations

import io
import ipaddress
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


def code_to_scan(url: str) -> tuple[str, str]:
    """As text for a terminal, and as the address of a picture for a page."""
    import segno

    code, text = segno.make(url, error="l", micro=False), io.StringIO()
    code.terminal(text, border=2, compact=True)
    return text.getvalue(), str(code.svg_data_uri(scale=4, border=3, light="white"))


def certificate(address: str, folder: Path) -> Path:
    """A file with a key and a certificate for it that names the address. It is made once and kept, so that a phone that
    trusts it warns only once."""
    file = folder / f"{address}.pem"
    if file.exists() and datetime.now().timestamp() - file.stat().st_mtime < (DAYS - 30) * 86400:
        return file
    import trustme

    ends = datetime.now(UTC) + timedelta(days=DAYS)
    by = "vqprompt", socket.gethostname()[:64]
    made = trustme.CA(None, 9, *by).issue_cert(
        address, "localhost", organization_name=by[0], organization_unit_name=by[1], not_after=ends
    )
    folder.mkdir(parents=True, exist_ok=True)
    file.touch(0o600)
    made.private_key_and_cert_chain_pem.write_to_path(file)
    return file
