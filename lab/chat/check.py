"""Beside the conversation: is the drafted text the plain one (--check), and what do drafts gain (--bench)?"""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from console import print_table, progress
from decode_lab import Run, Sampler, autoregressive_generate, speculative_generate
from lab.chat.screen import io_line, note
from lab.models.kept_prefix import same_start
from lab.ngram import disk

if TYPE_CHECKING:
    from lab.chat.conversation import Chat

RUNS = 3                                     # of --bench, after a warm-up


def compared(decoder, plain: list[int], other: list[int], n_prompt: int, sampler: Sampler) -> tuple[str, bool]:
    """(a sentence on whether two greedy texts are the same, whether their difference is a bug)."""
    if plain == other:
        return f"plain decoding writes the same {len(plain) - n_prompt} tokens.", False
    if not hasattr(decoder, "dtype_name"):
        at = same_start(plain, other) - n_prompt + 1
        return f"plain decoding writes another text from token {at} of the answer on: a bug.", True
    from lab.measure.divergence import explain_divergence
    found = explain_divergence(decoder, plain, other, sampler)
    assert found is not None                 # the texts differ
    tokens = ["its end" if token is None or token in decoder.eos else repr(decoder.decode([token]))
              for token in (found.plain, found.other)]
    return (f"plain decoding writes another text from token {found.position - n_prompt + 1} of the answer on, "
            f"{tokens[0]} for {tokens[1]}. Their logits are {found.margin:.2g} apart, and rounding in "
            f"{decoder.dtype_name} explains up to {found.allowed:.2g}: {'no' if found.explained else 'a'} bug.",
            not found.explained)


def bench(chat: Chat, message: str) -> None:
    """Time plain and drafted decoding in turn, in this process, and print what came out."""
    prompt, settings = chat.prompt(message), chat.settings
    made: dict[str, list[tuple[np.ndarray, Run]]] = {"plain": [], "drafted": []}
    for k in progress(range(RUNS + 1), "plain and drafted in turn"):
        for name in list(made)[::-1 if k % 2 else 1]:
            options = dict(rng=np.random.default_rng(settings.seed), sampler=chat.sampler, eos=chat.model.eos)
            if name == "plain":
                made[name].append(autoregressive_generate(chat.model, prompt, settings.max_new_tokens, **options))
            else:
                before, cold = disk.io_use(), chat.open_tables()
                drafter = chat.drafter()
                assert drafter is not None   # `checked` refuses --bench with --gamma 0
                made[name].append(speculative_generate(chat.model, drafter, prompt, settings.max_new_tokens,
                                                       settings.gamma, **options))
                used = disk.io_use() - before
    made = {name: found[1:] for name, found in made.items()}     # without the warm-up
    base, rows = [run.per_token for _, run in made["plain"]], []
    for name, found in made.items():
        runs = [run for _, run in found]
        pooled = Run.pool(runs)
        later = pooled.later().rounds
        rows.append([name, median(run.n_tokens for run in runs), 1 / median(run.per_token for run in runs),
                     1e3 * pooled.ttft, pooled.tau, sum(r.drafted for r in later) / len(later),
                     pooled.alpha if pooled.drafted else None, 1e3 * median(r.draft_s for r in later),
                     1e3 * median(r.verify_s for r in later),
                     median(b / run.per_token for b, run in zip(base, runs))])
    times = ["tokens/s", "TTFT, ms", "draft, ms", "verify, ms", "speedup"]
    columns = ["", "tokens", "tokens/s", "TTFT, ms", "tau", "drafts", "alpha", "draft, ms", "verify, ms", "speedup"]
    formats = {"tokens": "g", "tau": ".2f", "drafts": ".1f", "alpha": ".2f", "speedup": ".2f"}
    print_table("compared", columns, rows, measured=times, formats=formats,
                title=f"{chat.model.name}, medians of {RUNS} runs in turn; drafts and times of a round")
    tiers = made["drafted"][0][1].by_source                      # the same in every run
    if tiers:
        rows = [[name, tested, accepted, accepted / tested] for name, (tested, accepted) in tiers.items()]
        print_table("tiers", ["tier", "tested", "accepted", "share"], rows, title="Acceptance by tier",
                    formats={"share": ".2f"})
    if chat.tables:
        note(io_line(chat.tables, [type(table.use)() for table in chat.tables], used,
                     cold if settings.cold_table else None))
    if chat.sampler.greedy:
        (plain, _), (drafted, _) = made["plain"][0], made["drafted"][0]
        sentence, bug = compared(chat.model, plain.tolist(), drafted.tolist(), len(prompt), chat.sampler)
        note(f"Check: {sentence}")
        chat.status = int(bug)
