"""Training with the Plan in the forward pass: fake quantization, ranges, schemes, fine-tuning."""

from hago.qat.finetuning import (
    Finetuned,
    FinetuneOptions,
    RunningTraining,
    TrainingCallback,
    Tuned,
    finetune,
    finetune_after_search,
    finetune_with,
    search_and_finetune,
)
from hago.qat.losses import LOSSES
from hago.qat.prepare import from_qat, prepare_qat
from hago.qat.run import TrainingStep
from hago.qat.scheme import TRAINING_SCHEMES
from hago.qat.state_dict import save_state, trained_state

__all__ = [
    "LOSSES",
    "TRAINING_SCHEMES",
    "FinetuneOptions",
    "Finetuned",
    "RunningTraining",
    "TrainingCallback",
    "TrainingStep",
    "Tuned",
    "finetune",
    "finetune_after_search",
    "finetune_with",
    "from_qat",
    "prepare_qat",
    "save_state",
    "search_and_finetune",
    "trained_state",
]
