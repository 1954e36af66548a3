"""Weights files that lie about their size or shape, go in circles, or do not arrive whole."""

import hashlib
import http.server
import io
import json
import threading
import zipfile
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from test_published_layouts import HEADS, WIDTH, google
from test_weights import STATED, refusal, small_ibot, timm_checkpoint

from vqprompt.core.backbones.load import load_backbone
from vqprompt.core.backbones.registry import BACKBONES, WeightsError
from vqprompt.core.backbones.vit import ViTConfig
from vqprompt.core.errors import UserError

pytestmark = pytest.mark.filterwarnings("ignore:.*mean and std are guessed")


def test_a_state_that_contains_itself(tmp_path):
    circle: dict = {"epoch": 3}
    circle["model"] = {"state_dict": circle}
    assert "in a circle" in refusal(tmp_path, circle, "a.pth")


@pytest.mark.parametrize(
    ("number", "part"), [("999999999", "norm1.weight"), ("9" * 5000, "norm1.weight"), ("257", "ls1.gamma")]
)
@pytest.mark.parametrize("layer_scale", [True, False])
def test_an_absurd_block_number(tmp_path, number, part, layer_scale):
    message = refusal(tmp_path, timm_checkpoint(layer_scale) | {f"blocks.{number}.{part}": torch.ones(WIDTH)})
    assert f"block {number[:9]}" in message and "at most 256 blocks" in message and len(message) < 600


@pytest.mark.parametrize(
    ("stated", "words"),
    [
        ({"depth": 10**9}, r"depth: .* less than or equal to 256 \(given: 1000000000\); state the right values"),
        ({"width": 10**12}, r"width: .* less than or equal to 16384 \(given: 1000000000000\)"),
        ({"image_size": 10**9}, r"image_size: .* \(given: 1000000000\)"),
        ({"heads": 0}, r"heads: .* greater than or equal to 1 \(given: 0\)"),
        ({"patch": -4}, r"patch: .* \(given: -4\)"),
        ({"depth": "12"}, r"depth: .* valid integer \(given: '12'\)"),
        ({"width": "12", "heads": 4}, r"width: .* valid integer \(given: '12'\)"),
        ({"mlp_ratio": 1e300}, r"mlp_ratio: .* less than 1000 \(given: 1e\+300\)"),
        ({"eps": float("nan")}, r"eps: .* finite number \(given: nan\)"),
        ({"mean": 3}, r"mean: .* \(given: 3\)"),
        ({"std": [0, 1, 1]}, r"std\.0: .* greater than 0 \(given: 0\)"),
        ({"mean": ["a"] * 3}, r"mean\.0: .* valid number \(given: 'a'\)"),
        ({"mean": [0.1] * 10**4}, r"mean: .* at most 3 items .*…"),
        ({"gelu": "best"}, r"gelu: .* \(given: 'best'\)"),
    ],
)
def test_a_config_that_no_vit_has(tmp_path, stated, words):
    save_file(timm_checkpoint(), tmp_path / "a.safetensors", metadata={"config": json.dumps(STATED | stated)})
    with pytest.raises(WeightsError, match=words):
        load_backbone(tmp_path / "a.safetensors")


@pytest.mark.parametrize("config", ["[" * 100_000, "[1, 2]", "9" * 5000, "null", '{"a":' * 50_000, "{"])
def test_metadata_that_cannot_be_read(tmp_path, config):
    save_file(timm_checkpoint(), tmp_path / "a.safetensors", metadata={"config": config})
    with pytest.raises(WeightsError, match=r"a\.safetensors: ") as caught:
        load_backbone(tmp_path / "a.safetensors", config_overrides=STATED)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("key", ["pos_embed", "norm.weight", "blocks.0.mlp.fc1.weight"])
def test_a_shape_larger_than_the_data(tmp_path, key):
    """One number, shown as a billion: nothing is allocated for them."""
    checkpoint = timm_checkpoint()
    checkpoint[key] = torch.ones(1).expand(*([100_000] * checkpoint[key].ndim))
    assert f"{key} claims the shape (100000" in refusal(tmp_path, checkpoint, "a.pth")


@pytest.mark.parametrize("key", ["patch_embed.proj.weight", "blocks.0.norm1.bias"])
def test_a_tensor_without_numbers(tmp_path, key):
    checkpoint = timm_checkpoint()
    checkpoint[key] = torch.zeros((0,) * checkpoint[key].ndim)
    assert f"{key!r}: no numbers in it" in refusal(tmp_path, checkpoint)


def test_a_sparse_tensor(tmp_path):
    message = refusal(tmp_path, timm_checkpoint() | {"norm.weight": torch.ones(WIDTH).to_sparse()}, "a.pth")
    assert "norm.weight" in message or "refused" in message


def test_an_array_that_claims_terabytes(tmp_path):
    np.savez(tmp_path / "whole.npz", **google()[1])
    with zipfile.ZipFile(tmp_path / "whole.npz") as whole, zipfile.ZipFile(tmp_path / "a.npz", "w") as lying:
        for info in whole.infolist():
            data = whole.read(info)
            if info.filename == "cls.npy":
                buffer = io.BytesIO()
                header = {"descr": "<f4", "fortran_order": False, "shape": (10**12, 1, WIDTH)}
                np.lib.format.write_array_header_1_0(buffer, header)
                data = buffer.getvalue() + data[128:]
            lying.writestr(info.filename, data)
    with pytest.raises(WeightsError, match=r"a\.npz: damaged or incomplete .*1000000000000|\(32000000000000,\)|EOF"):
        load_backbone(tmp_path / "a.npz")


def test_an_array_that_unpacks_to_far_more(tmp_path):
    np.savez_compressed(tmp_path / "a.npz", **google()[1], bomb=np.zeros(100 << 20, np.uint8))
    with pytest.raises(WeightsError, match=r"refused: it unpacks from .* MB to .* MB, which weights do not"):
        load_backbone(tmp_path / "a.npz")


@pytest.mark.parametrize("name", ["x" * 300, "a\0b.pth", "~nobody-here/x.pth"])
def test_a_name_that_cannot_be(name):
    with pytest.raises(WeightsError, match=r"neither a file nor one of the backbones"):
        load_backbone(name)


def test_a_size_that_cannot_be_computed_with():
    with pytest.raises(UserError, match=r"image size 14000 makes 1,000,000 patches of 14 px.*choose 3584 or less"):
        load_backbone("vit-s14", size=14_000)
    with pytest.raises(UserError, match=r"choose 3584 or less"):
        ViTConfig(image_size=14_000)


# --- a backbone with a server of its own ---


@pytest.fixture
def server(tmp_path, monkeypatch):
    """iBOT's file on this machine, served over HTTP; yields its content, to be changed."""
    small_ibot(monkeypatch)
    buffer = io.BytesIO()
    torch.save({"state_dict": timm_checkpoint()}, buffer)
    served = {"data": buffer.getvalue(), "claims": None, "asked": 0}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            served["asked"] += 1
            self.send_response(200)
            self.send_header("Content-Length", str(served["claims"] or len(served["data"])))
            self.end_headers()
            self.wfile.write(served["data"])

        def log_message(self, *given):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http_server:
        threading.Thread(target=http_server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{http_server.server_port}/checkpoint_teacher.pth"
        monkeypatch.setitem(BACKBONES, "ibot-b16", replace(BACKBONES["ibot-b16"], url=url))
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        yield served
        http_server.shutdown()


def test_ibot_downloads_by_itself_and_once(server, home):
    first = load_backbone("ibot-b16")
    second = load_backbone("ibot-b16")
    assert server["asked"] == 1 and first.config.heads == HEADS and torch.equal(first.pos_embed, second.pos_embed)
    assert [p.name for p in (home / "backbones").iterdir()] == ["ibot-b16.pth"]


@pytest.mark.parametrize("right", [True, False])
def test_a_known_checksum_is_held_against_it(server, home, monkeypatch, right):
    checksum = f"sha256:{hashlib.sha256(server['data'] + (b'' if right else b'x')).hexdigest()}"
    monkeypatch.setitem(BACKBONES, "ibot-b16", replace(BACKBONES["ibot-b16"], checksum=checksum))
    if right:
        assert load_backbone("ibot-b16").config.heads == HEADS
    else:
        with pytest.raises(WeightsError, match=r"has the sha256 .*, not .*\n.*Fetch checkpoint_teacher.pth"):
            load_backbone("ibot-b16")
        assert not list((home / "backbones").iterdir())


def test_a_download_that_breaks_off_leaves_nothing(server, home):
    server["claims"] = len(server["data"]) + 1000
    with pytest.raises(WeightsError, match=r"ibot-b16 is not on this machine and could not be downloaded"):
        load_backbone("ibot-b16")
    assert not list((home / "backbones").iterdir())
