"""Backbones load from files in their published layouts, and compute what their authors define.

Every file is made here from random weights; the features to compare with are computed apart, in double, token by token.
"""

import argparse
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from vqprompt import Learner, Model
from vqprompt.core.backbones.load import fingerprint, load_backbone, save_backbone
from vqprompt.core.backbones.vit import ViTConfig
from vqprompt.core.backbones.weights import Weights
from vqprompt.core.errors import UserError
from vqprompt.core.onnx.vit import class_tokens_graph
from vqprompt.product.model.features import Features, attention
from vqprompt.product.model.pictures import Picture

WIDTH, DEPTH, HEADS, PATCH, SIDE, REGISTERS = 32, 3, 2, 7, 4, 3
SIZE, HIDDEN = PATCH * SIDE, 64


@pytest.fixture
def images():
    return torch.randn(3, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(1))


def plain_weights(registers=0, pre_norm=False, pooled=False, scaled=False) -> dict[str, torch.Tensor]:
    """Under timm's names, with one matrix each for queries, keys and values. scaled: with layer scale."""
    layers = {"norm": (WIDTH,)} | ({"norm_pre": (WIDTH,)} if pre_norm else {})
    for block in (f"blocks.{i}" for i in range(DEPTH)):
        layers |= {f"{block}.attn.{n}": (WIDTH, WIDTH) for n in ("query", "key", "value", "proj")}
        layers |= {f"{block}.mlp.fc1": (HIDDEN, WIDTH), f"{block}.mlp.fc2": (WIDTH, HIDDEN), f"{block}.norm2": (WIDTH,)}
        layers |= {f"{block}.norm1": (WIDTH,)}
    shapes = {f"{n}.weight": s for n, s in layers.items()} | {f"{n}.bias": s[:1] for n, s in layers.items()}
    shapes |= {"patch.weight": (WIDTH, 3, PATCH, PATCH), "patch.bias": (WIDTH,)}
    shapes |= {"pos": (SIDE**2, WIDTH)} if pooled else {"pos": (SIDE**2 + 1, WIDTH), "cls": (WIDTH,)}
    shapes |= {"registers": (registers, WIDTH)} if registers else {}
    shapes |= {f"blocks.{i}.ls{n}": (WIDTH,) for i in range(DEPTH) for n in (1, 2)} if scaled else {}
    generator = torch.Generator().manual_seed(0)
    return {n: torch.randn(s, generator=generator) * (0.3 if len(s) > 1 else 0.6) for n, s in shapes.items()}


def reference(weights, images, eps=1e-6, act="gelu", rope=False):
    p = {name: value.double() for name, value in weights.items()}
    acts = {
        "gelu": F.gelu,
        "tanh": lambda x: F.gelu(x, approximate="tanh"),
        "quick": lambda x: x * (1.702 * x).sigmoid(),
    }

    def norm(x, name):
        return F.layer_norm(x, (WIDTH,), p[f"{name}.weight"], p[f"{name}.bias"], eps)

    def linear(x, name):
        return x @ p[f"{name}.weight"].T + p[f"{name}.bias"]

    def mlp(x, block):
        return linear(acts[act](linear(x, f"{block}.mlp.fc1")), f"{block}.mlp.fc2")

    def turned(head, token, first):
        """A query or key [16] of one token: 4 frequencies each for rows and columns, twice; halves turn together."""
        if not rope or token < first:
            return head
        row, column = divmod(token - first, SIDE)
        angles = [
            2 * math.pi * (2 * (place + 0.5) / SIDE - 1) / 100 ** (4 * i / 16)
            for place in (row, column)
            for i in range(4)
        ]
        c, s = torch.tensor(angles).cos().tile(2), torch.tensor(angles).sin().tile(2)
        return head * c + torch.cat([-head[8:], head[:8]]) * s

    def attention(queries, keys, values, first):
        out = torch.zeros(len(queries), WIDTH, dtype=torch.double)
        for h in range(HEADS):
            part = slice(16 * h, 16 * h + 16)
            k = torch.stack([turned(key[part], i, first) for i, key in enumerate(keys)])
            for i, query in enumerate(queries):
                scores = k @ turned(query[part], i, first) / 4
                out[i, part] = scores.softmax(0) @ values[:, part]
        return out

    found = []
    for image in images.double():
        x = F.conv2d(image[None], p["patch.weight"], p["patch.bias"], stride=PATCH)[0].flatten(1).T
        if "cls" in p:
            x = torch.cat([p["cls"][None], x])
        x = x if rope else x + p["pos"]
        if "registers" in p:  # after positions were added: they have none
            x = torch.cat([x[:1], p["registers"], x[1:]])
        x = norm(x, "norm_pre") if "norm_pre.weight" in p else x
        first = 1 + len(p.get("registers", ()))
        for i in range(DEPTH):
            b = f"blocks.{i}"
            h = norm(x, f"{b}.norm1")
            h = attention(*(linear(h, f"{b}.attn.{n}") for n in ("query", "key", "value")), first)
            x = x + linear(h, f"{b}.attn.proj") * p.get(f"{b}.ls1", 1.0)
            x = x + mlp(norm(x, f"{b}.norm2"), b) * p.get(f"{b}.ls2", 1.0)
        x = norm(x, "norm")
        found.append(x[0] if "cls" in p else x.mean(0))
    return torch.stack(found)


def packed(weights, block, separator=".") -> dict[str, torch.Tensor]:
    return {
        f"{block}.attn.in_proj{separator}{part}": torch.cat(
            [weights[f"{block}.attn.{n}.{part}"] for n in ("query", "key", "value")]
        )
        for part in ("weight", "bias")
    }


def timm(weights, registers="reg_token", rows=True):
    """timm's and the authors' names; rows: positions have a row for the class token."""
    out = {"patch_embed.proj.weight": weights["patch.weight"], "cls_token": weights["cls"][None, None]}
    out |= {"patch_embed.proj.bias": weights["patch.bias"], "pos_embed": weights["pos"][None, 0 if rows else 1 :]}
    if not rows:
        out["cls_token"] = out["cls_token"] + weights["pos"][0]
    out |= {registers: weights["registers"][None]} if "registers" in weights else {}
    for name, value in weights.items():
        if name.startswith(("blocks", "norm")) and not any(f".attn.{n}." in name for n in ("query", "key", "value")):
            out[f"{name}.gamma" if ".ls" in name else name] = value
    for i in range(DEPTH):
        out |= {name.replace("in_proj.", "qkv."): v for name, v in packed(weights, f"blocks.{i}").items()}
    return out


def renamed(weights, names):
    out = {}
    for name, value in weights.items():
        for old, new in names.items():
            name = name.replace(old, new)
        out[name] = value
    return out


HF_BLOCKS = {
    "blocks.": "encoder.layers.",
    ".attn.query": ".self_attn.q_proj",
    ".attn.key": ".self_attn.k_proj",
    ".attn.value": ".self_attn.v_proj",
    ".attn.proj": ".self_attn.out_proj",
    ".norm1": ".layer_norm1",
    ".norm2": ".layer_norm2",
    "patch.": "embeddings.patch_embedding.",
    "pos": "embeddings.position_embedding.weight",
}


def without(weights, *names):
    return {name: value for name, value in weights.items() if name not in names}


def timm_in_half_precision_with_a_classifier():
    w = {name: value.half() for name, value in plain_weights().items()}
    return w, timm(w) | {"head.weight": torch.randn(5, WIDTH), "head.bias": torch.randn(5)}, {}, {}


def dino():
    return plain_weights(), timm(plain_weights()), {}, {}


def dino_with_what_training_needs():
    """The teacher counts."""
    w = plain_weights()
    head = {"head.mlp.0.weight": torch.randn(4, WIDTH), "head.last_layer.weight_g": torch.ones(6, 1)}
    student = {f"module.backbone.{k}": v + 1 for k, v in timm(w).items()} | {f"module.{k}": v for k, v in head.items()}
    file = {"student": student, "teacher": {f"backbone.{k}": v for k, v in timm(w).items()} | head, "epoch": 100}
    file |= {"optimizer": {"state": {}, "param_groups": []}, "args": argparse.Namespace(arch="vit_base", patch_size=16)}
    return w, file, {}, {}


def ibot_of_a_student():
    w = plain_weights()
    file = {f"module.backbone.{k}": v for k, v in timm(w).items()}
    file |= {
        "module.backbone.masked_embed": torch.zeros(1, WIDTH),
        "module.head.last_layer2.weight_v": torch.ones(2, 2),
    }
    return w, {"state_dict": file}, {}, {}


def dinov2_with_layer_scale():
    w = plain_weights(scaled=True)
    return w, timm(w) | {"mask_token": torch.zeros(1, WIDTH)}, {}, {}


def dinov2_with_blocks_in_one_chunk():
    w = plain_weights(scaled=True)
    return w, renamed(timm(w), {"blocks.": "blocks.0."}), {}, {}


def dinov2_with_blocks_in_several_chunks():
    w = plain_weights(scaled=True)
    chunked = {"blocks.0.": "blocks.0.0.", "blocks.1.": "blocks.1.1.", "blocks.2.": "blocks.1.2."}
    teacher = {f"backbone.{k}": v for k, v in renamed(timm(w), chunked).items()}
    teacher |= {"dino_head.mlp.0.weight": torch.ones(2, 2), "ibot_head.mlp.0.weight": torch.ones(2, 2)}
    return w, {"teacher": teacher}, {}, {}


TRANSFORMERS = {
    "blocks.": "encoder.layer.",
    ".attn.query": ".attention.attention.query",
    ".attn.key": ".attention.attention.key",
    ".attn.value": ".attention.attention.value",
    ".attn.proj": ".attention.output.dense",
    "patch.": "embeddings.patch_embeddings.projection.",
}


def of_transformers(w, names, more, prefix=""):
    file = renamed(without(w, "cls", "pos"), TRANSFORMERS | names) | more
    file |= {"embeddings.cls_token": w["cls"][None, None], "embeddings.position_embeddings": w["pos"][None]}
    return {prefix + k: v for k, v in file.items()} | {"classifier.weight": torch.ones(3, WIDTH)}


def vit_of_transformers(prefix=""):
    w, more = plain_weights(), {"pooler.dense.weight": torch.ones(2, 2)}
    names = {".norm1": ".layernorm_before", ".norm2": ".layernorm_after", "norm.": "layernorm."}
    names |= {".mlp.fc1": ".intermediate.dense", ".mlp.fc2": ".output.dense"}
    return w, of_transformers(w, names, more, prefix), {"eps": 1e-12}, {}


def vit_of_transformers_below_a_name():
    return vit_of_transformers("vit.")


def dinov2_of_transformers(prefix=""):
    w, more = plain_weights(scaled=True), {"embeddings.mask_token": torch.zeros(1, WIDTH)}
    names = {"norm.": "layernorm.", ".ls1": ".layer_scale1.lambda1", ".ls2": ".layer_scale2.lambda1"}
    return w, of_transformers(w, names, more, prefix), {}, {}


def dinov2_of_transformers_below_a_name():
    return dinov2_of_transformers("dinov2.")


def google():
    """With Flax's own axes: kernels input-first, heads as an axis of their own, so that nobody need say how many."""
    w, each = plain_weights(), WIDTH // HEADS
    file = {"cls": w["cls"][None, None], "Transformer/posembed_input/pos_embedding": w["pos"][None]}
    file |= {"embedding/kernel": w["patch.weight"].permute(2, 3, 1, 0), "embedding/bias": w["patch.bias"]}
    layers = {"norm": "Transformer/encoder_norm"}
    for i in range(DEPTH):
        b, ours = f"Transformer/encoderblock_{i}/", f"blocks.{i}."
        layers |= {f"{ours}norm1": f"{b}LayerNorm_0", f"{ours}norm2": f"{b}LayerNorm_2"}
        a = f"{b}MultiHeadDotProductAttention_1/"
        for n in ("query", "key", "value"):
            file |= {f"{a}{n}/kernel": w[f"{ours}attn.{n}.weight"].T.reshape(WIDTH, HEADS, each)}
            file |= {f"{a}{n}/bias": w[f"{ours}attn.{n}.bias"].reshape(HEADS, each)}
        file |= {f"{a}out/kernel": w[f"{ours}attn.proj.weight"].T.reshape(HEADS, each, WIDTH)}
        file |= {f"{a}out/bias": w[f"{ours}attn.proj.bias"]}
        for n in (1, 2):
            file |= {f"{b}MlpBlock_3/Dense_{n - 1}/kernel": w[f"{ours}mlp.fc{n}.weight"].T}
            file |= {f"{b}MlpBlock_3/Dense_{n - 1}/bias": w[f"{ours}mlp.fc{n}.bias"]}
    for ours, theirs in layers.items():
        file |= {f"{theirs}/scale": w[f"{ours}.weight"], f"{theirs}/bias": w[f"{ours}.bias"]}
    head = {"head/kernel": np.ones((WIDTH, 5)), "head/bias": np.ones(5), "pre_logits/kernel": np.ones((WIDTH, WIDTH))}
    return w, {name: value.numpy() for name, value in file.items()} | head, {}, {"heads": None}


def dinov2():
    return plain_weights(REGISTERS)


def dinov2_of_the_authors():
    w = dinov2()
    return w, timm(w, "register_tokens") | {"mask_token": torch.zeros(1, WIDTH)}, {}, {}


def dinov2_of_timm():
    w = dinov2()
    return w, timm(w, rows=False), {}, {}


def dinov3_weights():
    w = plain_weights(REGISTERS)
    return w | {f"blocks.{i}.attn.key.bias": torch.zeros(WIDTH) for i in range(DEPTH)}


def dinov3_of_the_authors():
    w = dinov3_weights()
    file = without(timm(w, "storage_tokens"), "pos_embed") | {
        "rope_embed.periods": torch.ones(4),
        "mask_token": torch.zeros(1, WIDTH),
    }
    mask = torch.tensor([1.0, 0.0, 1.0]).repeat_interleave(WIDTH)
    for i in range(DEPTH):  # what is masked may be anything
        file |= {f"blocks.{i}.attn.qkv.bias_mask": mask.clone()}
        file[f"blocks.{i}.attn.qkv.bias"] = file[f"blocks.{i}.attn.qkv.bias"] + 7 * (1 - mask)
    return w, file, {"eps": 1e-5, "rope": True}, {}


def dinov3_of_transformers():
    w = dinov3_weights()
    names = {
        "blocks.": "layer.",
        ".attn.query": ".attention.q_proj",
        ".attn.key": ".attention.k_proj",
        ".attn.value": ".attention.v_proj",
        ".attn.proj": ".attention.o_proj",
        ".fc1": ".up_proj",
        ".fc2": ".down_proj",
        "patch.": "embeddings.patch_embeddings.",
    }
    file = renamed(without(w, "pos", "cls", "registers", *(f"blocks.{i}.attn.key.bias" for i in range(DEPTH))), names)
    for i in range(DEPTH):
        file |= {f"layer.{i}.layer_scale{n}.lambda1": torch.ones(WIDTH) for n in (1, 2)}
    file |= {"embeddings.cls_token": w["cls"][None, None], "embeddings.register_tokens": w["registers"][None]}
    return w, file, {"eps": 1e-5, "rope": True}, {}


def clip_weights():
    return plain_weights(pre_norm=True) | {"patch.bias": torch.zeros(WIDTH)}


def clip_of_openai():
    w = clip_weights()
    names = {
        "blocks.": "transformer.resblocks.",
        ".norm1": ".ln_1",
        ".norm2": ".ln_2",
        ".fc1": ".c_fc",
        ".fc2": ".c_proj",
        "norm_pre": "ln_pre",
        "norm.": "ln_post.",
        "patch.weight": "conv1.weight",
        ".attn.proj": ".attn.out_proj",
    }
    plain = {k: v for k, v in w.items() if not any(f".attn.{n}." in k for n in ("query", "key", "value"))}
    file = renamed(without(plain, "patch.bias", "pos", "cls"), names)
    for i in range(DEPTH):
        file |= {k.replace("blocks", "transformer.resblocks"): v for k, v in packed(w, f"blocks.{i}", "_").items()}
    file |= {"class_embedding": w["cls"], "positional_embedding": w["pos"], "proj": torch.randn(WIDTH, 8)}
    text = {"transformer.resblocks.0.ln_1.weight": torch.ones(5), "text_projection": torch.ones(5, 8)}
    return w, {f"visual.{k}": v for k, v in file.items()} | text, {"eps": 1e-5, "act": "quick"}, {}


def clip_of_transformers():
    w = clip_weights()
    file = renamed(
        without(w, "patch.bias", "cls"), HF_BLOCKS | {"norm.": "post_layernorm.", "norm_pre": "pre_layrnorm"}
    )
    file = {f"vision_model.{k}": v for k, v in file.items()} | {"vision_model.embeddings.class_embedding": w["cls"]}
    text = {"text_model.encoder.layers.0.mlp.fc1.bias": torch.ones(5), "visual_projection.weight": torch.ones(8, WIDTH)}
    return w, file | text, {"eps": 1e-5, "act": "quick"}, {}


def clip_of_laion():
    w, file, _, _ = clip_of_openai()
    return w, file, {"eps": 1e-5}, {"gelu": ""}


def siglip():
    w = plain_weights(pooled=True)
    file = renamed(w, HF_BLOCKS | {"norm.": "post_layernorm."}) | {"head.probe": torch.ones(1, 1, WIDTH)}
    text = {"text_model.head.weight": torch.ones(3), "logit_scale": torch.ones(1)}
    return w, {f"vision_model.{k}": v for k, v in file.items()} | text, {"act": "tanh"}, {}


def moco():
    w = plain_weights()
    file = {f"module.base_encoder.{k}": v for k, v in timm(w).items()} | {
        "module.base_encoder.head.0.weight": torch.ones(2, 2)
    }
    file |= {f"module.momentum_encoder.{k}": v + 1 for k, v in timm(w).items()} | {
        "module.predictor.0.weight": torch.ones(2)
    }
    return w, {"epoch": 300, "state_dict": file}, {}, {}


def mae():
    w = plain_weights()
    decoder = {
        "decoder_pos_embed": torch.ones(1, 17, 8),
        "decoder_blocks.0.norm1.weight": torch.ones(8),
        "mask_token": torch.ones(1, 1, 8),
    }
    return w, timm(w) | decoder, {}, {}


FILES = {  # and under which names they are published, where these say something
    timm_in_half_precision_with_a_classifier: "",
    dino: "dino_vitbase16_pretrain.pth",
    dino_with_what_training_needs: "checkpoint.pth",
    ibot_of_a_student: "checkpoint_student.pth",
    dinov2_with_layer_scale: "dinov2.pth",
    dinov2_with_blocks_in_one_chunk: "dinov2.pth",
    dinov2_with_blocks_in_several_chunks: "teacher_checkpoint.pth",
    vit_of_transformers: "",
    vit_of_transformers_below_a_name: "",
    dinov2_of_transformers: "",
    dinov2_of_transformers_below_a_name: "",
    google: "B_16.npz",
    dinov2_of_the_authors: "",
    dinov2_of_timm: "",
    dinov3_of_the_authors: "",
    dinov3_of_transformers: "",
    clip_of_openai: "",
    clip_of_transformers: "",
    clip_of_laion: "",
    siglip: "",
    moco: "vit-s-300ep.pth.tar",
    mae: "",
}
MEANS = dict.fromkeys((dino, dino_with_what_training_needs, dinov2_of_transformers), (0.485, 0.456, 0.406))
MEANS |= dict.fromkeys((vit_of_transformers, google), (0.5, 0.5, 0.5))


def write(made, tmp_path):
    """As a file of the published kind, and what to say when it is loaded."""
    _, file, _, stated = made()
    path = tmp_path / (FILES[made] or f"{made.__name__}.safetensors")
    if path.suffix == ".safetensors":
        save_file({name: value.contiguous() for name, value in file.items()}, path)
    else:
        np.savez(path, **file) if path.suffix == ".npz" else torch.save(file, path)
    return path, {name: value for name, value in {"heads": HEADS, **stated}.items() if value is not None}


@pytest.mark.filterwarnings("ignore:.*guessed")
@pytest.mark.parametrize("made", FILES, ids=lambda made: made.__name__)
def test_features_are_those_that_the_authors_define(made, tmp_path, images):
    weights, _, how, _ = made()
    path, overrides = write(made, tmp_path)
    vit = load_backbone(path, SIZE, overrides)
    torch.testing.assert_close(vit(images).double(), reference(weights, images, **how), rtol=5e-4, atol=5e-4)
    assert not vit.training and not any(p.requires_grad or p.dtype != torch.float32 for p in vit.parameters())
    config = vit.config
    assert (config.width, config.depth, config.patch, config.image_size) == (WIDTH, DEPTH, PATCH, SIZE)
    assert (config.mlp_ratio, config.heads, config.eps) == (HIDDEN / WIDTH, HEADS, how.get("eps", 1e-6))
    assert config.mean == MEANS.get(made, config.mean)
    save_backbone(vit, tmp_path / "again.safetensors")
    again = load_backbone(tmp_path / "again.safetensors")
    assert again.config == vit.config and torch.equal(again(images), vit(images))


@pytest.mark.filterwarnings("ignore:.*guessed")
@pytest.mark.parametrize(
    "made", [dinov2_of_timm, dinov3_of_transformers, clip_of_openai, siglip], ids=lambda made: made.__name__
)
def test_what_is_not_plain_is_learned_with_but_never_silently_computed_as_if_it_were(made, tmp_path):
    path, overrides = write(made, tmp_path)
    vit = load_backbone(path, SIZE, overrides)
    weights = Weights(vit.config, {name: value.numpy() for name, value in vit.state_dict().items()})
    with pytest.raises(UserError, match="which no ONNX graph computes"):
        class_tokens_graph(weights, 32, 0.0, 1)
    plain = ViTConfig(
        **{name: getattr(vit.config, name) for name in ("width", "depth", "heads", "patch", "image_size")}
    )
    assert vit.config.particular and not plain.particular
    prompts = {0: torch.randn(1, 4, WIDTH)}
    tokens = vit.embed(torch.randn(2, 3, SIZE, SIZE))
    for placement in ("after", "before", "tokens"):
        changed = vit.encode(tokens, prompts, placement, class_tokens=(-1, -2))
        assert changed.shape == (2, 2 * WIDTH) and not torch.allclose(
            changed, vit.encode(tokens, class_tokens=(-1, -2))
        )
    assert sum(len(layer) for layer in vit.layers()) == len(list(vit.parameters()))


def test_a_model_is_taught_with_a_backbone_that_only_pytorch_computes(tmp_path, images):
    path, overrides = write(dinov2_of_the_authors, tmp_path)
    save_backbone(load_backbone(path, SIZE, overrides), tmp_path / "registers.safetensors")
    pictures = [(image * 50 + 128).clamp(0, 255).byte().permute(1, 2, 0).numpy() for image in images]
    model = Model(tmp_path / "registers.safetensors", device="cpu")
    model.learn(pictures[:1], "one")
    model.learn(pictures[1:], "two")
    model.save(tmp_path / "model.vqp")
    assert Model.load(tmp_path / "model.vqp").predict(pictures[0]) == "one"
    network = Features(load_backbone(tmp_path / "registers.safetensors"), 0.0)
    parts, prompts, _ = attention(network, Picture("noise", "", lambda: pictures[0]))
    assert prompts == 0 and 0 < sum(map(sum, parts)) < 1, "registers are neither prompts nor parts of the image"


def test_plain_backbones_keep_the_fingerprints_that_files_name():
    assert fingerprint(load_backbone("vit-s14")) == "64187b76e01004e6"


def test_a_raw_query_needs_a_class_token(tmp_path):
    path, overrides = write(siglip, tmp_path)
    learner = Learner(load_backbone(path, SIZE, overrides), "evoprompt", tasks=1, device="cpu", compile="off")
    with pytest.raises(UserError, match="query=normed"):
        learner.vit.query(learner.vit.embed(torch.randn(1, 3, SIZE, SIZE)))
