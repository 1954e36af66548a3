"""What `vqprompt serve` costs, with real HTTP clients on localhost.

    python benchmarks/serving.py                  # everything; about ten minutes on two cores
    python benchmarks/serving.py --requests 500   # quicker

- throughput: images per second over HTTP, against what `predict` does with the same files in the same run. The two take
  turns, so that whatever else the machine does is shared out evenly.
- latency of one request at a time, while the server is idle and while it learns a class
- many requests from 50 clients: answers that were lost, and answers that were not those of the model
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from statistics import median

import numpy as np
from teaching import photographs

CLIENTS = 50
PREDICT = """
import sys, time
from vqprompt import Model
model = Model.load(sys.argv[1])
for line in sys.stdin:
    files = line.rstrip("\\n").split("\\t")
    started = time.monotonic()
    for start in range(0, len(files), 64):
        model.try_answers(files[start:start + 64], top=5)
    print(time.monotonic() - started, flush=True)
"""


class Server:
    def __init__(self, model: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "vqprompt", "serve", str(model), "--port", "0"], stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        ready = next(line for line in self.process.stdout if line.startswith("ready"))
        self.host, self.port = ready.split()[-1].removeprefix("http://").strip("/").split(":")

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(self.host, int(self.port), timeout=300)

    def close(self) -> None:
        self.process.terminate()
        self.process.wait()


def ask(connection: http.client.HTTPConnection, image: bytes) -> dict:
    connection.request("POST", "/predict?top=5", image, {"Content-Type": "image/jpeg"})
    answer = connection.getresponse()
    body = answer.read()
    return json.loads(body) if answer.status == 200 else {"status": answer.status}


def from_many_clients(server: Server, images: list[bytes], clients: int) -> tuple[float, list[dict | None]]:
    """Seconds, and the answers in order; None for one that never came."""
    answers: list[dict | None] = [None] * len(images)
    numbers = iter(range(len(images)))
    lock = threading.Lock()

    def work() -> None:
        connection = server.connect()
        while True:
            with lock:
                number = next(numbers, None)
            if number is None:
                return
            try:
                answers[number] = ask(connection, images[number])
            except (OSError, http.client.HTTPException):
                connection.close()

    threads = [threading.Thread(target=work) for _ in range(clients)]
    started = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.monotonic() - started, answers


def latencies(server: Server, images: list[bytes], going_on) -> list[float]:
    """Seconds of requests, one after another, as long as something is going on."""
    connection, found = server.connect(), []
    while going_on(len(found)):
        started = time.monotonic()
        assert "name" in ask(connection, images[len(found) % len(images)])
        found.append(time.monotonic() - started)
    return found


def shown(seconds: list[float]) -> str:
    p50, p99 = (1000 * float(np.quantile(seconds, q)) for q in (0.5, 0.99))
    return f"p50 {p50:.0f} ms, p99 {p99:.0f} ms ({len(seconds)} requests)"


def teach(server: Server, images: list[Path]) -> str:
    """Start to teach; returns the job's id."""
    parts = [b'--x\r\nContent-Disposition: form-data; name="label"\r\n\r\nnew class\r\n']
    for image in images:
        head = f'--x\r\nContent-Disposition: form-data; name="files"; filename="{image.name}"\r\n\r\n'
        parts += [head.encode(), image.read_bytes(), b"\r\n"]
    connection = server.connect()
    body = b"".join([*parts, b"--x--\r\n"])
    connection.request("POST", "/models/m/teach", body, {"Content-Type": "multipart/form-data; boundary=x"})
    return json.loads(connection.getresponse().read())["id"]


def is_running(server: Server, job: str) -> bool:
    connection = server.connect()
    connection.request("GET", f"/jobs/{job}")
    return json.loads(connection.getresponse().read())["state"] in ("queued", "running")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=112)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--images", type=int, default=128, help="per round of the comparison")
    parser.add_argument("--learned", type=int, default=150, help="images of the class that is learned meanwhile")
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from vqprompt import Model

    with tempfile.TemporaryDirectory() as folder:
        photographs(Path(folder) / "photos", 5, 8, 320)
        model = Model(size=arguments.size)
        model.learn(Path(folder) / "photos")
        path = model.save(Path(folder) / "m.vqp")
        files = sorted((Path(folder) / "photos").rglob("*.jpg"))
        images = [file.read_bytes() for file in files]
        expected = [dict(a.classes) for a in model.answers([str(f) for f in files], top=5)]
        server = Server(path)
        predicting = subprocess.Popen(
            [sys.executable, "-c", PREDICT, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        try:
            print(f"{arguments.size} px, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}", flush=True)
            compare(server, predicting, files, images, arguments.images, arguments.rounds)
            idle = latencies(server, images, lambda n: n < 200)
            print(f"latency while idle: {shown(idle)}", flush=True)
            new = sorted(photographs(Path(folder) / "new", 1, arguments.learned, 320, start=9).rglob("*.jpg"))
            job = teach(server, new)
            busy = latencies(server, images, lambda n: is_running(server, job))
            print(f"latency while a class of {len(new)} images is learned: {shown(busy)}", flush=True)
            undo = server.connect()
            undo.request("POST", "/models/m/undo", b"{}", {"Content-Type": "application/json"})
            job = json.loads(undo.getresponse().read())["id"]
            while is_running(server, job):
                time.sleep(0.05)
            chosen = np.random.default_rng(0).integers(0, len(images), arguments.requests)
            seconds, answers = from_many_clients(server, [images[i] for i in chosen], CLIENTS)
            lost = sum(a is None or "name" not in a for a in answers)
            wrong = sum(
                a is not None and "name" in a and not same(a, expected[i])
                for a, i in zip(answers, chosen, strict=True)
            )  # fmt: skip
            print(
                f"{len(answers)} requests from {CLIENTS} clients: {lost} lost, {wrong} wrong, "
                f"{len(answers) / seconds:.1f} per second"
            )
        finally:
            server.close()
            predicting.kill()


def same(answer: dict, expected: dict[str, float]) -> bool:
    found = {c["name"]: c["probability"] for c in answer["classes"]}
    return found.keys() == expected.keys() and all(abs(found[n] - expected[n]) < 1e-4 for n in found)


def compare(server: Server, predicting, files: list[Path], images: list[bytes], count: int, rounds: int) -> None:
    ratios = []
    for turn in range(rounds + 1):  # the first one warms up
        chosen = [i % len(images) for i in range(count)]
        predicting.stdin.write("\t".join(str(files[i]) for i in chosen) + "\n")
        predicting.stdin.flush()
        alone = count / float(predicting.stdout.readline())
        seconds, _ = from_many_clients(server, [images[i] for i in chosen], 32)
        if turn:
            ratios.append(count / seconds / alone)
            print(f"predict {alone:.1f} images/s, over HTTP {count / seconds:.1f}: {ratios[-1]:.0%}", flush=True)
    print(f"throughput over HTTP: {median(ratios):.0%} of predict's own (median of {rounds})", flush=True)


if __name__ == "__main__":
    main()
