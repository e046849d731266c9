"""pytorch_geometric#1415: a graph convolution with a weight matrix for every edge takes gigabytes for 900 nodes."""

import torch
from torch import nn

torch.manual_seed(0)
NODES, EDGES, WIDTH = 300, 1500, 48


class EdgeConv(nn.Module):
    def __init__(self, width, edge_width):
        super().__init__()
        self.width = width
        self.edge_net = nn.Sequential(nn.Linear(edge_width, 64), nn.ReLU(), nn.Linear(64, width * width))
        self.root = nn.Linear(width, width)

    def forward(self, x, edges, features):
        weight = self.edge_net(features).view(-1, self.width, self.width)
        message = torch.bmm(x[edges[0]].unsqueeze(1), weight).squeeze(1)
        return self.root(x).index_add(0, edges[1], message)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(8, WIDTH)
        self.conv = EdgeConv(WIDTH, 5)
        self.out = nn.Linear(WIDTH, 1)

    def forward(self, x, edges, features):
        x = self.inp(x).relu()
        for _ in range(3):
            x = self.conv(x, edges, features).relu()
        return self.out(x)


model = Net()
optimizer = torch.optim.Adam(model.parameters())
for _ in range(20):
    loss = model(torch.randn(NODES, 8), torch.randint(NODES, (2, EDGES)), torch.randn(EDGES, 5)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
