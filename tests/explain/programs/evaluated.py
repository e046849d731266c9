"""EuroEval#973: training fits, evaluation does not: Trainer keeps the logits of the whole evaluation set."""

import tempfile

import torch
from transformers import BertConfig, BertForTokenClassification, Trainer, TrainingArguments

torch.manual_seed(0)
model = BertForTokenClassification(
    BertConfig(
        vocab_size=512,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=128,
        max_position_embeddings=128,
        num_labels=60,
    )
)


class Rows(torch.utils.data.Dataset):
    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        t = torch.arange(128) * (i + 1) % 512
        return {"input_ids": t, "attention_mask": torch.ones_like(t), "labels": t % 60}


with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        folder,
        per_device_train_batch_size=4,
        per_device_eval_batch_size=8,
        max_steps=4,
        eval_strategy="steps",
        eval_steps=1,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        save_strategy="no",
    )
    Trainer(
        model,
        arguments,
        train_dataset=Rows(64),
        eval_dataset=Rows(1024),
        compute_metrics=lambda p: {"n": float(len(p.predictions))},
    ).train()
