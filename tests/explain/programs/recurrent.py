"""A language model by an LSTM, whose state is carried over and detached."""

import torch
from torch import nn

torch.manual_seed(0)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.lstm, self.head = (
            nn.Embedding(500, 64),
            nn.LSTM(64, 128, 2, batch_first=True),
            nn.Linear(128, 500),
        )

    def forward(self, tokens, state):
        x, state = self.lstm(self.table(tokens), state)
        return self.head(x), state


model, state = Model(), None
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for _ in range(5):
    tokens = torch.randint(500, (16, 33))
    logits, state = model(tokens[:, :-1], state)
    state = tuple(each.detach() for each in state)
    nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.25)
    optimizer.step()
    optimizer.zero_grad()
