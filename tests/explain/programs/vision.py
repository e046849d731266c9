"""A vision transformer of timm, SGD with momentum, gradients zeroed in place."""

import timm
import torch

torch.manual_seed(0)
model = timm.create_model("vit_tiny_patch16_224", img_size=64, patch_size=4, depth=2, num_classes=10).train()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
criterion = torch.nn.CrossEntropyLoss()
for _ in range(10):
    images, labels = torch.randn(8, 3, 64, 64), torch.randint(10, (8,))
    optimizer.zero_grad(set_to_none=False)
    loss = criterion(model(images), labels)
    loss.backward()
    optimizer.step()
