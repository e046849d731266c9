"""A ResNet of timm."""

import timm
import torch

torch.manual_seed(0)
model = timm.create_model("resnet18", num_classes=10).train()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(5):
    images, labels = torch.randn(8, 3, 64, 64), torch.randint(10, (8,))
    loss = torch.nn.functional.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
