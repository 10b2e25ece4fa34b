# %% [markdown]
# # 11. N-gram drafts from an SSD
#
# **Question.** A table that says which token usually comes next can be kept on a disk. What does it
# add to a lookup in the text at hand, and what does reading it cost?
#
# **Watch for.** On which text the tables' drafts are accepted. How little of a large file is read.
#
# **Takes.** about 12 s; needs numpy, tokenizers, safetensors, zstandard.
#
# **Leaves out.** Seconds on a real target (demo 18). Trees: only the likeliest successor drafts.

# %%
from dataclasses import dataclass

from console import (BadInput, NonNegative, OneOf, Within, assumptions, observe, out_folder,
                     print_table, print_text, progress, record_samples)

import numpy as np

from decode_lab import Run, autoregressive_generate, speculative_generate
from lab import toy
from lab.drafters.tiers import NgramDrafter
from lab.measure.known_texts import KnownText
from lab.measure.spread import disturbed
from lab.ngram import tokenizer
from lab.ngram.reading import read_table
from lab.ngram.scratch import Scratch, corpus_tokens, first_share, repeated_share


@dataclass(frozen=True)
class Assumptions:
    target: OneOf(*toy.NAMES) = "large"                # Toy model that is the target.
    top_k: Within(1, 64) = 4                           # Successors kept for each context.
    orders: tuple[Within(2, 6), ...] = (2, 3, 4)       # The n of each table's n-grams.
    shares: tuple[Within(0.001, 1.0), ...] = (0.016, 0.063, 0.25, 1.0)  # Shares of the corpus.
    prompts: Within(1, 256) = 6                        # Prompts of each text.
    prompt_tokens: Within(8, 160) = 32                 # Length of a prompt, tokens.
    new_tokens: Within(8, 160) = 64                    # Tokens written after each.
    gamma: Within(1, 64) = 8                           # Longest draft, tokens.
    price: Within(0.0, 1.0) = 0.05                     # Of a drafted token, in steps of the target.
    big_tokens: Within(10_000, 200_000_000) = 4_000_000  # Random tokens in the tables timed.
    big_vocabulary: Within(16, 200_000) = 49_152       # Vocabulary size of those.
    queries: Within(10, 1_000_000) = 400               # Table lookups timed, one at a time.
    seed: NonNegative = 0                              # Of the random tokens and the queries.

    def __post_init__(self):
        for name in ("orders", "shares"):
            if len(set(getattr(self, name))) < 2:
                raise BadInput(f"--{name} needs two different values or more, to compare them")


A = assumptions(Assumptions)
print_text(" ".join(toy.past_training(A.prompt_tokens + A.new_tokens)))
ORDERS, SHARES = sorted(set(A.orders)), sorted(set(A.shares))
TOP, ALL = ORDERS[-1], SHARES[-1]  # the highest order; the largest share

# %% [markdown]
# ## 1. What a table knows
#
# A table of order n lists which tokens followed each n - 1 tokens of a corpus, the most frequent
# first. Order 2 is a bigram, order 3 a trigram. The corpus is part of the text that the toy was
# trained on: Python code, and prose about it. We ask each table for the next token at every place
# of text held out from that.
#
# - *known*: the share of places whose n - 1 tokens are in the table;
# - *right*: the share of all places where the table's first guess is the next token.

# %%
scratch = Scratch(out_folder())


def build_all():
    """{(share of the corpus, order): table}."""
    words, found = tokenizer("toy"), {}
    corpora = [corpus_tokens(toy.corpus(kind), words) for kind in toy.KINDS]
    for share in progress(SHARES, "building tables"):
        tokens = np.concatenate([first_share(ids, share) for ids in corpora])
        for order in ORDERS:
            found[share, order] = scratch.build(
                f"{share:g}", tokens, order, A.top_k, words.vocab_size, words.fingerprint)
    return found


def coverage(table, kind):
    """(known, right) of a table on held-out text: shares of its places."""
    text = np.array(toy.encode(toy.heldout(kind)))
    at = np.arange(TOP - 1, len(text))  # the same places for every order
    contexts = np.stack([text[at - n] for n in range(table.order - 1, 0, -1)], axis=1)
    ids, counts, totals = table.rows(contexts)
    right = (ids[:, 0] == text[at]) & (counts[:, 0] > 0)
    return float((totals > 0).mean()), float(right.mean())


tables = build_all()
code = {key: coverage(table, "code") for key, table in tables.items()}
heads = ["code: known", "code: right", "prose: known", "prose: right"]
print_table("growing", ["order", "tokens", "MB", *heads],
            [[t.order, t.n_tokens, t.nbytes / 1e6, *code[key], *coverage(t, "prose")]
             for key, t in tables.items()], formats={"MB": ".2f"} | dict.fromkeys(heads, ".0%"))

# %%
growth = {order: code[ALL, order][1] / code[SHARES[0], order][1] for order in ORDERS}
observe("long-contexts-grow", "With {n:.0f} times the corpus, order {low} is right {b:.2f} times as"
        " often on code, and order {top}, {x:.2f} times.", n=ALL / SHARES[0], low=ORDERS[0],
        top=TOP, b=growth[ORDERS[0]], value=growth[TOP], at_least=growth[ORDERS[0]])
observe("known-contexts", "Order {top} knows {x:.2f} times as many contexts of code as order {n}.",
        top=TOP, n=ORDERS[-2], value=code[ALL, TOP][0] / code[ALL, ORDERS[-2]][0], at_most=1)

# %% [markdown]
# ## 2. Which text to draft for
#
# The greedy text of a small model repeats itself, and a lookup drafts well on repeats. So we
# measure on four texts, and say how much each repeats: the share of its runs of 8 tokens that
# occurred in it before.
#
# - *greedy code*: what the target writes after prompts of held-out code;
# - *again*: the target is asked once more for what it has just written;
# - *code* and *prose*: held-out text, as if the target wrote exactly that. This text is fresh.

# %%
target = toy.load(A.target)


def greedy(prompts):
    """[(decoder, prompt, text)]: the target's own greedy text after each prompt."""
    return [(target, prompt, autoregressive_generate(target, prompt, A.new_tokens)[0].tolist())
            for prompt in prompts]


def as_it_stands(kind):
    """The same for held-out text: the decoder writes just that."""
    return [(KnownText(text, target), text[:A.prompt_tokens], text)
            for text in toy.prompts(kind, A.prompts, A.prompt_tokens + A.new_tokens)]


def repeated(name):
    """The share that repeats earlier text, on average over the requests of a text."""
    return float(np.mean([repeated_share(text) for _, _, text in texts[name]]))


texts = {"greedy code": greedy(toy.prompts("code", A.prompts, A.prompt_tokens))}
texts["again"] = greedy([[*text, toy.EOS, *prompt] for _, prompt, text in texts["greedy code"]])
texts |= {kind: as_it_stands(kind) for kind in toy.KINDS}
print_table("texts", ["text", "repeated"], [[name, repeated(name)] for name in texts],
            title="Runs of 8 tokens that occurred before", formats={"repeated": ".0%"})
observe("fresh", "Of the held-out code {x:.1%} repeats earlier text.",
        value=repeated("code"), at_most=0.05)

# %% [markdown]
# ## 3. What is accepted
#
# The drafter has several sources of drafts, called *tiers*, and asks them in turn. First the
# lookup: it copies what followed the longest match in the text at hand. Then, token by token, the
# table of the highest order that knows the context.
#
# - *lookup*: no tables. *to 3*: the lookup, and the tables up to order 3.
# - *priced*: all tables, but a token is drafted only while its chance of being accepted is worth
#   its price. The drafter learns these chances, tier by tier, from what was accepted so far.
#
# The price, assumed, is what a drafted token adds to a round, in steps of the target. So *tokens a
# step* is tau / (1 + price x drafts a round). alpha is the accepted share of tested tokens.

# %%
def with_tables(share, highest, price=0.0):
    """The lookup, and the tables of a share of the corpus up to this order."""
    return NgramDrafter([tables[share, n] for n in ORDERS if n <= highest], price=price)


def drafted(drafter, text):
    """(the rounds on all requests of a text, how many of these come out differently)."""
    runs, wrong = [], 0
    for decoder, prompt, whole in texts[text]:
        made, run = speculative_generate(decoder, drafter, prompt, A.new_tokens, A.gamma)
        wrong += made.tolist() != whole
        runs.append(run)
    return Run.pool(runs), wrong


def draft_row(text, tiers):
    """A row of the table below."""
    run, _ = runs[text, tiers]
    drafts = run.drafted / len(run.rounds)
    alpha = run.alpha if run.drafted else None
    return [text, tiers, drafts, alpha, run.tau, run.tau / (1 + A.price * drafts)]


drafters = {"lookup": NgramDrafter(price=0)} | {f"to {n}": with_tables(ALL, n) for n in ORDERS}
drafters["priced"] = with_tables(ALL, TOP, A.price)
runs = {(text, name): drafted(drafters[name], text) for text in texts for name in drafters}
print_table("drafts", ["text", "tiers", "drafts a round", "alpha", "tau", "tokens a step"],
            [draft_row(*key) for key in runs],
            title=f"{A.prompts} requests of each, gamma {A.gamma}, price {A.price:g}")
observe("same-text", "Of {n} requests {x} come out differently than by plain greedy decoding.",
        n=len(runs) * A.prompts, value=sum(wrong for _, wrong in runs.values()), at_most=0)
observe("lookup-repeats", "On a text asked for again, the lookup alone gives {x:.2f} times the"
        " tokens a round that it gives on fresh code.", at_least=1.5,
        value=draft_row("again", "lookup")[4] / draft_row("code", "lookup")[4])
observe("tables-add", "On fresh prose the tables add {x:.2f} tokens a round to the lookup.",
        value=draft_row("prose", f"to {TOP}")[4] - draft_row("prose", "lookup")[4], at_least=0.1)
observe("price", "On fresh prose, asking whether a token is worth its price gives {x:.2f} times the"
        " tokens a step.", at_least=1,
        value=draft_row("prose", "priced")[5] / draft_row("prose", f"to {TOP}")[5])

# %%
grown = {(share, kind): drafted(with_tables(share, TOP), kind)[0].tau
         for share in progress(SHARES, "a growing corpus") for kind in toy.KINDS}
print_table("tiers-growing", ["share of the corpus", "code: tau", "prose: tau"],
            [[share, grown[share, "code"], grown[share, "prose"]] for share in SHARES],
            title="Tokens a round with all tables, on fresh text")
observe("corpus-adds", "{n:.0f} times the corpus changes tokens a round on fresh code by {x:+.2f}.",
        n=ALL / SHARES[0], value=grown[ALL, "code"] - grown[SHARES[0], "code"], at_least=0)

# %% [markdown]
# ## 4. What reading costs
#
# Now two larger tables, of random tokens with a real model's vocabulary. A disk is read in pages of
# 4096 bytes. A query is *cold* when the system must fetch the page, and *warm* when it still has
# it in memory. *mmap* reads a page when it is first touched, *ram* reads the whole file at once.
# The row of a bigram is at the place that its token's id says: one read. A trigram is found by
# binary search: each halving reads one more place; the first places are the same for all. *pages
# predicted* is how many different pages all queries together should touch.
#
# For comparison, Python reads one number at a random place in memory as large as the table.

# %%
def timed(order):
    """Random queries to a table of this order, timed."""
    rng = np.random.default_rng(A.seed)
    drawn = rng.integers(A.big_vocabulary, size=A.big_tokens, dtype=np.uint32)
    starts = rng.integers(A.big_tokens - order, size=A.queries)
    table = scratch.build("random", drawn, order, A.top_k, A.big_vocabulary, "none")
    table.close()
    contexts = np.stack([drawn[starts + i] for i in range(order - 1)], axis=1)
    return read_table(table.path, contexts)


reading = {order: timed(order) for order in progress((2, 3), "reading")}
heads = ["us/query", "pages in memory", "MB read"]
print_table("lookups", ["order", "MB", "file", "state", *heads[:2], "pages predicted", "MB read"],
            reading[2].rows + reading[3].rows, measured=heads, formats={"pages predicted": ".0f"},
            title=f"{A.queries} queries, one at a time")
record_samples("seconds of a query", reading[2].samples | reading[3].samples)
observe("single-trigram", "A warm trigram takes as long as {x:.1f} memory reads of {b:.0f} ns.",
        b=reading[3].one_read * 1e9, value=reading[3].warm.median / reading[3].one_read,
        at_most=40, measured=True, not_judged=disturbed(reading[3].warm.quartiles, "a warm query"))
observe("few-pages", "All trigram queries together touch {x:.1f} times as many pages as all bigram"
        " queries.", value=reading[3].pages / reading[2].pages, at_least=2)
scratch.close()
