"""Requests that no client of good will sends: every route of the OpenAPI description, with values of every kind.

Most come from our own generator, which also damages headers and bodies; the others from schemathesis.
"""

from __future__ import annotations

import functools
import http.client
import json
import random
import tempfile
from pathlib import Path
from typing import Any
from urllib.parse import quote

from serving import Client

from faults.damage import damaged
from faults.servers import SECONDS, complaint, image, model_file, start

ODD: list[Any] = [
    None, True, 0, -1, 1.5, 10**400, 1e308, "", "m", "\ud800", "\0", "<b>", "../..", "class 0", "9" * 5000, "a" * 300,
    [], {}, [[]], [None], {"a": None}, ["class"], {"name": "class"}, "nan", "\U0001f600", "é", "unknown",
]  # fmt: skip
LONG = "9" * 5000
HEADERS = {
    "Origin": ["http://[", "null", "", "http://x:99999", "http://[::1", LONG],
    "Host": ["", "[", "x", "[::1", "127.0.0.1:x"],
    "Content-Type": [
        "",
        "multipart/form-data",
        f"multipart/form-data; boundary={LONG}",
        "application/json",
        "x/y; charset=z",
    ],
    "Content-Encoding": ["gzip", "", "\x80"],
    "Content-Length": ["-1", "0", "3", LONG],
    "Transfer-Encoding": ["chunked", "gzip, chunked", "x"],
    "Inference-Header-Content-Length": ["-1", "", "0", "5", "\xb2", LONG],
    "Authorization": ["Bearer", "Bearer \x80", LONG],
    "Sec-Fetch-Site": ["cross-site", "x"],
    "Expect": ["100-continue", "x"],
    "Connection": ["close", "upgrade"],
    "Range": ["bytes=0-", "bytes=5-1", "x"],
}
FORM = (
    b'--x\r\nContent-Disposition: form-data; name="label"\r\n\r\nclass 9\r\n'
    b'--x\r\nContent-Disposition: form-data; name="files"; filename="a.png"\r\n\r\n%b\r\n--x--\r\n'
)


@functools.cache
def client() -> Client:
    return start(Path(tempfile.mkdtemp(prefix="vqprompt-fault-")), image_mb=1, upload_mb=1, jobs=1000, body_seconds=1)


@functools.cache
def description() -> dict[str, Any]:
    told: dict[str, Any] = client().get("/openapi.json").json()
    return told


def try_request(rng: random.Random, folder: Path) -> str:
    """Five requests of our own, or five of schemathesis for one route."""
    if not client().server.state.models.get("m").snapshot.model.classes:  # they may have been forgotten
        client().server.state.models.get("m").path.write_bytes(model_file())
    outcomes = [_own(rng) for _ in range(5)] if rng.random() < 0.8 else [_by_schemathesis(rng)]
    return next((outcome for outcome in outcomes if outcome != "handled"), "handled")


def _own(rng: random.Random) -> str:
    paths = list(description()["paths"])
    weights = [20 if path.endswith("/infer") else 3 if "post" in description()["paths"][path] else 1 for path in paths]
    (path,) = rng.choices(paths, weights)  # most often those that take something apart
    method = rng.choice(list(description()["paths"][path])) if rng.random() < 0.9 else rng.choice(["put", "HEAD", "X"])
    described = description()["paths"][path].get(method, {})
    while "{" in path:
        before, _, rest = path.partition("{")
        value = "m" if rng.random() < 0.9 else str(rng.choice(ODD))
        path = before + quote(value, safe="", errors="replace") + rest.partition("}")[2]
    query = [f"{p['name']}={quote(str(rng.choice(ODD)), errors='replace')}" for p in described.get("parameters", ())
             if p["in"] == "query" and rng.random() < 0.5]  # fmt: skip
    body, kind = _body(rng, described)
    headers = {"Content-Type": kind} if kind else {}
    if rng.random() < 0.4:
        name = rng.choice(list(HEADERS))
        headers[name] = rng.choice(HEADERS[name])
    address = client().url.removeprefix("http://")
    connection = http.client.HTTPConnection(address, timeout=SECONDS)
    try:
        connection.request(method.upper(), f"{path}?{'&'.join(query)}", body, headers)
        answer = connection.getresponse()
        text = b"" if "events" in path and answer.status == 200 else answer.read()
        wrong = complaint(client(), answer.status, text)
    except TimeoutError:
        if not headers.keys() & {"Content-Length", "Transfer-Encoding", "Expect"}:  # else it waits for more of the body
            return f"bad: {method} {path} {headers} {body[:100]!r}: no answer"
        wrong = None
    except (http.client.HTTPException, OSError):
        wrong = complaint(client(), 0, b"")
    finally:
        connection.close()
    return "handled" if wrong is None else f"bad: {method} {path}?{query} {headers} {body[:300]!r}: {wrong}"


def _body(rng: random.Random, described: dict[str, Any]) -> tuple[bytes, str]:
    content = described.get("requestBody", {}).get("content", {})
    if described.get("operationId", "").endswith("infer_post"):
        return _tensors(rng)
    if not content:
        return (rng.randbytes(20) if rng.random() < 0.2 else b""), ""
    kind = rng.choice(list(content))
    if kind == "multipart/form-data":
        form = FORM % image()
        return damaged(form, rng) if rng.random() < 0.7 else form, "multipart/form-data; boundary=x"
    if kind == "image/*":
        return damaged(image(), rng) if rng.random() < 0.7 else image(), "image/png"
    fields = _fields(content[kind]["schema"])
    given = {name: rng.choice(ODD) for name in fields if rng.random() < 0.8}
    if rng.random() < 0.3:
        given[str(rng.choice(ODD))] = rng.choice(ODD)
    text = json.dumps(given if rng.random() < 0.9 else rng.choice(ODD)).encode()
    return damaged(text, rng) if rng.random() < 0.2 else text, "application/json"


def _fields(schema: dict[str, Any]) -> list[str]:
    if "$ref" in schema:
        schema = description()["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    return list(schema.get("properties", {}))


def _tensors(rng: random.Random) -> tuple[bytes, str]:
    """A request of the Open Inference Protocol with something odd somewhere."""
    given: dict[str, Any] = {
        "id": "1", "parameters": {}, "outputs": [{"name": "class", "parameters": {"binary_data": False}}],
        "inputs": [{"name": "image", "datatype": rng.choice(["BYTES"] * 4 + ["UINT8", "FP32"]), "shape": [1],
                    "parameters": {}, "data": ["aGk="]}],
    }  # fmt: skip
    if rng.random() < 0.2:
        del given["inputs"][0][rng.choice(["name", "datatype", "shape", "data"])]
    place = rng.choice([given, given["inputs"][0], given["outputs"][0], given["inputs"][0]["parameters"]])
    place[rng.choice([*place, "binary_data_size"])] = rng.choice(ODD)
    text = json.dumps(given).encode()
    return damaged(text, rng) if rng.random() < 0.2 else text, "application/json"


# ---------------------------------------------------------------------------------------------- schemathesis


@functools.cache
def _operations() -> list[Any]:
    import schemathesis

    return [operation.ok() for operation in schemathesis.openapi.from_dict(description()).get_all_operations()]


def _by_schemathesis(rng: random.Random) -> str:
    from hypothesis import HealthCheck, Phase, given, seed, settings
    from hypothesis.errors import Unsatisfiable
    from schemathesis import GenerationMode

    operation, wrong = rng.choice(_operations()), list[str]()
    mode = rng.choice([GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
    few = settings(
        max_examples=5, database=None, deadline=None, phases=[Phase.generate], suppress_health_check=[*HealthCheck]
    )

    @seed(rng.getrandbits(32))
    @few
    @given(case=operation.as_strategy(generation_mode=mode))
    def ask(case: Any) -> None:
        answer = case.call(base_url=client().url, timeout=SECONDS)
        if told := complaint(client(), answer.status_code, answer.content):
            wrong.append(f"{case.as_curl_command()}: {told}")

    try:
        ask()
    except Unsatisfiable:  # a route without anything that could be wrong
        return _own(rng)
    return f"bad: {wrong[0]}" if wrong else "handled"
