from torch import nn

from .blocks import Head, Residual


class Network(nn.Module):
    def __init__(self, columns, shape):
        super().__init__()
        self.enter = nn.Linear(columns, shape.width)
        self.layers = nn.ModuleList(
            Residual(shape.width, drop=shape.drop) for _ in range(shape.depth)
        )
        self.head = Head(shape.width)

    def forward(self, inputs):
        values = self.enter(inputs)
        for layer in self.layers:
            values = layer(values)
        return self.head(values)
