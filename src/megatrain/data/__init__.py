"""What a run reads: sources, formats, chat templates, labels, packing, and the order of its steps."""

from megatrain.data.account import DataReport, SourceAccount
from megatrain.data.loader import Loader, StepBatch
from megatrain.data.prepare import Prepared, prepare
from megatrain.data.samples import Sample, Samples
from megatrain.data.tokenizer import load_tokenizer

__all__ = [
    "DataReport",
    "Loader",
    "Prepared",
    "Sample",
    "Samples",
    "SourceAccount",
    "StepBatch",
    "load_tokenizer",
    "prepare",
]
