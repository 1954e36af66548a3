"""Download one file: it arrives whole and with the right checksum, or not at all."""

from __future__ import annotations

import hashlib
import urllib.request
from pathlib import Path

from vqprompt.core.files import replacing
from vqprompt.core.progress import Progress, Report, Stage, ignore


def download(url: str, target: Path, checksum: str = "", progress: Report = ignore) -> Path:
    """Fetch `url` to `target`. checksum: `md5:…` or `sha256:…`, "" if it is not known. Raises OSError if it fails."""
    kind, _, expected = checksum.partition(":")
    digest = hashlib.new(kind or "sha256", usedforsecurity=False)
    request = urllib.request.Request(url, headers={"User-Agent": "vqprompt"})
    with replacing(target) as partial, urllib.request.urlopen(request, timeout=60) as response, partial.open("wb") as f:
        total, done = int(response.headers.get("Content-Length") or 0), 0
        while chunk := response.read(1 << 20):
            f.write(chunk)
            digest.update(chunk)
            done += len(chunk)
            progress(Progress(Stage.DOWNLOADING, done >> 20, max(total, done) >> 20, detail=f"{target.name}, MB"))
        if done < total:
            raise OSError(f"{url} ended after {done:,} of {total:,} bytes")
        if expected and digest.hexdigest() != expected:
            raise OSError(f"{url} has the {kind} {digest.hexdigest()}, not {expected}")
    return target
