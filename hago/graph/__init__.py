"""The network: nodes and edges, import from torch.export, passes over it, running it in float."""
