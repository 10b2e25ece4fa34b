# %% [markdown]
# # 11. N-gram drafts from an SSD
#
# **Question.** A table of what usually follows what can be as large as a disk and takes no accelerator memory.
# What does it add to a lookup in the text at hand, and what does reading it cost?
#
# **Watch for.** Which tier drafted the tokens that were accepted, and on which text. How little of a file the
# drafting reads. What the type of one scalar does to a search.
#
# **Takes.** about 20 s; needs numpy, tokenizers, safetensors, zstandard.
#
# **Words.** A table of order n lists, for n - 1 tokens in a row, which tokens followed them in a corpus, the most
# frequent first: order 2 is a bigram, 3 a trigram. A tier is one source of drafts. A page is 4096 bytes, the least
# that is read from a disk. Reading is warm when the operating system still holds the page in memory, else cold.
#
# **Leaves out.** What it gains on a real target, in seconds (demo 18). Trees: only the likeliest successor drafts.

# %%
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter

import console
from console import (NonNegative, OneOf, Within, assumptions, fmt_bytes, observe, print_table, print_text, progress,
                     record_samples)

import numpy as np

from decode_lab import Run, autoregressive_generate, speculative_generate
from lab.ngram import Corpus, disk, token_chunks, tokenizer
from lab import toy
from lab.ngram.counting import BREAK, build_table
from lab.ngram.table import PAGE, NgramTable, expected_pages
from lab.drafters.tiers import NgramDrafter, tier_name

Short = Within(8, 160)


@dataclass(frozen=True)
class Assumptions:
    target: OneOf(*toy.NAMES) = "large"                    # Trained toy that is the target.
    top_k: Within(1, 64) = 4                               # Successors kept for each context.
    orders: tuple[Within(2, 6), ...] = (2, 3, 4)           # Tables that are built, by the tokens of an n-gram.
    shares: tuple[Within(0.001, 1.0), ...] = (0.016, 0.063, 0.25, 1.0)   # Shares of the corpus, the last is used.
    prompts: Within(1, 256) = 6                                     # Prompts of held-out text, of each kind.
    prompt_tokens: Short = 32                              # Length of a prompt.
    new_tokens: Short = 64                                 # Greedy continuation of each.
    gamma: Within(1, 64) = 8                               # Longest draft.
    price: Within(0.0, 1.0) = 0.05                         # Chance of being accepted below which a token is not drafted.
    big_tokens: Within(10_000, 200_000_000) = 4_000_000    # Drawn tokens behind the table that is timed.
    big_vocabulary: Within(16, 200_000) = 49_152           # Their ids; so many rows has its bigram table.
    lookups: Within(10, 1_000_000) = 400                   # Lookups timed in each state, one at a time.
    seed: NonNegative = 0                                  # Of the drawn tokens and of the contexts looked up.


A = assumptions(Assumptions)
for sentence in toy.past_training(A.prompt_tokens + A.new_tokens):
    print_text(sentence)
OUT = console.out_folder()                                 # the tables stand there for a while

# %% [markdown]
# ## 1. What a table covers
#
# The corpus is part of what the toy learned from: the standard library's code, and the language reference. Its tables
# are asked for the next token at each place of text held out from it. "entry" is the share of places whose context is
# in the table, "right" the share of all places where its first successor is what follows, "in K" where one of its K is.


# %%
def chunks_of(kind: str) -> np.ndarray:
    """Token ids of a corpus, BREAK between documents."""
    return np.concatenate(list(token_chunks(Corpus([toy.corpus(kind)]), words.encode_batch)))


def build(order: int, tokens: np.ndarray, name: str, vocab_size: int, fingerprint: str) -> tuple[NgramTable, float]:
    """A table of these tokens, closed with the demo, and the seconds that building it took."""
    started = perf_counter()
    table = build_table(f"{folder}/{name}-{order}.ngram", [tokens], order=order, top_k=A.top_k, vocab_size=vocab_size,
                        tokenizer=fingerprint)
    return held.enter_context(table), perf_counter() - started


def covered(table: NgramTable, text: np.ndarray) -> np.ndarray:
    """(places, 3) for the places of a text whose next token a table of any order here can be asked for: whether its
    context has an entry, the first successor is right, one of the K is."""
    at = np.arange(max(A.orders) - 1, len(text))
    ids, counts, totals = table.rows(np.stack([text[at - n] for n in range(table.order - 1, 0, -1)], axis=1))
    hit = (ids == text[at, None]) & (counts > 0)
    return np.stack([totals > 0, hit[:, 0], hit.any(axis=1)], axis=1)


held = ExitStack()
# On the disk of the project: /tmp may be memory.
folder = held.enter_context(TemporaryDirectory(dir=OUT, prefix="ngram-"))
words, heldout = tokenizer("toy"), {kind: np.array(toy.encode(toy.heldout(kind))) for kind in toy.KINDS}
texts = {kind: chunks_of(kind) for kind in toy.KINDS}
tables, found, rows = {}, {}, []
for share in progress(A.shares, "building tables"):
    part = np.concatenate([np.append(ids[:int(share * len(ids))], np.uint32(BREAK)) for ids in texts.values()])
    for order in A.orders:
        table, seconds = build(order, part, f"{share:g}", words.vocab_size, words.fingerprint)
        tables[share, order] = table
        found[share, order] = {kind: covered(table, text).mean(axis=0) for kind, text in heldout.items()}
        rows.append([order, table.n_tokens, table.n_rows, table.nbytes / 1e6, table.n_tokens / seconds / 1e6,
                     *(x for kind in toy.KINDS for x in found[share, order][kind])])
heads = [f"{kind}: {what}" for kind in toy.KINDS for what in ("entry", "right", f"in {A.top_k}")]
print_table("growing", ["order", "tokens", "rows", "MB", "M tokens/s", *heads], rows, measured=["M tokens/s"],
            title="Tables of a growing corpus, on held-out text",
            formats={"MB": ".2f", "M tokens/s": ".1f"} | dict.fromkeys(heads, ".0%"))
top, low = max(A.orders), min(A.orders)
first, last = ({order: found[share, order]["code"] for order in A.orders} for share in (A.shares[0], A.shares[-1]))
observe("long-contexts-grow",
        "{n:.0f} times the corpus takes the share of places of code where order {top}'s first guess is right from {a:.1%} "
        "to {b:.1%}, and order {low}'s from {c:.1%} to {d:.1%}: the long contexts live off the corpus.",
        n=A.shares[-1] / A.shares[0], top=top, low=low, a=first[top][1], b=last[top][1], c=first[low][1],
        d=last[low][1], holds=last[top][1] - first[top][1] > last[low][1] - first[low][1])
before = found[A.shares[-1], sorted(A.orders)[-2]]["code"] if len(A.orders) > 1 else last[top]
observe("known-contexts",
        "Of the whole corpus, order {top} knows {x:.0%} of the contexts of held-out code, and is right in {y:.0%} of "
        "those; order {n}, {v:.0%} and {w:.0%}.", top=top, x=last[top][0], y=last[top][1] / last[top][0],
        n=sorted(A.orders)[-2:][0], v=before[0], w=before[1] / before[0],
        holds=last[top][0] <= before[0] and last[top][1] / last[top][0] >= before[1] / before[0])

# %% [markdown]
# ## 2. What is accepted, by tier
#
# The drafter asks its tiers in turn: what followed the longest match in the text at hand, then the tables, the
# highest order that has an entry, token by token. Every token keeps the name of its tier. The target decodes greedily
# after prompts from held-out code and prose; "again" is a text that stands above already, continuation included, and
# is asked for once more. "to 3" is the lookup with the tables of order 3 and less; they draft whatever there is. "priced"
# drafts a token only while its estimated chance of being accepted is worth a price: chances are learnt by tier, as
# rounds come back.

# %%
target = toy.load(A.target)
prompts = {kind: toy.prompts(kind, A.prompts, A.prompt_tokens) for kind in toy.KINDS}
written = [autoregressive_generate(target, prompt, A.new_tokens)[0].tolist() for prompt in prompts["code"]]
prompts["again"] = [[*text, toy.EOS, *prompt] for prompt, text in zip(prompts["code"], written)]
plain = {kind: [autoregressive_generate(target, prompt, A.new_tokens)[0] for prompt in each]
         for kind, each in prompts.items()}
by_order = sorted({*A.orders})
names = {order: tier_name(order) for order in by_order}
drafters = {"lookup": NgramDrafter(price=0), **{
    f"to {order}": NgramDrafter([tables[A.shares[-1], o] for o in by_order if o <= order], price=0) for order in by_order},
    "priced": NgramDrafter([tables[A.shares[-1], order] for order in by_order], price=A.price)}
rows, by_tier, runs, same = [], [], {}, []


def drafted(drafter: NgramDrafter, kind: str) -> Run:
    """The rounds on all prompts of a kind; in `same`, whether each text is that of plain decoding."""
    made = [speculative_generate(target, drafter, prompt, A.new_tokens, A.gamma) for prompt in prompts[kind]]
    same.extend(np.array_equal(a, b) for (a, _), b in zip(made, plain[kind]))
    return Run.pool([run for _, run in made])


for kind in ("again", *toy.KINDS):
    for name, drafter in progress(drafters.items(), f"drafting: {kind}"):
        run = runs[kind, name] = drafted(drafter, kind)
        rows.append([kind, name, len(run.rounds), run.drafted / len(run.rounds), run.alpha if run.drafted else None, run.tau])
        tiers = [run.by_source.get(tier, (0, 0)) for tier in ("lookup", *names.values())]
        by_tier.append([kind, name, *(x for t, a in tiers for x in (t, a / t if t else None))])
print_table("drafts",
            ["text", "tiers", "rounds", "drafts a round", "alpha", "tau"], rows, formats={"drafts a round": ".1f"} |
            dict.fromkeys(["alpha", "tau"], ".2f"), title=f"{A.prompts} prompts of each kind, gamma {A.gamma}, greedy")
heads = [f"{tier}: {what}" for tier in ("lookup", *names.values()) for what in ("tested", "kept")]
print_table("tiers",
            ["text", "tiers", *heads], by_tier, title="Drafted tokens that were tested, and the share accepted, by tier",
            formats=dict.fromkeys(heads[1::2], ".0%"))
grown = {share: [drafted(NgramDrafter([tables[share, order] for order in by_order], price=0), kind) for kind in toy.KINDS]
         for share in progress(A.shares, "a growing corpus")}
heads = [f"{kind}: {what}" for kind in toy.KINDS for what in ("tested", "kept", "tau")]
rows = []
for share, both in grown.items():
    tests = [[sum(run.by_source.get(tier, (0, 0))[i] for tier in names.values()) for i in (0, 1)] for run in both]
    rows.append([share, *(x for (t, a), run in zip(tests, both) for x in (t, a / t if t else None, run.tau))])
print_table("tiers-growing",
            ["share", *heads], rows, title="Tokens drafted by tables of a growing corpus that were tested, the share accepted",
            formats=dict.fromkeys(heads[1::3], ".0%") | dict.fromkeys(heads[2::3], ".2f"))
observe("same-text", "Each of {n} texts is that of plain greedy decoding.", n=len(same), holds=all(same))
tau = {key: run.tau for key, run in runs.items()}
observe("lookup-repeats",
        "A lookup pays where the text repeats itself: it alone brings {a:.2f} tokens a round on a text asked for again, "
        "{b:.2f} on fresh code and {c:.2f} on fresh prose.", a=tau["again", "lookup"], b=tau["code", "lookup"],
        c=tau["prose", "lookup"], holds=tau["again", "lookup"] > max(tau["code", "lookup"], tau["prose", "lookup"]))
free = list(drafters)[:-1]
gain = {name: [tau[kind, name] - tau[kind, before] for kind in ("again", *toy.KINDS)] for before, name in zip(free, free[1:])}
observe("orders-add",
        "What the table of each order adds, in tokens a round on the text asked for again, on code and on prose: {all}. The first "
        "table finds where nothing is left to copy; on fresh text the highest order adds less than the ones below it.",
        all="; ".join(f"{name[3:]}: " + ", ".join(f"{x:+.2f}" for x in more) for name, more in gain.items()),
        holds=len(gain) > 1 and all(sum(more[i] for more in gain.values()) > 2 * gain[free[-1]][i] for i in (1, 2)))
least, most = (grown[share] for share in (min(A.shares), max(A.shares)))
observe("corpus-adds",
        "{n:.0f} times the corpus brings {a:+.2f} tokens a round on code and {b:+.2f} on prose.", n=max(A.shares) / min(A.shares),
        **{k: y.tau - x.tau for k, x, y in zip("ab", least, most)},
        holds=all(y.tau > x.tau for x, y in zip(least, most)))
lost = {kind: tau[kind, free[-1]] - tau[kind, "priced"] for kind in ("again", *toy.KINDS)}
fewer = {kind: 1 - runs[kind, "priced"].drafted / runs[kind, free[-1]].drafted for kind in lost}
observe("price",
        "A price of {p:g} spares {x:.0%} of the drafted tokens on prose, and {v:.0%} on the text asked for again, for {y:.2f} "
        "and {w:.2f} tokens a round.", p=A.price, x=fewer["prose"], v=fewer["again"], y=lost["prose"], w=lost["again"],
        holds=fewer["prose"] > fewer["again"])

# %% [markdown]
# ## 3. Reading from the disk
#
# Larger tables, counted from tokens drawn uniformly, so that no context is more popular than another: the worst case
# for a cache. Mapped ("mmap"), a page is read when it is first touched; "ram" reads the whole file when it is opened.
# Before a cold reading the system is asked to drop the file from its cache (posix_fadvise).
#
# A bigram's row lies where its number says. A trigram is searched for among sorted keys, and every halving of P pages
# of keys touches another page, until what is left fits in one. The d-th halving has 2^d pages to touch, of which m
# searches touch 2^d (1 - (1 - 2^-d)^m): the first ones are shared by all. "told" adds those up, with the rows' pages
# and the checksums'. "in memory" is what the system says of the mapped file afterwards (mincore).

# %%
rng = np.random.default_rng(A.seed)
drawn = rng.integers(A.big_vocabulary, size=A.big_tokens, dtype=np.uint32)
big = {order: build(order, drawn, "drawn", A.big_vocabulary, "none")[0] for order in progress((2, 3), "building tables")}
starts = rng.integers(A.big_tokens - 1, size=A.lookups)
asked = {2: drawn[starts][:, None], 3: np.stack([drawn[starts], drawn[starts + 1]], axis=1)}


def one_by_one(table: NgramTable, contexts: list[list[int]]) -> float:
    """Seconds of a lookup, on average."""
    started = perf_counter()
    for context in contexts:
        table.best(context)
    return (perf_counter() - started) / len(contexts)


def batch(table: NgramTable, contexts: np.ndarray) -> float:
    """Seconds of looking all of them up at once."""
    started = perf_counter()
    table.rows(contexts)
    return perf_counter() - started


rows, one, many = [], {}, {}
for order, io in progress([(order, io) for order in big for io in ("mmap", "ram")], "reading"):
    big[order].close()
    contexts, state = asked[order].tolist(), "cold" if disk.evict(big[order].path) else "as it was"
    before, started = disk.io_use(), perf_counter()
    with NgramTable.open(big[order].path, io) as table:
        opened = perf_counter() - started
        for state, runs in ((state, 1), ("warm", 15)):
            seconds = [one_by_one(table, contexts) for _ in range(runs)]
            used, resident = disk.io_use() - before, table.resident()
            rows.append([order, io, state, 1e3 * opened if runs == 1 else None, 1e6 * median(seconds),
                         resident and resident[0], expected_pages(table, A.lookups) if io == "mmap" else None,
                         None if used.bytes_read is None else used.bytes_read / 1e6, used.major_faults])
            before = disk.io_use()
        one[order, io], contexts = median(seconds), np.resize(asked[order], (100_000, order - 1))
        many[order, io] = median(len(contexts) / batch(table, contexts) for _ in range(7))
        record_samples(f"seconds of a lookup, order {order}, {io}, warm", seconds)
timed = ["open, ms", "us a lookup", "pages in memory", "MB read", "faults"]
print_table("lookups", ["order", "file", "state", *timed[:3], "pages told", *timed[3:]], rows, measured=timed,
            title=f"{A.lookups} lookups in {fmt_bytes(big[2].nbytes)} of bigrams and {fmt_bytes(big[3].nbytes)} of trigrams; "
                  "faults are those that waited for the disk", formats={"open, ms": ".1f", "us a lookup": ".2f",
                  "pages told": ".0f", "MB read": ".2f"})
timed = ["one at a time, M/s", "in batches, M/s"]
print_table("batched",
            ["order", "file", *timed], [[*key, 1e-6 / one[key], many[key] / 1e6] for key in one], measured=timed,
            title=f"Warm rows a second, in batches of {len(contexts):,}", formats=dict.fromkeys(timed, ".2f"))
observe("single-fast",
        "Warm and one at a time, bigram rows come at {x:,.0f} a second from the mapped file and {y:,.0f} from memory, at "
        "least 500,000, and a trigram takes {v:.2f} us, at most 3.", x=1 / one[2, "mmap"], y=1 / one[2, "ram"],
        v=1e6 * one[3, "mmap"], measured=True,
        holds=max(one[2, "mmap"], one[2, "ram"]) <= 2e-6 and one[3, "mmap"] <= 3e-6)
observe("batches-fast",
        "In batches the mapped file gives {x:.1f} million bigram rows a second, at least 5, and {y:.1f} million trigram rows.",
        x=many[2, "mmap"] / 1e6, y=many[3, "mmap"] / 1e6, measured=True, holds=many[2, "mmap"] >= 5e6)
two, three = (expected_pages(big[order], A.lookups) / A.lookups for order in (2, 3))
observe("few-pages",
        "Of the trigrams' file {m} lookups touch {z:.1%}. A bigram costs {x:.2f} pages, a binary search {y:.2f}.", x=two,
        y=three, m=A.lookups, z=expected_pages(big[3], A.lookups) / (big[3].nbytes / PAGE), holds=three > 2 * two)

# %% [markdown]
# ## 4. The type of one scalar
#
# Keys are unsigned 64-bit numbers, and `searchsorted` compares in the type that both sides fit. A Python int beside them
# becomes a signed 64-bit one, and the type that holds both is float64: numpy then converts the whole array, at every
# search, and numbers above 2^53 are rounded. "wrong" counts searches that do not find where the number stands.

# %%
spread = np.unique(rng.integers(2 ** 62, size=big[3].n_rows, dtype=np.uint64))
sets, rows, took, wrong = {"spread": spread, "in a row": np.uint64(2 ** 60) + np.arange(len(spread), dtype=np.uint64)}, [], {}, {}
for kind, (name, keys) in ((kind, item) for kind in (int, np.int64, np.uint64) for item in sets.items()):
    wanted = rng.integers(len(keys), size=20)
    values = [kind(keys[i]) for i in wanted]
    started = perf_counter()
    at = [int(np.searchsorted(keys, value)) for value in values]
    took[kind, name], wrong[kind, name] = (perf_counter() - started) / len(values), int((at != wanted).sum())
    rows.append([kind.__name__, name, np.result_type(keys, np.asarray(values[0])).name, wrong[kind, name],
                 1e6 * took[kind, name]])
print_table("scalars", ["scalar", "keys", "compared as", "wrong", "us a search"], rows, measured=["us a search"],
            title=f"20 searches among {len(spread):,} keys of uint64, numpy {np.__version__}", formats={"us a search": ".1f"})
observe("python-int-wrong",
        "With a Python int a search takes {x:,.0f} times as long as with a np.uint64, and among numbers in a row above 2^53 "
        "{n} of 20 are wrong, with a np.uint64 {k}.", x=took[int, "spread"] / took[np.uint64, "spread"],
        n=wrong[int, "in a row"], k=wrong[np.uint64, "in a row"], measured=True,
        holds=took[int, "spread"] > 10 * took[np.uint64, "spread"] and not wrong[np.uint64, "in a row"])
held.close()
