"""Weights of the authors' code: files that are written here with their keys and orders compute the same with our parts.

Names and orders of eloialonso/iris @ 24326aa and vmicheli/delta-iris @ f8d4173, with random weights.
"""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import rl_lab
from rl_lab.errors import CheckpointError, ConfigError
from rl_lab.records import ActMode
from tests.workflows.iris_case import SIDE, composed, make_batch, make_workflow

Tensors = dict[str, torch.Tensor]


class Writer:
    """Collects random tensors under the authors' keys."""

    def __init__(self) -> None:
        self.tensors: Tensors = {}
        self.generator = torch.Generator().manual_seed(0)

    def random(self, *shape: int) -> torch.Tensor:
        fan = math.prod(shape[1:]) if len(shape) > 1 else 4
        return torch.randn(shape, generator=self.generator) / fan**0.5

    def layer(self, key: str, *shape: int) -> None:
        self.tensors[f"{key}.weight"] = self.random(*shape)
        self.tensors[f"{key}.bias"] = 0.1 * self.random(shape[0])

    def norm(self, key: str, width: int) -> None:
        self.tensors[f"{key}.weight"] = 1.0 + 0.1 * self.random(width)
        self.tensors[f"{key}.bias"] = 0.1 * self.random(width)

    def lstm(self, key: str, inputs: int, units: int) -> None:
        for name, width in (("ih", inputs), ("hh", units)):
            self.tensors[f"{key}.weight_{name}"] = self.random(4 * units, width)
            self.tensors[f"{key}.bias_{name}"] = 0.1 * self.random(4 * units)

    def head(self, key: str, dim: int, outputs: int) -> None:
        self.layer(f"{key}.head_module.0", dim, dim)
        self.layer(f"{key}.head_module.2", outputs, dim)
        self.tensors[f"{key}.indices"] = torch.arange(3)


def iris_file(words: dict[str, Any]) -> Tensors:
    """An agent of eloialonso/iris; words: its sizes, as in ours for debug=tiny."""
    w = Writer()
    width, latent, code, codes, dim = (words[k] for k in ("depth", "latent", "code", "codes", "dim"))

    def block(key: str) -> None:
        for n in (1, 2):
            w.norm(f"{key}.norm{n}", width)
            w.layer(f"{key}.conv{n}", width, width, 3, 3)

    def attention(key: str) -> None:
        w.norm(f"{key}.norm", width)
        for name in ("q", "k", "v", "proj_out"):
            w.layer(f"{key}.{name}", width, width, 1, 1)

    levels = words["levels"]
    for half, side, blocks, scale in (("encoder", "down", 2, "downsample"), ("decoder", "up", 3, "upsample")):
        begin = f"tokenizer.{half}"
        w.layer(f"{begin}.conv_in", width, 3 if half == "encoder" else latent, 3, 3)
        for level in range(levels):
            for n in range(blocks):
                block(f"{begin}.{side}.{level}.block.{n}")
                if SIDE >> level in words["attention"]:
                    attention(f"{begin}.{side}.{level}.attn.{n}")
            if level != (levels - 1 if half == "encoder" else 0):
                w.layer(f"{begin}.{side}.{level}.{scale}.conv", width, width, 3, 3)
        block(f"{begin}.mid.block_1")
        attention(f"{begin}.mid.attn_1")
        block(f"{begin}.mid.block_2")
        w.norm(f"{begin}.norm_out", width)
        w.layer(f"{begin}.conv_out", latent if half == "encoder" else 3, width, 3, 3)
    w.layer("tokenizer.pre_quant_conv", code, latent, 1, 1)
    w.layer("tokenizer.post_quant_conv", latent, code, 1, 1)
    w.tensors["tokenizer.embedding.weight"] = w.random(codes, code)
    w.tensors["tokenizer.lpips.net.slice1.0.weight"] = w.random(2, 3, 3, 3)
    m = "world_model"
    w.tensors[f"{m}.pos_emb.weight"] = w.random(words["blocks"] * (words["tokens"] + 1), dim)
    w.tensors[f"{m}.embedder.embedding_tables.0.weight"] = w.random(3, dim)
    w.tensors[f"{m}.embedder.embedding_tables.1.weight"] = w.random(codes, dim)
    for n in range(words["layers"]):
        key = f"{m}.transformer.blocks.{n}"
        w.norm(f"{key}.ln1", dim)
        w.norm(f"{key}.ln2", dim)
        for name in ("key", "query", "value", "proj"):
            w.layer(f"{key}.attn.{name}", dim, dim)
        w.tensors[f"{key}.attn.mask"] = torch.ones(4, 4).tril()
        w.layer(f"{key}.mlp.0", 4 * dim, dim)
        w.layer(f"{key}.mlp.2", dim, 4 * dim)
    w.norm(f"{m}.transformer.ln_f", dim)
    for name, outputs in (("observations", codes), ("rewards", 3), ("ends", 2)):
        w.head(f"{m}.head_{name}", dim, outputs)
    widths = [3, *words["trunk"]]
    for n, (before, after) in enumerate(pairwise(widths)):
        w.layer(f"actor_critic.conv{n + 1}", after, before, 3, 3)
    units = words["units"]
    w.lstm("actor_critic.lstm", widths[-1] * (SIDE >> len(words["trunk"])) ** 2, units)
    w.layer("actor_critic.critic_linear", 1, units)
    w.layer("actor_critic.actor_linear", 3, units)
    return w.tensors


WIDTHS, HALVE = (1, 2), (True, False)


def delta_file(words: dict[str, Any]) -> Tensors:
    """An agent of vmicheli/delta-iris."""
    w = Writer()
    grid, n = SIDE // 2, words["tokens_side"]

    def residual(key: str, before: int, after: int) -> None:
        w.norm(f"{key}.f.0", before)
        w.layer(f"{key}.f.2", after, before, 3, 3)
        w.norm(f"{key}.f.3", after)
        w.layer(f"{key}.f.5", after, after, 3, 3)
        if before != after:
            w.layer(f"{key}.skip_projection", after, before, 1, 1)

    def encoder(key: str, channels: int, width: int, latent: int) -> None:
        w.layer(f"{key}.0", width, channels, 3, 3)
        residual(f"{key}.1", width, width)
        w.layer(f"{key}.2.conv", width, width, 2, 2)
        residual(f"{key}.3", width, 2 * width)
        w.norm(f"{key}.4", 2 * width)
        w.layer(f"{key}.6", latent, 2 * width, 3, 3)

    def decoder(key: str, width: int, inputs: int) -> None:
        w.layer(f"{key}.0", 2 * width, inputs, 3, 3)
        residual(f"{key}.1", 2 * width, width)
        w.layer(f"{key}.2.conv", width, width, 3, 3)
        residual(f"{key}.3", width, width)
        w.norm(f"{key}.4", width)
        w.layer(f"{key}.6", 3, width, 3, 3)

    t, m, a = "tokenizer", "world_model", "actor_critic.model"
    latent, code, codes = words["latent"], words["code"], words["codes"]
    encoder(f"{t}.encoder.encoder", 7, words["depth"], latent)
    encoder(f"{t}.frame_cnn.encoder", 3, words["frame_depth"], words["frame_latent"])
    decoder(f"{t}.decoder.decoder", words["depth"], latent + 4 + words["frame_latent"])
    w.tensors[f"{t}.encoder_act_emb.weight"] = w.random(3, SIDE**2)
    w.tensors[f"{t}.decoder_act_emb.weight"] = w.random(3, 4 * grid**2)
    patch = latent * (grid // n) ** 2
    w.layer(f"{t}.quantizer.pre_quant_proj", code, patch)
    w.layer(f"{t}.quantizer.post_quant_proj", patch, code)
    w.tensors[f"{t}.quantizer.num_codebook_updates"] = torch.tensor(7)
    w.tensors[f"{t}.quantizer.codebook"] = F.normalize(w.random(codes, code), dim=-1)
    w.tensors[f"{t}.quantizer.codewords_freqs"] = torch.full((codes,), 1.0 / codes)
    dim = words["image_latent"] * grid**2
    encoder(f"{m}.frame_cnn.0.encoder", 3, words["image_depth"], words["image_latent"])
    w.norm(f"{m}.frame_cnn.2", dim)
    w.tensors[f"{m}.act_emb.weight"] = w.random(3, dim)
    w.tensors[f"{m}.latents_emb.weight"] = w.random(codes, dim)
    w.tensors[f"{m}.transformer.pos_emb.weight"] = w.random(words["blocks"] * (n * n + 2), dim)
    for layer in range(words["layers"]):
        key = f"{m}.transformer.blocks.{layer}"
        w.norm(f"{key}.sa.ln", dim)
        w.norm(f"{key}.mlp.ln", dim)
        for name in ("query", "key", "value", "attention.proj"):
            w.layer(f"{key}.sa.{name}", dim, dim)
        w.tensors[f"{key}.sa.mask"] = torch.ones(4, 4).tril().bool()
        w.layer(f"{key}.mlp.mlp.0", 4 * dim, dim)
        w.layer(f"{key}.mlp.mlp.2", dim, 4 * dim)
    w.norm(f"{m}.transformer.ln", dim)
    for name, outputs in (("latents", codes), ("rewards", 3), ("ends", 2)):
        w.head(f"{m}.head_{name}", dim, outputs)
    for copy in (a, "actor_critic.target_model"):
        encoder(f"{copy}.cnn.0.encoder", 3, words["trunk_depth"], words["trunk_latent"])
        w.lstm(f"{copy}.lstm", words["trunk_latent"] * grid**2, words["units"])
        w.layer(f"{copy}.critic_linear", words["bins"] or 1, words["units"])
        w.layer(f"{copy}.actor_linear", 3, words["units"])
    return w.tensors


FILES = {"iris": iris_file, "delta_iris": delta_file}


def sizes(kind: str) -> dict[str, Any]:
    config = composed(kind)
    size = dict(config.algorithm.size.items())
    return {**size, "blocks": config.algorithm.blocks, "attention": ()}


def write_file(kind: str, file: Path) -> Tensors:
    tensors = FILES[kind](sizes(kind))
    torch.save(tensors, file)
    return tensors


def loaded(kind: str) -> tuple[Any, Tensors]:
    """A small workflow with the weights of a file, and that file's tensors."""
    workflow = make_workflow(kind)
    tensors = FILES[kind](sizes(kind))
    state = workflow.published_weights(tensors)
    for part, weights in {**state["components"], **state["controllers"]}.items():
        getattr(workflow, part).load_state_dict(weights)
    return workflow, tensors


def their_transformer(x: torch.Tensor, t: Tensors, kind: str, heads: int, layers: int) -> torch.Tensor:
    """Pre-norm blocks with the authors' keys: (B, T, D) -> (B, T, D)."""

    def linear(x: torch.Tensor, key: str) -> torch.Tensor:
        return F.linear(x, t[f"{key}.weight"], t[f"{key}.bias"])

    def norm(x: torch.Tensor, key: str) -> torch.Tensor:
        return F.layer_norm(x, x.shape[-1:], t[f"{key}.weight"], t[f"{key}.bias"])

    one, attention, project, two, mlp, last = {
        "iris": ("ln1", "attn", "attn.proj", "ln2", "mlp", "ln_f"),
        "delta_iris": ("sa.ln", "sa", "sa.attention.proj", "mlp.ln", "mlp.mlp", "ln"),
    }[kind]
    for n in range(layers):
        key = f"world_model.transformer.blocks.{n}"
        h = norm(x, f"{key}.{one}")
        q, k, v = (
            linear(h, f"{key}.{attention}.{name}").unflatten(-1, (heads, -1)).transpose(1, 2)
            for name in ("query", "key", "value")
        )
        scores = (q @ k.transpose(-2, -1)) / q.shape[-1] ** 0.5
        future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        h = (scores.masked_fill(future, -torch.inf).softmax(-1) @ v).transpose(1, 2).flatten(2)
        x = x + linear(h, f"{key}.{project}")
        h = F.gelu(linear(norm(x, f"{key}.{two}"), f"{key}.{mlp}.0"))
        x = x + linear(h, f"{key}.{mlp}.2")
    return norm(x, f"world_model.transformer.{last}")


def their_head(x: torch.Tensor, t: Tensors, name: str) -> torch.Tensor:
    key = f"world_model.head_{name}.head_module"
    hidden = F.relu(F.linear(x, t[f"{key}.0.weight"], t[f"{key}.0.bias"]))
    return F.linear(hidden, t[f"{key}.2.weight"], t[f"{key}.2.bias"])


@torch.no_grad()
def test_iris_computes_the_same():
    workflow, t = loaded("iris")
    tokenizer, model = workflow.tokenizer, workflow.world_model
    tokens, action = torch.randint(16, (2, 3, 4)), torch.randint(3, (2, 3))
    ours = model.read(model.embed(tokens, action), None).flatten(1, 2)
    w = "world_model.embedder.embedding_tables"
    x = torch.cat([t[f"{w}.1.weight"][tokens], t[f"{w}.0.weight"][action].unsqueeze(2)], 2).flatten(1, 2)
    x = x + t["world_model.pos_emb.weight"][: x.shape[1]]
    theirs = their_transformer(x, t, "iris", 2, 1)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(
        model.token_head(ours), their_head(theirs, t, "observations"), atol=1e-5, rtol=1e-4
    )
    frame = torch.rand(2, 3, SIDE, SIDE)
    grid = F.conv2d(
        tokenizer.encoder(frame * 2 - 1),
        t["tokenizer.pre_quant_conv.weight"],
        t["tokenizer.pre_quant_conv.bias"],
    )
    table = t["tokenizer.embedding.weight"]
    distances = (grid.permute(0, 2, 3, 1).unsqueeze(-2) - table).square().sum(-1)
    assert torch.equal(tokenizer.encode(frame), distances.argmin(-1).flatten(1))
    first = t["tokenizer.encoder.down.1.block.0.conv1.weight"]
    assert any(torch.equal(value, first) for value in tokenizer.state_dict().values())


@torch.no_grad()
def test_delta_iris_computes_the_same():
    """The orders of flattened images differ: the tokens, the transformer's stream, the policy's LSTM."""
    workflow, t = loaded("delta_iris")
    tokenizer, model, policy = workflow.tokenizer, workflow.world_model, workflow.actor_critic
    before, after, action = torch.rand(2, 3, SIDE, SIDE), torch.rand(2, 3, SIDE, SIDE), torch.randint(3, (2,))
    plane = t["tokenizer.encoder_act_emb.weight"][action].view(2, 1, SIDE, SIDE)
    z = tokenizer.encoder(torch.cat([before, plane, after], 1))  # (2, latent, 8, 8)
    n, p = tokenizer.tokens_side, tokenizer.patch
    patches = z.unflatten(3, (n, p)).unflatten(2, (n, p)).permute(0, 2, 4, 3, 5, 1)  # b h w k l c
    key = "tokenizer.quantizer"
    vectors = F.linear(
        patches.flatten(3).flatten(1, 2), t[f"{key}.pre_quant_proj.weight"], t[f"{key}.pre_quant_proj.bias"]
    )
    tokens = (F.normalize(vectors, dim=-1) @ t[f"{key}.codebook"].t()).argmax(-1)
    assert torch.equal(tokenizer.encode(after, before, action), tokens)
    back = F.linear(
        t[f"{key}.codebook"][tokens], t[f"{key}.post_quant_proj.weight"], t[f"{key}.post_quant_proj.bias"]
    )
    image = back.view(2, n, n, p, p, -1).permute(0, 5, 1, 3, 2, 4).reshape(2, -1, n * p, n * p)
    planes = t["tokenizer.decoder_act_emb.weight"][action].view(2, 4, n * p, n * p)
    made = tokenizer.decoder(torch.cat([tokenizer.frame_net(before), planes, image], 1))
    torch.testing.assert_close(
        tokenizer.decode(tokens, before, action), (made.clamp(0, 1) * 255).round() / 255, atol=1e-5, rtol=0
    )

    images = model.frame_net(before).permute(0, 2, 3, 1).flatten(1)  # channel last
    key = "world_model.frame_cnn.2"
    image = F.layer_norm(images, images.shape[-1:], t[f"{key}.weight"], t[f"{key}.bias"])
    x = torch.cat([image.unsqueeze(1), t["world_model.act_emb.weight"][action].unsqueeze(1)], 1)
    x = torch.cat([x, t["world_model.latents_emb.weight"][tokens]], 1)
    x = x + t["world_model.transformer.pos_emb.weight"][: x.shape[1]]
    theirs = their_transformer(x, t, "delta_iris", 2, 1)
    embedded = model.embed(model.encode_frames(before).unsqueeze(1), action.unsqueeze(1), tokens.unsqueeze(1))
    ours = model.read(embedded, None).flatten(1, 2)
    for head, name in (
        (model.token_head, "latents"),
        (model.reward_head, "rewards"),
        (model.end_head, "ends"),
    ):
        torch.testing.assert_close(head(ours), their_head(theirs, t, name), atol=1e-5, rtol=1e-4)

    features = policy.trunk.net(before).permute(0, 2, 3, 1).flatten(1)
    key, zeros = "actor_critic.model.lstm", torch.zeros(2, policy.units)
    gates = F.linear(features, t[f"{key}.weight_ih"], t[f"{key}.bias_ih"] + t[f"{key}.bias_hh"])
    enter, _, new, leave = gates.chunk(4, -1)
    h = torch.sigmoid(leave) * torch.tanh(torch.sigmoid(enter) * torch.tanh(new))
    torch.testing.assert_close(policy.observe(before, {"h": zeros, "c": zeros})["h"], h, atol=1e-5, rtol=1e-4)


QUIET = ["logging.progress=off", "logging.tensorboard=false", "debug=tiny", "environment.workers=0"]
NEVER = ["training.evaluate.every_env_steps=null", "training.report.every_env_steps=null"]


@pytest.mark.parametrize("kind", ["iris", "delta_iris"])
def test_run_from_published_weights(kind: str, tmp_path: Path):
    """`load.path` reads the file; the run folder then serves evaluation, play and the dream report."""
    file = tmp_path / "last.pt"
    tensors = write_file(kind, file)
    words = [
        *QUIET,
        *NEVER,
        "environment.side=16",
        f"load.path={file}",
        "phases=collect",
        "training.total_timesteps=40",
    ]
    if kind == "iris":
        words += ["algorithm.size.levels=4", "algorithm.size.tokens=4"]
    run = rl_lab.train(f"{kind}_catch", [*words, f"run_dir={tmp_path / 'run'}"])
    agent = rl_lab.load_agent(run.path, device="cpu")
    last = "actor_critic.actor_linear.bias" if kind == "iris" else "actor_critic.model.actor_linear.bias"
    assert torch.equal(agent.workflow.actor_critic.actor.bias, tensors[last])
    state = agent.workflow.dream_start(make_batch(2, 2))
    action, state = agent.workflow.dream_act(state, ActMode())
    _, step = agent.workflow.dream_step(state, action, generator=torch.Generator().manual_seed(0))
    assert step.obs["image"].shape == (2, 3, 16, 16)
    assert rl_lab.load_agent(run.path, device="cpu").load(file)  # also into an agent


def test_wrong_files(tmp_path: Path):
    workflow = make_workflow("iris")
    tensors = iris_file(sizes("iris"))
    with pytest.raises(ConfigError, match="weights of IRIS, but the run is Δ-IRIS"):
        make_workflow("delta_iris").published_weights(tensors)
    del tensors["world_model.pos_emb.weight"]
    with pytest.raises(CheckpointError, match=r"lacks world_model\.pos_emb\.weight"):
        workflow.published_weights(tensors)
    with pytest.raises(ConfigError, match="neither IRIS nor Δ-IRIS"):
        workflow.published_weights({"policy.weight": torch.zeros(1)})
