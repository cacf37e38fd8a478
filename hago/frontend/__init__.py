"""Frontend: from PyTorch models and data sets to Graphs and batches."""
