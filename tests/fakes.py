"""Scripted models and enumeration, under one short name for the tests."""

from lab.measure.enumeration import Paths, exact, outcomes, same_distribution  # noqa: F401
from lab.measure.scripted import (Counted, FakeDecoder, ProtocolError, ScriptedDrafter, chain, from_text,  # noqa: F401
                                  one_hot, random_decoder, script, table_logits, tree)
