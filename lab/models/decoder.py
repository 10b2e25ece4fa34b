"""A causal language model that transformers loads, behind the protocol of decode_lab."""

from __future__ import annotations

import inspect
from contextlib import contextmanager
from dataclasses import replace
from textwrap import shorten

import numpy as np
import torch

from lab.models.admission import admit, context_limit
from lab.models.cache import ModelCache, cache_name, first_line, why_not
from lab.models.images import Images
from lab.models.kernels import as_loaded, read_bytes
from lab.models.paths import TreeAsPaths
from lab.models.pending import Pending, check_settled
from lab.support.errors import BadInput
from lab.support.vocabulary import fingerprint, without_a_row
from llm_math import ModelShape, element_bytes, from_hf_config

BYTES_NAMES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}  # in llm_math, hw_specs


class HFDecoder:
    """A transformers causal LM as a `decode_lab.Decoder` (and `Text`, `Timing`): one growing sequence with a cache.

    Attention-only models go back by dropping the last rows of every layer. Layers with a sliding window keep all
    their rows here and see the window through the mask, so that they go back across its edge. Hybrids, some of whose
    layers hold a convolution's last inputs (LFM2, LFM3), go back through the past that transformers records for them,
    as far as the last commit, which trims it. What cannot be used (a recurrent state as in Mamba, a forward that is
    wrong with a cache) is BadInput at construction, by a check on the model itself (lab.models.admission).

    model: a loaded ...ForCausalLM. tokenizer: its transformers tokenizer, or None where only ids are used.
    image_processor: of a model that reads images (LFM3-VL), which `see` and `show` take.
    tree_as_paths: a tree is sent as a batch of its root-to-leaf paths, as the model has no place for a tree's mask.
    notes: sentences about this model that a reader should see once. moves: counts what changed the cache; a draft that
    reads it sees by it that it has moved.
    """

    random = False  # True for drawn weights: times are real, acceptance means nothing
    tree_as_paths = False  # until `_admit` has looked
    moves = 0

    def __init__(self, model, tokenizer=None, name: str = "model", image_processor=None):
        reason = self._why_not(model)
        if reason:
            raise BadInput(f"{name} ({type(model).__name__}) cannot be used: {reason}.")
        config = model.config.get_text_config(decoder=True)
        self.model, self.hf_tokenizer, self.name = model.eval(), tokenizer, name
        self.config = config
        self.vocab_size = int(config.vocab_size)
        self.max_length, note = context_limit(config)
        self.notes = (f"{name}: {note}",) if note else ()
        self.device, self.dtype = model.device, model.dtype
        self.dtype_name = str(model.dtype).removeprefix("torch.")
        self.tokenizer = None if tokenizer is None else fingerprint(tokenizer)
        self.eos = _eos_ids(model, tokenizer)
        self.images = Images(self, image_processor)
        parameters = inspect.signature(model.forward).parameters
        self._takes_positions = "position_ids" in parameters
        self._cache_name = cache_name(model)
        self._last_row = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}
        self.hidden = torch.empty(0, config.hidden_size, device=self.device, dtype=self.dtype)
        self._pending = Pending(self)
        self._reset()
        reason = self._admit()
        if reason:
            raise BadInput(f"{name} ({type(model).__name__}) cannot be used: {reason}.")

    def _why_not(self, model) -> str:
        """What the model's class and configuration say against it; "" for nothing."""
        return why_not(model)

    def _admit(self) -> str:
        """What a check on the model says against it; "" for nothing. Sets `tree_as_paths`."""
        return admit(self)

    def _reset(self):
        self.cache = ModelCache(self.config)
        self._settle(0)

    def _settle(self, committed: int) -> None:
        """The cache holds the sequence's first `committed` tokens, for good, and nothing is pending."""
        self.moves += 1
        self.committed = committed
        self._pending.clear()
        self._tree: TreeAsPaths | None = None                  # where the pending tokens were sent as paths

    # -- the Decoder protocol ------------------------------------------------------------------------------

    @property
    def length(self) -> int:
        """Tokens of the sequence: committed, and sent since."""
        return self.committed + len(self._pending)

    @property
    def rewind_floor(self) -> int:
        """A cache of rows goes back to any length; a state no further than to the last commit."""
        return self.committed if self.cache.recorded else 0

    def send(self, tokens, parents=None) -> torch.Tensor:
        """Run tokens (n,) behind the sequence, or as nodes of a tree, in one forward -> logits (n, V) on the device.

        parents: as `decode_lab.Decoder.send` takes them. Where the forward fails, all is as it was before.
        """
        with self._unless_it_fails():
            n = len(self._pending.add(tokens, parents))
            self.moves += 1
            if self._tree is not None or (not self._pending.is_chain and self.tree_as_paths):
                return self._send_paths(n)
            return self._send_rows(n)

    def prefill(self, tokens) -> None:
        """Send and commit a chain whose predictions nobody reads: the output head runs on the last row only."""
        check_settled(self)
        with self._unless_it_fails():
            n = len(self._pending.add(tokens))
            self._send_rows(n, **self._last_row)
        self.cache.settle()
        self._settle(self.committed + n)

    @torch.inference_mode()
    def commit(self, nodes) -> None:
        """Of the tokens sent since the last commit this path stays, root first; the rest is forgotten."""
        nodes = self._pending.path(nodes)
        if self._tree is not None:
            if nodes:
                self.cache.append(self.committed + np.arange(len(nodes)))
                self._tree.append_to(self.cache, nodes)
        else:
            first = self.cache.rows - len(self._pending)
            self.cache.select([first + i for i in nodes], first)
        self.cache.settle()
        self._settle(self.committed + len(nodes))

    def rewind(self, length: int) -> None:
        """Forget all tokens past `length`; 0 empties the cache. BadInput below `rewind_floor`."""
        if length == 0:
            self._reset()
            return
        left = self._pending.rewound(length)
        self.moves += 1
        if left < 0:
            self.cache.truncate(self.cache.rows - (0 if self._tree is not None else len(self._pending)) + left)
            self._settle(length)
            return
        if self._tree is None:
            self.cache.truncate(self.cache.rows - len(self._pending) + left)
        self._pending.cut(left)
        if left == 0:
            self._tree = None

    # -- the one forward -----------------------------------------------------------------------------------

    def _send_rows(self, n: int, **options) -> torch.Tensor:
        """Send the last n pending nodes as n rows of the cache -> logits (n, V)."""
        positions = self._pending.positions(n)
        if not self._pending.is_chain:
            options["attention_mask"] = self._mask(n)
        self.cache.append(positions)
        return self._forward(np.array(self._pending.tokens[-n:])[None], positions[None], self.cache.hf, **options)[0]

    def _mask(self, n: int) -> torch.Tensor:
        """(1, 1, n, rows and n) what is added to the attention scores of the last n pending nodes."""
        before = self.cache.rows - (len(self._pending) - n)                      # rows of what is committed
        hidden = np.concatenate([np.zeros((n, before), bool), ~self._pending.visible(n)], axis=1)
        # Added, as every attention implementation of transformers accepts that.
        mask = torch.zeros(hidden.shape, dtype=self.dtype, device=self.device)
        mask.masked_fill_(torch.from_numpy(hidden).to(self.device), torch.finfo(self.dtype).min)
        return mask[None, None]

    def _send_paths(self, n: int) -> torch.Tensor:
        """Send all that is pending as a batch of paths, on a copy of the cache -> logits (n, V) of the last n nodes."""
        every = len(self._pending)
        if self._tree is None:                                   # a chain before the tree goes with it
            self.cache.truncate(self.cache.rows - (every - n))
        tree = TreeAsPaths(self._pending.parents, self.cache)
        batch = tree.batch(self._pending.tokens)
        positions = np.tile(self.committed + np.arange(tree.deepest), (len(batch), 1))
        logits = self._forward(batch, positions, tree.hf).flatten(0, 1)
        rows = torch.tensor(tree.places(range(every - n, every)), device=self.device)
        self._tree, self.hidden = tree, self.hidden[rows]
        return logits[rows]

    @torch.inference_mode()
    def _forward(self, ids: np.ndarray, positions: np.ndarray, cache, **options) -> torch.Tensor:
        """Logits (B, n, V) of ids (B, n) at positions (B, n); rows of images stand where they were placed."""
        options[self._cache_name] = cache
        if self._takes_positions:
            options["position_ids"] = torch.from_numpy(np.array(positions)).to(self.device)
        options |= self.images.embeddings(ids, positions) or {"input_ids": torch.from_numpy(ids).to(self.device)}
        # Only here, as other decoders may run the same model.
        hook = self.model.base_model.register_forward_hook(self._see_hidden)
        try:
            return self.model(use_cache=True, **options).logits
        finally:
            hook.remove()

    def _see_hidden(self, module, inputs, output):
        self.hidden = output[0].flatten(0, 1)

    @contextmanager
    def _unless_it_fails(self):
        """Where the body raises (out of memory, Ctrl-C, bad input), length and cache go back to what they were."""
        n, tree, hidden, mark = len(self._pending), self._tree, self.hidden, self.cache.mark()
        try:
            yield
        except BaseException:
            self._pending.cut(n)
            self._tree, self.hidden = tree, hidden
            self.cache.back_to(mark)
            raise

    # -- beside the protocol -------------------------------------------------------------------------------

    def see(self, path) -> torch.Tensor:
        """The rows (n, d) of an image file (see Images.see)."""
        return self.images.see(path)

    def show(self, tokens, images=(), at: int = 0) -> list[int]:
        """Place images in the sequence -> the ids from position `at` on (see Images.show)."""
        return self.images.show(tokens, images, at)

    def as_loaded(self):
        """A context in which the model runs PyTorch's own products (see kernels.as_loaded)."""
        return as_loaded(self.model)

    def shape(self) -> ModelShape:
        """This model's llm_math.ModelShape, weights at the bytes of its dtype. BadInput where not
        modelled."""
        return replace(from_hf_config(self.config, self.name), bytes_per_weight=element_bytes(self.kv_dtype))

    def shape_or_reason(self) -> tuple[ModelShape | None, str]:
        """(`shape`, ""), or None and a sentence on why nothing is predicted from this model's configuration."""
        try:
            return self.shape(), ""
        except BadInput as error:
            return None, ("What the configuration predicts is left out, and bytes are counted on what was loaded: "
                          f"{error}.")

    def streamed_bytes(self) -> int:
        """Bytes of weights that a forward over one token reads, counted on the loaded model (kernels.read_bytes)."""
        return sum(read_bytes(self.model).values())

    @property
    def kv_dtype(self) -> str:
        """The dtype's name in llm_math and hw_specs."""
        return BYTES_NAMES[self.dtype_name]

    def synchronize(self) -> None:
        """Wait until the device has done what was asked of it, so that a clock read next to it means
        something."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, without special tokens."""
        return self._codec().encode(text, add_special_tokens=False)

    def chat(self, message: str) -> list[int]:
        """Token ids of a user's message in the model's chat template; of the plain text where it has none.

        BadInput for a message with a token that the model has no row for.
        """
        text = self.render([{"role": "user", "content": message}])
        ids = self._codec().encode(message) if text is None else self.encode(text)
        unknown = next((token for token in ids if token >= self.vocab_size), None)
        if unknown is not None:
            raise without_a_row(self, unknown, f'The message "{shorten(message, 60)}"')
        return ids

    def render(self, turns) -> str | None:
        """The text of a conversation in the model's chat template, up to where the answer begins; None without one.

        turns: {"role", "content"} dicts, as transformers' apply_chat_template takes them. BadInput where the template
        refuses them.
        """
        codec = self._codec()
        if not codec.chat_template:
            return None
        try:
            return codec.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
        except Exception as error:  # a template is a program: it may raise anything
            raise BadInput(f"{self.name}'s chat template refuses these messages: {first_line(error)}") from error

    def decode(self, tokens) -> str:
        """The text of token ids, special tokens left out."""
        return self._codec().decode([int(t) for t in tokens], skip_special_tokens=True)

    def _codec(self):
        if self.hf_tokenizer is None:
            raise BadInput(f"{self.name} was made without a tokenizer, so it takes token ids only")
        return self.hf_tokenizer


def _eos_ids(model, tokenizer) -> tuple[int, ...]:
    """Every id at which generation stops, sorted."""
    found: set[int] = set()
    for source in (getattr(model, "generation_config", None), model.config, tokenizer):
        ids = getattr(source, "eos_token_id", None)
        found.update([] if ids is None else [ids] if isinstance(ids, int) else ids)
    return tuple(sorted(token for token in found if token >= 0))     # some configurations write -1 for none
