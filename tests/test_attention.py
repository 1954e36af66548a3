"""Where a network looks: the attention of the class token in the last block."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from drawings import drawings

from vqprompt import Model
from vqprompt.product.model.features import attention
from vqprompt.product.model.pictures import Picture


@pytest.mark.parametrize("effort", ["instant", "good"])
def test_attention_is_that_of_the_network_that_answers(effort):
    images, names = drawings()
    taught = [images[names.index(name), row] for name in ("apple", "car") for row in range(4)]
    model = Model(size=28, device="cpu")
    model.learn(taught, ["apple"] * 4 + ["car"] * 4, effort=effort)
    network, seen = model.network, []
    last = network.vit.blocks[-1].attn
    hook = last.register_forward_hook(lambda block, given, out: seen.append((given[0], given[1])))
    patches, prompt, box = attention(network, Picture("a drawing", "", lambda: taught[0]))
    hook.remove()
    tokens, given_prompt = seen[0]
    width = tokens.shape[-1]
    queries, keys, _ = torch.nn.functional.linear(tokens, last.qkv.weight, last.qkv.bias).split(width, dim=-1)
    if given_prompt is not None:
        keys = torch.cat([given_prompt.chunk(2, dim=1)[0], keys], dim=1)
    expected = np.mean([
        torch.softmax(queries[0, 0, part] @ keys[0, :, part].T / 8, 0).numpy()
        for part in np.array_split(np.arange(width), last.heads)
    ], axis=0)  # fmt: skip
    assert width // last.heads == 64 and box == [0.0625, 0.0625, 0.9375, 0.9375], "the central part"
    assert np.allclose(np.ravel(patches), expected[-4:], atol=1e-6) and np.shape(patches) == (2, 2)
    assert prompt == pytest.approx(expected[:-5].sum(), abs=1e-6) and (prompt > 0) == (effort == "good")
