"""A counted forward is the forward, with the toy's own counts."""

import numpy as np
import pytest

from lab.toy.counting import counted
from lab.toy.transformer import QCFG, TransformerLM, init_params


def test_a_forward_is_counted_on_its_own():
    lm, tokens = TransformerLM(init_params(QCFG, 0), QCFG), [3, 1, 4, 1, 5]
    read = counted(lm, lm.prefill, tokens[:-1])
    assert read.logits is None and read.seconds > 0
    step = counted(lm, lm.send, tokens[-1:])
    assert read.flops + step.flops == lm.flops and read.bytes + step.bytes == lm.bytes_read
    assert step.flops == QCFG.shape().flops(1, 4)
    whole = counted(lm, lm.full_logits, [tokens])
    assert step.logits.shape == whole.logits.shape == (QCFG.vocab_size,)
    assert whole.logits == pytest.approx(step.logits, abs=1e-4) and np.isfinite(whole.logits).all()
