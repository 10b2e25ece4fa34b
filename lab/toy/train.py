"""Trains the toy family and its tokenizer on text that every Python ships.

    python -m lab.toy.train                    everything, resuming where an earlier run stopped
    python -m lab.toy.train   --only large     one model

Code is the standard library's (without its tests), prose is `pydoc_data.topics`, the language reference. The files
and topics named in HELD_OUT_CODE and HELD_OUT_PROSE are never trained on, and a paragraph of prose that also stands
in a held-out topic is dropped from the training text. Writes beside this file, each through a temporary name:

    tokenizer.json             byte-level BPE, 1,024 tokens, <|end|> = 0 between documents
    NAME.safetensors           float16 parameters, with the configuration in the header
    heldout_code.txt, heldout_prose.txt   so that every Python version evaluates on the same text
    corpus_code.jsonl.zst, corpus_prose.jsonl.zst   some of the training text, for tables of n-grams
    NAME.log.jsonl             one line per evaluation: step, tokens, loss, held-out loss by kind of text

Checkpoints and the growing log go to out/train/ (not tracked); a model's files are written here when it is finished.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import re
import sysconfig
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
import zstandard
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from lab import toy
from lab.support.files import replacing
from lab.toy.transformer import Config, init_params

HERE = Path(__file__).resolve().parent / "weights"
WORK = Path(__file__).resolve().parents[2] / "out" / "train"
HELD_OUT_CODE = ("textwrap.py", "fractions.py", "heapq.py", "csv.py", "queue.py", "shelve.py", "sched.py",
                 "graphlib.py", "configparser.py", "json/decoder.py", "zipapp.py", "cmd.py")
HELD_OUT_PROSE = ("with", "try", "lambda", "atom-identifiers", "context-managers", "naming",
                  "operator-summary", "attribute-access", "integers", "numbers", "if", "while", "raise", "del")
SKIPPED = ("encodings", "test", "tests", "idle_test", "site-packages", "lib2to3", "pydoc_data", "__pycache__",
           "ensurepip")
EOS = "<|end|>"
CONTEXT, BATCH = toy.TRAINED_LENGTH, 16
CORPUS_BYTES = 4_000_000                             # of code; of prose there is less, and all is taken

# name -> (configuration, steps, how many of them decay the learning rate, exits trained beside the last layer)
FAMILY = {
    "small": (Config(hidden=32, n_layers=3, n_heads=2, n_kv_heads=1, head_dim=16, ffn=80), 4800, 1920, ()),
    "medium": (Config(hidden=64, n_layers=4, n_heads=4, n_kv_heads=2, head_dim=16, ffn=176), 3400, 1000, ()),
    "large": (Config(), 3400, 1000, ()),
    "large-exit": (Config(), 3400, 1000, (1, 2, 3)),
}


# -- text --------------------------------------------------------------------------------------------------

def read_text():
    """-> training documents {"code": [...], "prose": [...]}, held-out documents of the same form."""
    import pydoc_data.topics as topics
    root = Path(sysconfig.get_path("stdlib"))
    train: dict[str, list[str]] = {"code": [], "prose": []}
    held: dict[str, list[str]] = {"code": [], "prose": []}
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if any(part in SKIPPED for part in path.relative_to(root).parts) or name.startswith("_sysconfigdata"):
            continue
        text = path.read_text(encoding="utf-8", errors="ignore")
        if text.isascii() and len(text) > 200:
            (held if name in HELD_OUT_CODE else train)["code"].append(text)
    held["prose"] = [topics.topics[name] for name in HELD_OUT_PROSE]
    seen = {p for text in held["prose"] for p in paragraphs(text)}
    for name, text in sorted(topics.topics.items()):
        if name not in HELD_OUT_PROSE:
            fresh = [p for p in paragraphs(text) if p not in seen]
            seen.update(fresh)                       # topics quote each other: a paragraph is trained on once
            if fresh:
                train["prose"].append("\n\n".join(fresh) + "\n")
    return train, held


def paragraphs(text):
    return [p.rstrip() for p in re.split(r"\n\s*\n", text) if p.strip()]


def corpus(texts):
    """Texts up to CORPUS_BYTES in all, in an order drawn once, as JSON Lines compressed by zstandard."""
    taken, n = [], 0
    for text in random.Random(0).sample(texts, len(texts)):
        if n + len(text) <= CORPUS_BYTES:
            taken.append(json.dumps({"text": text}) + "\n")
            n += len(text)
    return zstandard.ZstdCompressor(level=22).compress("".join(taken).encode())


def train_tokenizer(documents):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        # Runs of spaces stay together (indentation is most of what code repeats); digits are single tokens.
        pre_tokenizers.Split(pattern=Regex(
            r"\n[ ]*| ?[A-Za-z_]+|[0-9]| ?[^\sA-Za-z_0-9]+|[ ]+(?=[^ ])|\s+"), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(documents, trainers.BpeTrainer(
        vocab_size=1024, special_tokens=[EOS], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False))
    return tokenizer


def encode(tokenizer, documents):
    ids = []
    for text in documents:
        ids += [0, *tokenizer.encode(text).ids]
    return np.array([*ids, 0], np.int64)


# -- the same model in torch -------------------------------------------------------------------------------

def flatten(params):
    """{"layers": [{"wq": ...}]} -> {"layers.0.wq": ...}, the names in the files."""
    flat = {"embed": params["embed"], "norm": params["norm"]}
    for i, layer in enumerate(params["layers"]):
        flat.update({f"layers.{i}.{name}": w for name, w in layer.items()})
    return flat


def norm(x, weight, eps):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def forward(p, config, tokens, exits=()):
    """{n_layers: logits (B, T, V)} of the last layer, and of each number of layers in `exits`."""
    c, (b, n) = config, tokens.shape
    half = c.head_dim // 2
    angle = torch.arange(n, dtype=torch.float64)[:, None] * c.rope_theta ** (-torch.arange(half) / half)
    cos, sin = angle.cos().float(), angle.sin().float()

    def heads(x, rotate):
        x = x.view(b, n, -1, c.head_dim).transpose(1, 2)
        if rotate:
            left, right = x[..., :half], x[..., half:]
            x = torch.cat([left * cos - right * sin, right * cos + left * sin], -1)
        return x

    x, out = p["embed"][tokens], {}
    for i in range(c.n_layers):
        w = {name: p[f"layers.{i}.{name}"] for name in ("attn_norm", "wq", "wk", "wv", "wo", "ffn_norm", "w_gate",
                                                        "w_up", "w_down")}
        h = norm(x, w["attn_norm"], c.norm_eps)
        y = F.scaled_dot_product_attention(heads(h @ w["wq"], True), heads(h @ w["wk"], True),
                                           heads(h @ w["wv"], False), is_causal=True, enable_gqa=True)
        x = x + y.transpose(1, 2).reshape(b, n, -1) @ w["wo"]
        h = norm(x, w["ffn_norm"], c.norm_eps)
        x = x + (F.silu(h @ w["w_gate"]) * (h @ w["w_up"])) @ w["w_down"]
        if i + 1 in exits or i + 1 == c.n_layers:
            out[i + 1] = norm(x, p["norm"], c.norm_eps) @ p["embed"].T
    return out


# -- training ----------------------------------------------------------------------------------------------

def train(name, streams, held, tokenizer_id):
    config, steps, decay, exits = FAMILY[name]
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    p = {k: torch.nn.Parameter(torch.from_numpy(w)) for k, w in flatten(init_params(config, seed=0)).items()}
    matrices = [w for k, w in p.items() if k.startswith("layers") and w.ndim == 2]
    others = [w for k, w in p.items() if not (k.startswith("layers") and w.ndim == 2)]
    optimizers = [torch.optim.Muon(matrices, lr=0.02, momentum=0.95, weight_decay=0.01),
                  torch.optim.AdamW(others, lr=0.004, betas=(0.9, 0.95), weight_decay=0.0)]
    rates = [o.param_groups[0]["lr"] for o in optimizers]
    step, seconds = 0, 0.0
    checkpoint = WORK / f"{name}.pt"
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=False)
        step, seconds = state["step"], state["seconds"]
        rng.bit_generator.state = state["rng"]
        with torch.no_grad():
            for k, w in p.items():
                w.copy_(state["params"][k])
        for o, s in zip(optimizers, state["optimizers"]):
            o.load_state_dict(s)
        print(f"{name}: resuming at step {step}", flush=True)

    def batch():
        rows = []
        for _ in range(BATCH):
            stream = streams["prose" if rng.random() < 0.15 else "code"]
            at = rng.integers(len(stream) - CONTEXT - 1)
            rows.append(stream[at:at + CONTEXT + 1])
        return torch.from_numpy(np.stack(rows))

    started = time.perf_counter()
    smooth = None
    while step < steps:
        scale = min(1.0, (step + 1) / 100, (steps - step) / decay)       # warm up, hold, decay to nothing
        for o, rate in zip(optimizers, rates):
            o.param_groups[0]["lr"] = rate * scale
        tokens = batch()
        # One early exit per step, drawn at random: the same gradient in expectation as all three, at a third of the
        # cost (LayerSkip, arXiv 2404.16710, rotates its exits in the same spirit).
        chosen = [int(rng.choice(exits))] if exits else []
        with torch.autocast("cpu", torch.bfloat16):
            logits = forward(p, config, tokens[:, :-1], chosen)
        losses = {k: F.cross_entropy(v.flatten(0, 1).float(), tokens[:, 1:].flatten()) for k, v in logits.items()}
        loss = losses[config.n_layers] + 0.5 * sum(losses[k] for k in chosen)
        for o in optimizers:
            o.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(others, 1.0)
        for o in optimizers:
            o.step()
        step += 1
        last = losses[config.n_layers].item()
        smooth = last if smooth is None else 0.98 * smooth + 0.02 * last
        if step % 200 == 0 or step == steps:
            seconds += time.perf_counter() - started
            started = time.perf_counter()
            row = {"model": name, "params": config.n_params(), "step": step, "of": steps,
                   "tokens": step * BATCH * CONTEXT, "seconds": round(seconds, 1), "loss": round(smooth, 4),
                   **{f"held_{kind}": round(evaluate(p, config, ids), 4) for kind, ids in held.items()},
                   "torch": torch.__version__, "python": platform.python_version()}
            log(row)
            print(row, flush=True)
            replace(checkpoint, lambda path: torch.save(
                {"step": step, "seconds": seconds, "rng": rng.bit_generator.state,
                 "params": {k: w.detach() for k, w in p.items()},
                 "optimizers": [o.state_dict() for o in optimizers]}, path))
    # Only a finished model replaces the one in the repository.
    toy.save(name, {k: w.detach().numpy() for k, w in p.items()}, config, tokenizer_id)
    log_text = (WORK / f"{name}.log.jsonl").read_text()
    replace(HERE / f"{name}.log.jsonl", lambda path: Path(path).write_text(log_text))


@torch.no_grad()
def evaluate(p, config, ids):
    """Mean next-token loss (nats per token) over windows of CONTEXT tokens."""
    n = (len(ids) - 1) // CONTEXT
    x = torch.from_numpy(ids[:n * CONTEXT].reshape(n, CONTEXT))
    y = torch.from_numpy(ids[1:n * CONTEXT + 1].reshape(n, CONTEXT))
    return F.cross_entropy(forward(p, config, x)[config.n_layers].flatten(0, 1), y.flatten()).item()


def log(row):
    """Append to the model's log; an interrupted run's rows past the checkpoint are replaced."""
    path = WORK / f"{row['model']}.log.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    rows = [r for r in rows if r["step"] < row["step"]] + [row]
    replace(path, lambda p: Path(p).write_text("".join(json.dumps(r) + "\n" for r in rows)))


def replace(path, write):
    with replacing(path) as temporary:
        write(temporary)


def _save(path, array) -> None:
    """np.save to this very name: given a path it would add ".npy"."""
    with open(path, "wb") as file:
        np.save(file, array)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=list(FAMILY), nargs="+", default=list(FAMILY))
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    WORK.mkdir(parents=True, exist_ok=True)
    documents, held_documents = read_text()
    if not (HERE / "tokenizer.json").exists():
        tokenizer = train_tokenizer(documents["code"] + documents["prose"] * 3)
        replace(HERE / "tokenizer.json", lambda p: tokenizer.save(str(p)))
        for kind, texts in held_documents.items():
            replace(HERE / f"heldout_{kind}.txt", lambda p: Path(p).write_text(toy.DOCUMENT_BREAK.join(texts)))
        for kind, texts in documents.items():
            replace(HERE / f"corpus_{kind}.jsonl.zst", lambda p: Path(p).write_bytes(corpus(texts)))
    tokenizer = toy.tokenizer()
    print({kind: (len(texts), sum(map(len, texts))) for kind, texts in documents.items()}, flush=True)
    streams = {}
    for kind, texts in documents.items():
        cached = WORK / f"{kind}.npy"
        if not cached.exists():
            replace(cached, lambda p: _save(p, encode(tokenizer, texts)))
        streams[kind] = np.load(cached)
    held = {kind: encode(tokenizer, toy.heldout(kind).split(toy.DOCUMENT_BREAK))[:20 * 1024] for kind in documents}
    print({kind: len(ids) for kind, ids in streams.items()}, {k: len(v) for k, v in held.items()}, flush=True)
    for name in args.only:
        train(name, streams, held, toy.tokenizer_id())


if __name__ == "__main__":
    main()
