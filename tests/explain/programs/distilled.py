"""A small classifier learns from a large one: two models are called in each step, one of them without a graph."""

import torch
from torch import nn

torch.manual_seed(0)
teacher = nn.Sequential(nn.Linear(256, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 100)).eval()
student = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Dropout(0.1), nn.Linear(256, 100))
optimizer = torch.optim.SGD(student.parameters(), lr=0.05, momentum=0.9, nesterov=True)
for _ in range(5):
    x, labels = torch.randn(256, 256), torch.randint(100, (256,))
    with torch.inference_mode():
        soft = torch.softmax(teacher(x) / 4, dim=1)
    logits = student(x)
    apart = nn.functional.kl_div(torch.log_softmax(logits / 4, dim=1), soft.clone(), reduction="batchmean")
    loss = 0.7 * 16 * apart + 0.3 * nn.functional.cross_entropy(logits, labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
