# %% [markdown]
# # 04. Speculative sampling
#
# **Question.** How can a weaker model write most of a text without changing its distribution, and how many
# tokens does a forward of the target then yield?
#
# **Watch for.** What a refusal draws from. The wrong use of the rule, which the same checks catch. On which
# side of the truth each of two predictions errs when acceptances come in bursts.
#
# **Takes.** about 9 s; needs numpy, matplotlib, tokenizers, safetensors.
#
# **Words.** A round: the draft proposes gamma tokens, one target forward verifies them, the rule accepts some
# (each with rate alpha), and the target adds a token of its own, the bonus token. tau is tokens per round,
# bonus token included.
#
# **Leaves out.** What a round costs on hardware (demo 05) and trees (demo 06). Cost appears only as c, the
# time of one draft step over one target step; verifying gamma + 1 tokens counts as one target step.

# %%
from dataclasses import dataclass

from console import (Alpha, BadInput, Fraction, NonNegative, OneOf, Positive, Within, assumptions, figure,
                     observe, print_table, print_text, progress, sliders, subplots)

import numpy as np

from decode_lab import (Run, Sampler, acceptance_probability, autoregressive_generate, overlap,
                        residual, speculative_generate)
from lab.drafters.model import ModelDrafter
from lab import toy
from lab.measure.exactness import (PROPOSALS, Misreporting, Table, distances, exact_acceptance, joint,
                                    transitions)
from lab.toy.transformer import TransformerLM, config_like, truncate
from llm_math import alpha_from_tau, best_gamma, expected_tokens, speedup, tau_from_positions

DRAFTS = ("small", "medium", "large-exit", *(f"first-{n}" for n in range(1, 6)))


@dataclass(frozen=True)
class Assumptions:
    p_a: Fraction = 0.3  # target's probability of token a in the two-token example
    q_a: Fraction = 0.8  # draft's probability of token a there
    vocabulary: Within(2, 12) = 5  # tokens of the small random models
    samples: Within(1, 1_000_000) = 3000  # tokens sampled from each of them
    alphas: tuple[Alpha, ...] = (0.35, 0.5, 0.6, 0.7, 0.8, 0.9)  # acceptance rates of the tables
    costs: tuple[Positive, ...] = (0.05, 0.1, 0.2, 0.5)  # c of the tables
    tokens_per_s: Positive = 82.0  # a speed that somebody reports
    passes_per_s: Positive = 59.0  # ceiling of that machine, target passes per second (demo 01)
    taus: tuple[Positive, ...] = (1.8, 2.0)  # tokens per pass that may stand behind the report
    report_gamma: Within(1, 256) = 3  # at this draft length
    gammas: tuple[Within(1, 256), ...] = (1, 3, 5)  # draft lengths of the tables, and measured on the toy
    gamma_max: Within(2, 256) = 8  # draft length at which acceptance is measured, to predict the others
    drafts: tuple[OneOf(*DRAFTS), ...] = ("small", "medium", "first-5")  # first-N: N layers of the target
    prompts: Within(1, 64) = 3  # prompts of held-out code, and as many of prose
    new_tokens: Within(4, 400) = 40  # tokens generated after each
    easy: Fraction = 0.95  # alpha after an easy token of the two-state text
    hard: Fraction = 0.25  # alpha after a hard one
    stay: Fraction = 0.9  # chance that easy follows easy, and hard follows hard
    seed: NonNegative = 0  # of everything random

    def __post_init__(self):
        if not all(1 <= tau <= self.report_gamma + 1 for tau in self.taus):
            raise BadInput(f"--taus are {min(self.taus)} to {max(self.taus)}, but --report-gamma {self.report_gamma} "
                           f"gives at least 1 and at most {self.report_gamma + 1}")
        if not max(self.gammas) < self.gamma_max < self.new_tokens / 2:
            raise BadInput(f"--gamma-max is {self.gamma_max}, but must be above each of --gammas, of which the largest "
                           f"is {max(self.gammas)}, and below half of --new-tokens, {self.new_tokens}")


A = assumptions(Assumptions)

# %% [markdown]
# ## 1. The rule by hand
#
# The draft draws x from q; the target knows p. Accept x with probability min(1, p(x)/q(x)); after a refusal
# draw from the residual, max(p − q, 0) over its sum. What the draft proposes too often is refused just as
# often as the residual needs for what it proposes too rarely.

# %%
p, q = np.array([A.p_a, 1 - A.p_a]), np.array([A.q_a, 1 - A.q_a])
accept = [acceptance_probability(p, x, q) if q[x] > 0 else 1.0 for x in (0, 1)]
accepted, rest = q * accept, residual(p, 0, q)
output = accepted + (1 - accepted.sum()) * rest
print_table("one-round", ["step", "a", "b"],
            [["target p", *p], ["draft q: x is drawn", *q], ["min(1, p/q): x is accepted", *accept],
             ["drawn and accepted", *accepted], ["residual", *rest],
             ["refused, then drawn from it", *(output - accepted)], ["output", *output]],
            title="A round with one draft token", formats={"a": ".3f", "b": ".3f"})
observe("output-as-target",
        "The output is a in {a:.1%} of rounds, as the target wants, though the draft proposes a in {q:.1%}.",
        a=output[0], q=q[0], holds=np.abs(output - p).max() < 1e-15 and abs(q[0] - p[0]) > 0.01)
observe("accepted-share",
        "The draft's token is accepted in {taken:.1%} of rounds: alpha = sum of min(p, q) = {alpha:.3f}.",
        taken=accepted.sum(), alpha=overlap(p, q), holds=abs(accepted.sum() - overlap(p, q)) < 1e-15)

# %% [markdown]
# ## 2. A whole round, enumerated and sampled
#
# Random tables stand for the models: the next token depends on the last one. All drafts, acceptances and
# refusals of a round are enumerated with the probabilities that the loop uses; the distribution of the next
# gamma + 1 tokens (the target writes what the round leaves open) is compared with plain decoding's.
#
# Then the loop samples. χ² is taken over the transitions from token to token; its p-value is the share of
# plain samples of the same size with a larger χ². Their total variation (TV) is the noise floor.

# %%
rng = np.random.default_rng(A.seed)
P, other = rng.dirichlet(np.ones(A.vocabulary), (2, A.vocabulary))
Q = (P + other) / 2
rows = []
for gamma, name in [(1, "one drawn"), (3, "one drawn"), *((2, name) for name in list(PROPOSALS)[1:])]:
    plain = joint(P, Q, gamma + 1, 0, None)
    off = np.abs(joint(P, Q, gamma + 1, gamma, PROPOSALS[name]) - plain).max()
    rows.append([name, gamma, len(plain), float(off)])
print_table("exact", ["candidates at a position", "gamma", "sequences", "largest difference"], rows,
            title="Distribution of gamma + 1 tokens: a round against plain decoding",
            formats={"largest difference": ".1e"})
*right, wrong = [row[-1] for row in rows]
observe("lossless",
        "A round has the target's distribution to float64 rounding: no sequence is off by more than "
        "{off:.0e}.", off=max(right), holds=max(right) < 16 * np.finfo(float).eps)
observe("check-can-fail",
        "The check can fail: with the wrong use of the rule, some sequence is off by {off:.3f}.", off=wrong,
        holds=wrong > 1e-6)

# %%
rows = []
for name, drafter, gamma in [("plain decoding", None, 0), ("gamma = 1", ModelDrafter(Table(Q)), 1),
                             ("gamma = 3", ModelDrafter(Table(Q)), 3),
                             ("WRONG, as above", Misreporting(ModelDrafter(Table(Q), Sampler(0.0)), Q), 3)]:
    tokens, run = (speculative_generate(Table(P), drafter, [0], A.samples, gamma, 1.0, rng) if drafter
                   else autoregressive_generate(Table(P), [0], A.samples, 1.0, rng))
    counts = transitions(tokens, len(P))
    tv, chi_square = distances(counts, P)
    plain_tv, plain_chi = distances(rng.multinomial(counts.sum(1), P, (2000, len(P))), P)
    p_value = (1 + (plain_chi >= chi_square).sum()) / (1 + len(plain_chi))
    rows.append([name, run.tau, chi_square, P.size - len(P), p_value, tv, np.median(plain_tv)])
print_table("sampled", ["decoding", "tau", "chi-square", "dof", "p-value", "TV", "noise floor"], rows,
            title=f"{A.samples} sampled tokens against the target's distribution",
            formats={"chi-square": ".1f", "p-value": ".4f", "TV": ".4f", "noise floor": ".4f"})
*right, wrong = rows
observe("like-plain",
        "Every lossless run looks like a plain sample of its size: the smallest p-value is {p:.3f}, above "
        "0.001.", p=min(row[4] for row in right), holds=min(row[4] for row in right) > 0.001)
observe("wrong-shows",
        "The wrong one does not: its p-value is below 0.001, its TV {x:.1f} times the noise floor.",
        x=wrong[5] / wrong[6], holds=wrong[4] < 0.001)

# %% [markdown]
# ## 3. Tokens per forward, and what they buy
#
# With an independent chance alpha per draft token, a round yields E = (1 − alpha^(gamma + 1)) / (1 − alpha)
# tokens, for gamma draft steps of cost c and one target forward: speedup E / (gamma c + 1). Backwards: a speed
# above the machine's ceiling in passes (forwards) per second says how many tokens each must yield at least,
# and E says which alpha that takes.

# %%
print_table("textbook", ["alpha", *(f"E, gamma {gamma}" for gamma in A.gammas), *(f"c = {c:g}" for c in A.costs)],
            [[alpha, *(expected_tokens(alpha, gamma) for gamma in A.gammas),
              *("{0}: {1:.2f}x".format(*best_gamma(alpha, c)) for c in A.costs)] for alpha in A.alphas],
            title="Tokens per forward; best gamma and its speedup", formats={"alpha": ".2f"})
pays = [(best_gamma(alpha, c)[1] > 1, alpha > c) for alpha in A.alphas for c in A.costs]
observe("pays-above-c",
        "Speculation pays in {n} of these {of} cases, not in all: exactly where alpha is above c.", of=len(pays),
        n=sum(pay for pay, _ in pays), holds=0 < sum(pay for pay, _ in pays) < len(pays) and all(a == b for a, b in pays))
least, low, high = A.tokens_per_s / A.passes_per_s, min(A.taus), max(A.taus)
observe("above-ceiling",
        "{speed:g} tokens/s under a ceiling of {ceiling:g} passes/s are at least {least:.2f} tokens per "
        "pass: not plain decoding.", speed=A.tokens_per_s, ceiling=A.passes_per_s, least=least,
        holds=least > 1)
observe("alpha-meant",
        "{low:g} to {high:g} tokens per pass at gamma = {gamma} are enough for that, and mean an alpha of "
        "{a:.2f} to {b:.2f}.", low=low, high=high, gamma=A.report_gamma,
        a=alpha_from_tau(low, A.report_gamma), b=alpha_from_tau(high, A.report_gamma), holds=low >= least)

# %% tags=["notebook"]
sliders(lambda alpha, gamma, c: print_table("slider",
    ["tokens per pass", "speedup", "best gamma", "its speedup"],
    [[expected_tokens(alpha, gamma), speedup(alpha, gamma, c), *best_gamma(alpha, c)]]),
    alpha=(0.0, 0.95, 0.05, 0.7), gamma=(0, 16, 1, 3), c=(0.0, 0.5, 0.01, 0.1))

# %% [markdown]
# ## 4. The formula against measured rounds
#
# alpha is predicted without speculation: the mean of the sum of min(p, q) over a text that the target wrote
# alone. Then the loop runs at the largest gamma, and its acceptance predicts tau at the others twice: by the
# textbook formula with one alpha, and by 1 + a1 + a1 a2 + …, where ai is the acceptance at draft position i.


# %%
def draft_model(name):
    """A toy model with an empty cache; first-N: the first N layers of the target."""
    (params, config), n = toy.load_params("large"), name.removeprefix("first-")
    return toy.load(name) if n == name else TransformerLM(
        truncate(params, int(n)), config_like(config, n_layers=int(n)), name)


def predicted_alpha(target, draft, texts, sampler):
    """Mean overlap at the new tokens of the texts; after a token accepted; after one refused."""
    alphas = np.array([[overlap(sampler.probs(a), sampler.probs(b)) for a, b in zip(*rows)] for rows in zip(
        *(model.full_logits(texts)[:, PROMPT - 1:-1] for model in (target, draft)))])
    before, now = alphas[:, :-1], alphas[:, 1:]
    return alphas.mean(), *((w * now).sum() / max(w.sum(), 1e-9) for w in (before, 1 - before))


PROMPT, target, prompts, texts, alphas, taus = 32, toy.load("large"), [], {}, [], []
for sentence in toy.past_training(PROMPT + A.new_tokens):
    print_text(sentence)
for ids in (toy.encode(toy.heldout("code")), toy.encode(toy.heldout("prose"))):
    prompts += [ids[i:i + PROMPT] for i in np.linspace(0, len(ids) - PROMPT, A.prompts).astype(int)]
for T in (0, 1):
    texts[T] = np.array([autoregressive_generate(target, ids, A.new_tokens, T, rng)[0] for ids in prompts])
for name, T in progress([(name, T) for T in texts for name in A.drafts], "speculating"):
    drafter, runs = ModelDrafter(draft_model(name)), {}
    for gamma in (*A.gammas, A.gamma_max):
        pooled = Run.pool([speculative_generate(target, drafter, prompt, A.new_tokens, gamma, T, rng)[1]
                           for prompt in prompts])
        runs[gamma] = Run([r for r in pooled.rounds if r.drafted == gamma])       # none cut short by the end
    longest = runs[A.gamma_max]
    alphas.append([name, T, *predicted_alpha(target, drafter.model, texts[T], Sampler(T)),
                   Run.pool(list(runs.values())).alpha])
    taus += [[name, T, gamma, runs[gamma].tau, expected_tokens(longest.alpha, gamma),
              tau_from_positions(longest.acceptance[:gamma])] for gamma in A.gammas]
print_table("toy-alpha", ["draft", "T", "predicted", "after accepted", "after refused", "measured"], alphas,
            title="alpha on the toy: predicted (also by the fate of the token before), measured")
print_table("toy-tau", ["draft", "T", "gamma", "measured", "textbook", "by position"], taus, title="tau on the toy")
miss, measured = max(abs(row[2] - row[5]) for row in alphas), np.array([row[3:] for row in taus]).T
observe("alpha-predicted",
        "Predicted without speculation, alpha is off by at most {miss:.3f}: less than 0.1.", miss=miss,
        holds=miss < 0.1)
for name, predicted in zip(("the textbook formula", "the acceptance by position"), measured[1:]):
    error = predicted / measured[0] - 1
    observe(f"tau-{'textbook' if 'formula' in name else 'position'}",
            "tau by {name} is off by {size:.1%} on average, less than 10 % ({bias:+.1%} with its sign).",
            name=name, size=np.abs(error).mean(), bias=error.mean(), holds=np.abs(error).mean() < 0.1)
    if len(error) >= 4 and measured[0].std() * predicted.std() > 0:    # of fewer, a correlation says nothing
        r = np.corrcoef(predicted, measured[0])[0, 1]
        observe(f"correlation-{'textbook' if 'formula' in name else 'position'}",
                "Its correlation with the measured is {r:.3f}, above 0.8.", r=r, holds=r > 0.8)

# %% [markdown]
# A text of easy and hard tokens shows where independence breaks. If each kind mostly follows itself,
# acceptances come in bursts. A round starts where the last one ended, mostly after a refusal, so where it is
# hard: the formula, with the same alpha everywhere, expects too much. A shorter gamma ends more rounds inside
# an easy stretch, so acceptances measured at a larger gamma expect too little: they are exact at their own
# gamma only. Nothing is sampled: the two models are tables of next-token probabilities, P and Q; min(P, Q)
# weighs the accepted tokens, P − min(P, Q) those drawn after a refusal.


# %%
rows, kinds = [], np.array([[A.easy], [A.hard], [0]])
for name, stay in (("independent", 0.5), ("bursts", A.stay)):
    p = np.array([[stay, 1 - stay, 0], [1 - stay, stay, 0], [0.5, 0.5, 0]])    # easy, hard, never
    q = kinds * p + (1 - kinds) * [0, 0, 1]                                    # the rest of q is never right
    positions, alpha = exact_acceptance(p, q, A.gamma_max)
    rows += [[name, gamma, tau_from_positions(exact_acceptance(p, q, gamma)[0]),
              expected_tokens(alpha, gamma), tau_from_positions(positions[:gamma])] for gamma in A.gammas]
print_table("bursts", ["text", "gamma", "exact", "textbook", "by position"], rows,
            title=f"tau of the easy and hard text; both predictions know only gamma = {A.gamma_max}")
exact, *predicted = np.array([row[2:] for row in rows]).T
errors = np.array([tau / exact - 1 for tau in predicted]).reshape(2, 2, -1)     # prediction, text, gamma
observe("exact-if-independent", "Where acceptances are independent, both predictions are exact.",
        holds=np.abs(errors[:, 0]).max() < 1e-9)
observe("bursts-mislead",
        "In bursts the textbook is too high, by up to {over:.1%}, and the acceptance by position at a larger "
        "gamma too low, by up to {under:.1%}.", over=errors[0, 1].max(), under=-errors[1, 1].min(),
        holds=errors[0, 1].min() > 0.01 and errors[1, 1].max() < -0.01)

fig, (left, right) = subplots(1, 2, size=(9, 4))
for name, tau, error, mark in zip(("textbook", "by position"), measured[1:], errors, "ox"):
    left.plot(measured[0], tau, mark, label=name)
    right.plot(A.gammas, 100 * error[1], mark + "-", label=name)
left.axline((1, 1), slope=1, color="grey", lw=1)
left.set(xlabel="tau, measured on the toy", ylabel="tau, predicted", title="The toy's drafts, by gamma")
left.legend()
right.axhline(0, color="grey", lw=1)
right.set(xlabel="gamma", ylabel="error of the prediction, %", xticks=A.gammas,
          title="A text whose acceptances come in bursts")
right.legend(loc="center right")
figure("tau-predicted", fig, "tau predicted from one alpha and from the acceptance by position")
